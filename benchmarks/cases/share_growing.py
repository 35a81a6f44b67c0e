"""One sequence that grows: the controlled share against every fixed one, by total time."""

from __future__ import annotations

from ..decoder import LayersDecoder, Step
from ..experiments import growing
from ..layers import PAGE_TOKENS, Layers, qwen
from ..results import write_json
from ..stats import Spread

SERIES_FILE = "share_growing_series.json"


def run(context) -> None:
    scale, part = context.scale.share, context.part
    first, last = scale.growing_tokens
    layers = Layers(qwen(scale.layers), last, max_batch=1)
    decoder, shares = LayersDecoder(layers), ["auto", *scale.growing_shares]
    pages = range(first // PAGE_TOKENS, last // PAGE_TOKENS + 1, scale.growing_pages)
    runs: dict = {share: [] for share in shares}
    try:
        # Pins what will be T: done once, it is no cost of whichever share comes first.
        decoder.fixed(0.0, steals=False)
        growing(decoder, first, PAGE_TOKENS, pages)
        for turn in range(scale.growing_rounds):
            # There and back, as in a sweep.
            for share in shares if turn % 2 == 0 else reversed(shares):
                if share == "auto":
                    decoder.auto()
                else:
                    decoder.fixed(share, steals=False)
                runs[share].append(growing(decoder, first, PAGE_TOKENS, pages))
    finally:
        layers.close()
    for share, found in runs.items():
        part.row(
            what=f"{first} to {last} tokens",
            share=share,
            layers=scale.layers,
            steps=len(pages),
            total_s=Spread.of(sum(step.seconds for step in steps) for steps in found),
            last_share=found[-1][-1].share,
        )
    write_json(context.out / SERIES_FILE, [_point(step) for step in runs["auto"][-1]])


def _point(step: Step) -> dict:
    return {"tokens": step.tokens, "target": step.target, "share": step.share, "ms": 1e3 * step.seconds}
