"""Half way, something takes the link or the CPU away: how the share follows, and what following is worth."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch

from ..decoder import Decoder, LayersDecoder
from ..experiments import Change, change, settle
from ..hogs import LinkHog, cpu_hog
from ..layers import PAGE_TOKENS, Layers, qwen
from ..results import write_json

SERIES_FILE = "share_hogs_series.json"
LINK, CPU = "link hog", "CPU hog"


def run(context) -> None:
    scale = context.scale.share
    grown = scale.hog.batch * scale.hog_grow_steps * PAGE_TOKENS
    layers = Layers(
        qwen(scale.layers), scale.hog.batch * scale.hog.context + grown, max_batch=scale.hog.batch
    )
    series: dict[str, dict] = {}
    try:
        decoder, link, cores = LayersDecoder(layers), LinkHog(), layers.team.cores
        hogs = {
            LINK: (link.working, lambda: f"{link.gbps:.1f} GB/s"),
            CPU: (partial(cpu_hog, cores), lambda: f"{len(cores)} processes"),
        }
        for name, (hog, told) in hogs.items():
            follow = partial(compare, context.part, scale, decoder, name, hog, told, series)
            context.part.attempt(name, follow)
    finally:
        layers.close()
    write_json(context.out / SERIES_FILE, series)


def compare(
    part,
    scale,
    decoder: Decoder,
    name: str,
    hog: Callable[[], AbstractContextManager],
    told: Callable[[], str],
    series: dict[str, dict],
) -> None:
    """With stealing, and with pages placed at the share that was right before the hog came. told() says what the hog did."""
    decoder.fixed(0.0, steals=False)
    decoder.place(scale.hog)
    share = settle(decoder, scale.settle_steps)
    for steals in (True, False):
        decoder.fixed(share, steals=steals)
        decoder.place(scale.hog)
        if steals:
            decoder.auto(share)
        outs = Outputs(decoder)
        grow_steps = scale.hog_grow_steps if steals and name == CPU else 0
        found = change(decoder, scale.hog_steps, scale.hog_steps, hog, grow_steps, outs.note)
        what = f"{name}, {'stealing' if steals else 'placed'}"
        series[what] = _series(found)
        part.row(
            what=what,
            case=str(scale.hog),
            layers=scale.layers,
            **found.fields(),
            hog=told(),
            difference=outs.difference,
        )


class Outputs:
    """How far the outputs of a run's steps lie apart, of the largest output: by rounding alone, whatever the shares."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder, self._first, self.difference = decoder, None, 0.0

    def note(self) -> None:
        out = self._decoder.out
        if out is None:
            return
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
