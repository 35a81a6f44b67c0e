"""Released models, and what `inplacekv plan` foretells of their decode steps on this host."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sglang_inplacekv.models import write_config
from sglang_inplacekv.planning import ModelKV, Prediction, predict, read_model, with_rest
from sglang_inplacekv.probes import HostRates, measure_rates
from sglang_inplacekv.roofline import Line

from .decoder import LayersDecoder
from .layers import PAGE_TOKENS, Layers, device_type
from .scale import Shape

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
        return with_rest(self.cpu, self.rest_s, self.model).fixed_s

    def gbps(self, line: Line) -> float:
        return self.model.layer_token_bytes / line.token_s / 1e9

    def step(self, shape: Shape, device_bytes: int = 0) -> Prediction:
        """Of `shape` with so many bytes of D homes."""
        return predict(self.model, self.cpu, self.link, shape.batch, shape.context, device_bytes, self.rest_s)


# Adds rows: (part, scale, decoder, planned, shape).
Compare = Callable[[Any, Any, LayersDecoder, Planned, Shape], None]


def each_shape(
    context, kind: str, layer_count: int | None, shapes: Sequence[Shape], compare: Compare
) -> None:
    """Call `compare` for each of `shapes`, over so many layers of a released model, None being all of them."""
    scale, part = context.scale.share, context.part
    folder = write_config(kind, context.out / f"{kind}-{layer_count or 'whole'}", layers=layer_count)
    model = read_model(folder, PAGE_TOKENS)
    rest_s = _resident_s(model, scale)
    most_tokens = max(shape.batch * shape.context for shape in shapes)
    layers = Layers(model, most_tokens, max(shape.batch for shape in shapes))
    try:
        decoder = LayersDecoder(layers)

        def measure(shape: Shape) -> None:
            # Lines are measured for each: on a shared host, rates of a minute ago are other rates.
            lines = lines_of(measure_rates([layers.team.threads], layers.model, device_type()), layers.model)
            compare(part, scale, decoder, Planned(kind, layers.model, *lines, rest_s), shape)

        for shape in shapes:
            part.attempt(f"{kind} {shape}", partial(measure, shape))
    finally:
        layers.close()


def _resident_s(model: ModelKV, scale) -> float:
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


def lines_of(rates: HostRates, model: ModelKV) -> tuple[Line, Line]:
    """CPU and link, as `inplacekv plan` takes them."""
    return rates.lines(model) or (rates.cpu_line, Line(0.0, model.layer_token_bytes / _ASSUMED_LINK))
