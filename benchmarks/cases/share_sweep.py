"""The share that the controller arrives at, and the one that `inplacekv plan` foretells, against a sweep of shares.

All pages are T, so that every share comes about by stealing and the KV is the same at each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from sglang_inplacekv.host_rates import measure_cpu, measure_link
from sglang_inplacekv.models import write_config
from sglang_inplacekv.planning import ModelKV, predict, read_model
from sglang_inplacekv.roofline import Line

from ..decoder import LayersDecoder
from ..experiments import distinct, settle, step_ms, sweep
from ..layers import PAGE_TOKENS, Layers
from ..scale import Shape

_ASSUMED_LINK = 10e9  # bytes a second, where there is no GPU and only the code is tried
_WARM_UP_STEPS = 2


@dataclass(frozen=True)
class _Host:
    """One model's layers, and what `plan` measures on the host."""

    name: str
    decoder: LayersDecoder
    model: ModelKV
    cpu: Line
    link: Line


def run(context) -> None:
    link = measure_link() if torch.cuda.is_available() else _ASSUMED_LINK
    for kind in context.scale.share.models:
        context.part.attempt(kind, partial(_measure_model, context, kind, link), needs_s=30)


def _measure_model(context, kind: str, link: float) -> None:
    scale = context.scale.share
    folder = write_config(kind, context.out / f"{kind}-{scale.layers}", layers=scale.layers)
    tokens = max(shape.batch * shape.context for shape in scale.shapes)
    layers = Layers(
        read_model(folder, PAGE_TOKENS), tokens, max_batch=max(shape.batch for shape in scale.shapes)
    )
    try:
        cpu, transfer = (
            measure_cpu(layers.model, layers.team),
            Line(0.0, layers.model.layer_token_bytes / link),
        )
        host = _Host(kind, LayersDecoder(layers), layers.model, cpu, transfer)
        for shape in scale.shapes:
            context.part.attempt(f"{kind} {shape}", partial(_measure, context, host, shape))
    finally:
        layers.close()


def _measure(context, host: _Host, shape: Shape) -> None:
    scale, decoder = context.scale.share, host.decoder
    case, pages = f"{host.name} {shape}", shape.batch * shape.context // PAGE_TOKENS
    predicted = predict(host.model, host.cpu, host.link, shape.batch, shape.context, 0, 0.0)
    decoder.fixed(0.0, steals=False)
    decoder.place(shape)
    auto = settle(decoder, scale.settle_steps)
    lines = dict(zip(("cpu", "link"), decoder.lines, strict=True))
    asked = (*scale.grid, *(auto + offset for offset in scale.near), predicted.share)
    shares = distinct(asked, pages)
    found = sweep(decoder, shares, scale.rounds, scale.round_steps)
    for share, steps in found.items():
        context.part.row(
            what="sweep",
            case=case,
            share=share,
            step_ms=step_ms(steps),
            layers=scale.layers,
            host_bytes=pages * PAGE_TOKENS * host.model.shape.token_bytes,
        )
    # As a server places pages: most of the CPU's share is C, in the layout and the memory made for it.
    decoder.fixed(auto, steals=True)
    decoder.place(shape)
    placed = decoder.steps(_WARM_UP_STEPS + scale.rounds * scale.round_steps)[_WARM_UP_STEPS:]
    context.part.row(
        what="controlled",
        case=case,
        auto_share=auto,
        predicted_share=distinct([predicted.share], pages)[0],
        predicted_ms=1e3 * predicted.step_s,
        placed_ms=step_ms(placed),
        placed_floor=placed[-1].floor,
        rates_gbps={
            name: host.model.layer_token_bytes / line.token_s / 1e9 for name, line in lines.items() if line
        },
        plan_gbps=[host.model.layer_token_bytes / line.token_s / 1e9 for line in (host.cpu, host.link)],
        fixed_us=1e6 * host.cpu.fixed_s,
    )
