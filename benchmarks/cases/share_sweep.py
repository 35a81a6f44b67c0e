"""The share that the controller arrives at, and the one that `inplacekv plan` foretells, against a sweep of shares.

All pages are T, so that every share comes about by stealing and the KV is the same at each.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise

import torch

from sglang_inplacekv.models import write_config
from sglang_inplacekv.planning import ModelKV, predict, read_model
from sglang_inplacekv.probes import measure_rates
from sglang_inplacekv.roofline import Line

from ..decoder import Decoder, LayersDecoder
from ..experiments import distinct, rounds_ms, settle, settled, step_ms, sweep
from ..layers import PAGE_TOKENS, Layers
from ..scale import Shape

_ASSUMED_LINK = 10e9  # bytes a second, where there is no GPU and only the code is tried
_WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Planned:
    """A model and what `inplacekv plan` measures for it on this host, and is told."""

    name: str
    model: ModelKV
    cpu: Line
    link: Line
    rest_s: float  # a step with all KV in D: --step-ms

    @property
    def fixed_s(self) -> float:
        """What a layer takes beside the CPU's attention."""
        return self.cpu.fixed_s + self.rest_s / self.model.shape.layers

    def gbps(self, line: Line) -> float:
        return self.model.layer_token_bytes / line.token_s / 1e9


def run(context) -> None:
    for kind in context.scale.share.models:
        context.part.attempt(kind, partial(_measure, context, kind), needs_s=30)


def _measure(context, kind: str) -> None:
    scale, part = context.scale.share, context.part
    folder = write_config(kind, context.out / f"{kind}-{scale.layers}", layers=scale.layers)
    most = max(shape.batch * shape.context for shape in scale.shapes)
    model = read_model(folder, PAGE_TOKENS)
    rest_s = resident_s(model, scale)
    layers = Layers(model, most, max(shape.batch for shape in scale.shapes))
    try:
        decoder = LayersDecoder(layers)
        for shape in scale.shapes:
            part.attempt(
                f"{kind} {shape}", partial(_measure_shape, part, scale, decoder, kind, rest_s, shape)
            )
    finally:
        layers.close()


def _measure_shape(part, scale, decoder: LayersDecoder, kind: str, rest_s: float, shape: Shape) -> None:
    compare(part, scale, decoder, planned_now(decoder.layers, kind, rest_s), shape)


def planned_now(layers: Layers, kind: str, rest_s: float) -> Planned:
    """On a shared host, rates of a minute ago are other rates."""
    return Planned(kind, layers.model, *_lines(layers.model, layers.team.threads), rest_s)


def resident_s(model: ModelKV, scale) -> float:
    """A step of the shortest shape with all KV in D. A longer one attends more of D, of which a spilled step has none."""
    shape = min(scale.shapes, key=lambda shape: shape.batch * shape.context)
    pages = shape.batch * (shape.context // PAGE_TOKENS + 1)
    layers = Layers(model, 0, shape.batch, device_pages=pages)
    try:
        plan, inputs = layers.place(shape, 0.0), layers.inputs(shape.batch)
        if plan.cpu_tokens or plan.transfer_tokens:
            raise RuntimeError(f"{shape} in {pages} pages of D reads {plan.attended_tokens(PAGE_TOKENS)}")
        seconds = [layers.step(plan, inputs) for _ in range(_WARM_UP_STEPS + scale.settle_steps)]
    finally:
        layers.close()
    return statistics.median(seconds[_WARM_UP_STEPS:])


def _lines(model: ModelKV, threads: int) -> tuple[Line, Line]:
    """CPU and link, as `inplacekv plan` measures them."""
    on_gpu = torch.cuda.is_available()
    rates = measure_rates([threads], model, "cuda" if on_gpu else "cpu")
    link = rates.link_line(model) if on_gpu else Line(0.0, model.layer_token_bytes / _ASSUMED_LINK)
    return rates.cpu_line, link


def compare(part, scale, decoder: Decoder, planned: Planned, shape: Shape) -> None:
    case, pages = f"{planned.name} {shape}", shape.batch * shape.context // PAGE_TOKENS
    predicted = predict(
        planned.model, planned.cpu, planned.link, shape.batch, shape.context, 0, planned.rest_s
    )
    decoder.fixed(0.0, steals=False)
    decoder.place(shape)
    auto, control = settle(decoder, scale.settle_steps, scale.settle_s), decoder.control
    assert control is not None
    asked = (*scale.grid, *(auto + offset for offset in scale.near), predicted.share)
    shares = distinct(asked, pages)
    found, controlled = sweep(decoder, shares, control, scale.rounds, scale.round_steps, scale.round_s)
    followed = list(chain.from_iterable(controlled))
    auto, lines = settled(followed), {"cpu": control.cpu, "link": control.transfer}
    for share, rounds in found.items():
        part.row(
            what="sweep",
            case=case,
            share=share,
            step_ms=step_ms(chain.from_iterable(rounds)),
            rounds_ms=rounds_ms(rounds),
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
        auto_ms=step_ms(followed),
        auto_rounds_ms=rounds_ms(controlled),
        auto_moves=sum(one.share != other.share for steps in controlled for one, other in pairwise(steps)),
        auto_steps=sum(len(steps) - 1 for steps in controlled),
        predicted_share=distinct([predicted.share], pages)[0],
        predicted_ms=1e3 * predicted.step_s,
        placed_ms=step_ms(placed),
        placed_floor=placed[-1].floor,
        rates_gbps={name: planned.gbps(line) for name, line in lines.items() if line},
        plan_gbps={"cpu": planned.gbps(planned.cpu), "link": planned.gbps(planned.link)},
        auto_fixed_us=1e6 * lines["cpu"].fixed_s if lines["cpu"] else None,
        plan_fixed_us=1e6 * planned.fixed_s,
        resident_ms=1e3 * planned.rest_s,
    )
