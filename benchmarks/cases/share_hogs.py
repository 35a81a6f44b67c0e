"""Half way, something takes the link or the CPU away: how the share follows, and what following is worth."""

from __future__ import annotations

from functools import partial

import torch

from ..decoder import LayersDecoder
from ..experiments import Change, change, settle
from ..hogs import LinkHog, cpu_hog
from ..layers import PAGE_TOKENS, Layers, qwen
from ..results import write_json

SERIES_FILE = "share_hogs_series.json"
LINK, CPU = "link hog", "CPU hog"


def run(context) -> None:
    scale, series = context.scale.share, {}
    grown = scale.hog.batch * scale.hog_grow_steps * PAGE_TOKENS
    layers = Layers(
        qwen(scale.layers), scale.hog.batch * scale.hog.context + grown, max_batch=scale.hog.batch
    )
    try:
        decoder, link = LayersDecoder(layers), LinkHog()
        hogs = {LINK: link.working, CPU: partial(cpu_hog, layers.team.cores)}
        for name, hog in hogs.items():
            context.part.attempt(name, partial(_measure, context, decoder, name, hog, link, series))
    finally:
        layers.close()
    write_json(context.out / SERIES_FILE, series)


def _measure(context, decoder: LayersDecoder, name: str, hog, link: LinkHog, series: dict) -> None:
    """First with stealing, then with pages placed at the share that was right before the hog came."""
    scale, part = context.scale.share, context.part
    decoder.fixed(0.0, steals=False)
    decoder.place(scale.hog)
    share = settle(decoder, scale.settle_steps)
    for steals in (True, False):
        decoder.fixed(share, steals=steals)
        decoder.place(scale.hog)
        if steals:
            decoder.auto(share)
        outs = _Outputs(decoder)
        grow_steps = scale.hog_grow_steps if steals and name == CPU else 0
        found = change(decoder, scale.hog_steps, scale.hog_steps, hog, grow_steps, outs.note)
        case = f"{name}, {'stealing' if steals else 'placed'}"
        series[case] = _series(found)
        part.row(
            what=case,
            case=str(scale.hog),
            layers=scale.layers,
            steals=steals,
            **found.fields(),
            hog=f"{link.gbps:.1f} GB/s" if name == LINK else f"{len(decoder.layers.team.cores)} processes",
            difference=outs.difference,
        )


class _Outputs:
    """How far the outputs of a run's steps lie apart, of the largest output: by rounding alone, whatever the shares."""

    def __init__(self, decoder: LayersDecoder) -> None:
        self._decoder, self._first, self.difference = decoder, None, 0.0

    def note(self) -> None:
        out = self._decoder.out
        if self._first is None:
            self._first = out
        if not torch.isfinite(out).all():
            raise RuntimeError("an output is not finite")
        apart = float((out - self._first).abs().max() / self._first.abs().max())
        self.difference = max(self.difference, apart)


def _series(found: Change) -> dict:
    return {
        name: [{"target": s.target, "share": s.share, "floor": s.floor, "ms": 1e3 * s.seconds} for s in steps]
        for name, steps in (("before", found.before), ("after", found.after), ("grown", found.grown))
    }
