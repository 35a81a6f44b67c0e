"""The decode step that `inplacekv plan` foretells against the step, its share controlled, over all layers of whole models."""

from __future__ import annotations

from functools import partial

from ..decoder import Decoder
from ..experiments import settled, step_ms
from ..planned import Planned, each_shape
from ..scale import Shape


def run(context) -> None:
    scale = context.scale.share
    for kind in scale.models:
        measure = partial(each_shape, context, kind, scale.plan_layers, scale.plan_shapes, compare)
        context.part.attempt(kind, measure, needs_s=40)


def compare(part, scale, decoder: Decoder, planned: Planned, shape: Shape) -> None:
    """As in a server: pages are placed by the planned share, and the controller goes on from there."""
    predicted = planned.step(shape)
    decoder.auto(predicted.share)
    decoder.place(shape)
    steps = decoder.steps(2 * scale.plan_steps)[scale.plan_steps :]
    part.row(
        what="plan",
        case=f"{planned.name} {shape}",
        layers=planned.model.shape.layers,
        host_bytes=predicted.host_bytes,
        predicted_share=predicted.share,
        controlled_share=settled(steps),
        predicted_ms=1e3 * predicted.step_s,
        step_ms=step_ms(steps),
        resident_ms=1e3 * planned.rest_s,
    )
