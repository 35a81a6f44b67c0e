"""Attention of a decode step over all layers, without the model, at a range of CPU shares."""

from __future__ import annotations

from ..layers import Layers, qwen
from ..stats import Spread

_WARM_UP_STEPS = 2


def run(context) -> None:
    scale, part = context.scale, context.part
    tokens = max(shape.batch * shape.context for shape in scale.sweep)
    layers = Layers(qwen(scale.stream_layers), tokens, max(shape.batch for shape in scale.sweep))
    try:
        for share in scale.sweep_shares:
            for shape in scale.sweep:
                part.attempt(
                    f"{shape} at {share}", lambda s=shape, r=share: _measure(layers, scale, part, s, r)
                )
    finally:
        layers.close()


def _measure(layers: Layers, scale, part, shape, share: float) -> None:
    plan, inputs = layers.place(shape, share), layers.inputs(shape.batch)
    seconds = [layers.step(plan, inputs) for _ in range(_WARM_UP_STEPS + scale.repeats)][_WARM_UP_STEPS:]
    bytes_ = layers.host_bytes(plan)
    part.row(
        case=str(shape),
        share=share,
        layers=layers.shape.layers,
        step_ms=Spread.of(s * 1e3 for s in seconds),
        effective_share=bytes_["C"] / max(1, sum(bytes_.values())),
        host_bytes=sum(bytes_.values()),
    )
