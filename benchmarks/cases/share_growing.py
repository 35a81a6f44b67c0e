"""One sequence that grows: the controlled share against every fixed one, by total time."""

from __future__ import annotations

import statistics

from ..decoder import Decoder, LayersDecoder, Step
from ..experiments import growing
from ..layers import PAGE_TOKENS, Layers, qwen
from ..results import write_json
from ..stats import Spread

SERIES_FILE = "share_growing_series.json"
_TOLD_TOKENS = (2048, 8192, 32768, 65536)


def run(context) -> None:
    scale = context.scale.share
    layers = Layers(qwen(scale.layers), scale.growing_tokens[1], max_batch=1)
    try:
        steps = compare(context.part, scale, LayersDecoder(layers))
    finally:
        layers.close()
    write_json(context.out / SERIES_FILE, points(steps))


def compare(part, scale, decoder: Decoder) -> list[Step]:
    """Total times as rows. Returns the steps of the last run whose share was controlled."""
    first, last = scale.growing_tokens
    pages = range(first // PAGE_TOKENS, last // PAGE_TOKENS + 1, scale.growing_pages)
    shares = ("auto", *scale.growing_shares)
    runs: dict = {share: [] for share in shares}
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
    for share, found in runs.items():
        part.row(
            what=f"{first} to {last} tokens",
            share=share,
            layers=scale.layers,
            steps=len(pages),
            total_s=Spread.of(sum(step.seconds for step in steps) for steps in found),
            shares={f"{at // 1024}K": _share_at(found, at) for at in _TOLD_TOKENS if first <= at <= last},
        )
    return runs["auto"][-1]


def _share_at(runs: list[list[Step]], tokens: int) -> float:
    """Median over the runs, where the sequence is so long or is so first."""
    return statistics.median(next(step.share for step in steps if step.tokens >= tokens) for steps in runs)


def points(steps: list[Step]) -> list[dict]:
    """For the picture."""
    return [
        {"tokens": step.tokens, "target": step.target, "share": step.share, "ms": 1e3 * step.seconds}
        for step in steps
    ]
