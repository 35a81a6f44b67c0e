"""The share that the controller arrives at, and the one that `inplacekv plan` foretells, against a sweep of shares.

All pages are T, so that every share comes about by stealing and the KV is the same at each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from sglang_inplacekv.host_rates import measure_link, measure_teams
from sglang_inplacekv.models import write_config
from sglang_inplacekv.planning import ModelKV, predict, read_model
from sglang_inplacekv.roofline import Line

from ..decoder import Decoder, LayersDecoder
from ..experiments import distinct, settle, step_ms, sweep
from ..layers import PAGE_TOKENS, Layers
from ..scale import Shape

_ASSUMED_LINK = 10e9  # bytes a second, where there is no GPU and only the code is tried
_WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Planned:
    """A model and what `inplacekv plan` measures for it on this host."""

    name: str
    model: ModelKV
    cpu: Line
    link: Line

    def gbps(self, line: Line) -> float:
        return self.model.layer_token_bytes / line.token_s / 1e9


def run(context) -> None:
    for kind in context.scale.share.models:
        context.part.attempt(kind, partial(_measure, context, kind), needs_s=30)


def _measure(context, kind: str) -> None:
    scale, part = context.scale.share, context.part
    folder = write_config(kind, context.out / f"{kind}-{scale.layers}", layers=scale.layers)
    most = max(shape.batch * shape.context for shape in scale.shapes)
    layers = Layers(read_model(folder, PAGE_TOKENS), most, max(shape.batch for shape in scale.shapes))
    try:
        decoder, model = LayersDecoder(layers), layers.model
        planned = Planned(kind, model, *_lines(model, layers.team.threads))
        for shape in scale.shapes:
            part.attempt(f"{kind} {shape}", partial(compare, part, scale, decoder, planned, shape))
    finally:
        layers.close()


def _lines(model: ModelKV, threads: int) -> tuple[Line, Line]:
    on_gpu = torch.cuda.is_available()
    [team] = measure_teams([threads], model, "cuda" if on_gpu else "cpu")
    link = measure_link(model.layer_token_bytes * PAGE_TOKENS) if on_gpu else _ASSUMED_LINK
    return Line(team.hand_over_s, team.token_s), Line(0.0, model.layer_token_bytes / link)


def compare(part, scale, decoder: Decoder, planned: Planned, shape: Shape) -> None:
    case, pages = f"{planned.name} {shape}", shape.batch * shape.context // PAGE_TOKENS
    predicted = predict(planned.model, planned.cpu, planned.link, shape.batch, shape.context, 0, 0.0)
    decoder.fixed(0.0, steals=False)
    decoder.place(shape)
    auto = settle(decoder, scale.settle_steps)
    lines = dict(zip(("cpu", "link"), decoder.lines, strict=True))
    asked = (*scale.grid, *(auto + offset for offset in scale.near), predicted.share)
    found = sweep(decoder, distinct(asked, pages), scale.rounds, scale.round_steps)
    for share, steps in found.items():
        part.row(
            what="sweep",
            case=case,
            share=share,
            step_ms=step_ms(steps),
            layers=scale.layers,
            host_bytes=predicted.host_bytes,
        )
    # As a server places pages: most of the CPU's share is C, in the layout and the memory made for it.
    decoder.fixed(auto, steals=True)
    decoder.place(shape)
    placed = decoder.steps(_WARM_UP_STEPS + scale.rounds * scale.round_steps)[_WARM_UP_STEPS:]
    part.row(
        what="controlled",
        case=case,
        auto_share=auto,
        predicted_share=distinct([predicted.share], pages)[0],
        predicted_ms=1e3 * predicted.step_s,
        placed_ms=step_ms(placed),
        placed_floor=placed[-1].floor,
        rates_gbps={name: planned.gbps(line) for name, line in lines.items() if line},
        plan_gbps={"cpu": planned.gbps(planned.cpu), "link": planned.gbps(planned.link)},
        fixed_us=1e6 * planned.cpu.fixed_s,
    )
