"""The decode step that `inplacekv plan` foretells against the step, its share controlled, over all layers of whole models."""

from __future__ import annotations

from functools import partial

from sglang_inplacekv.models import write_config
from sglang_inplacekv.planning import predict, read_model

from ..decoder import Decoder, LayersDecoder
from ..experiments import settled, step_ms
from ..layers import PAGE_TOKENS, Layers
from ..scale import Shape
from .share_sweep import Planned, planned_now, resident_s


def run(context) -> None:
    for kind in context.scale.share.models:
        context.part.attempt(kind, partial(_measure, context, kind), needs_s=40)


def _measure(context, kind: str) -> None:
    scale, part = context.scale.share, context.part
    folder = write_config(kind, context.out / f"{kind}-whole", layers=scale.plan_layers)
    model = read_model(folder, PAGE_TOKENS)
    rest_s = resident_s(model, scale)
    shapes = scale.plan_shapes
    layers = Layers(model, max(shape.batch * shape.context for shape in shapes), max(s.batch for s in shapes))
    try:
        decoder = LayersDecoder(layers)
        for shape in shapes:
            part.attempt(
                f"{kind} {shape}", partial(_measure_shape, part, scale, decoder, kind, rest_s, shape)
            )
    finally:
        layers.close()


def _measure_shape(part, scale, decoder: LayersDecoder, kind: str, rest_s: float, shape: Shape) -> None:
    compare(part, scale, decoder, planned_now(decoder.layers, kind, rest_s), shape)


def compare(part, scale, decoder: Decoder, planned: Planned, shape: Shape) -> None:
    """As in a server: pages are placed by the planned share, and the controller goes on from there."""
    predicted = predict(
        planned.model, planned.cpu, planned.link, shape.batch, shape.context, 0, planned.rest_s
    )
    decoder.auto(predicted.share)
    decoder.place(shape)
    steps = decoder.steps(2 * scale.plan_steps)[scale.plan_steps :]
    part.row(
        what="plan",
        case=f"{planned.name} {shape}",
        layers=planned.model.shape.layers,
        host_bytes=predicted.host_bytes,
        predicted_share=predicted.share,
        share=settled(steps),
        predicted_ms=1e3 * predicted.step_s,
        step_ms=step_ms(steps),
        resident_ms=1e3 * planned.rest_s,
    )
