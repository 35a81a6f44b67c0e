"""How fast T reaches the GPU, against one long copy, and the joint bound of DMA and CPU over one memory."""

from __future__ import annotations

import time

import torch

from sglang_inplacekv.step_plan import StepPlan

from ..layers import Layers, qwen, synchronize
from ..probes import dram_read, joint, pinned_copy
from ..scale import Shape
from ..stats import Spread
from ..zero_copy import zero_copy


def run(context) -> None:
    scale, part = context.scale, context.part
    cuda = torch.cuda.is_available()
    if cuda:
        part.attempt("copy", lambda: part.row(what="H2D copy alone", gbps=pinned_copy(scale)))
    # Twice the tokens, so that scattered pages have no neighbours.
    layers = Layers(qwen(scale.stream_layers), 2 * scale.stream_tokens, max_batch=1)
    try:
        for scattered in (False, True):
            order = "scattered" if scattered else "adjacent"
            part.attempt(order, lambda s=scattered, o=order: _stream(layers, scale, part, s, o))
        if cuda:
            part.attempt("zero-copy", lambda: _zero_copy(layers, scale, part))
        part.attempt("read", lambda: part.row(what="DRAM read alone", gbps=dram_read(layers.team, scale)))
        if cuda:
            part.attempt("joint", lambda: _joint(layers, scale, part))
    finally:
        layers.close()


def _stream(layers: Layers, scale, part, scattered: bool, order: str) -> None:
    """The tile stream of a decode whose pages are all T: without attention, and as a step runs it."""
    plan = layers.place(Shape(1, scale.stream_tokens), share=0.0, scattered=scattered)
    inputs, bytes_ = layers.inputs(1), layers.host_bytes(plan)["T"]
    measures = {"T stream under attention": lambda: layers.step(plan, inputs)}
    if torch.cuda.is_available():
        measures = {"T stream": lambda: _drive_tiles(layers, plan)} | measures
    for what, once in measures.items():
        seconds = [once() for _ in range(1 + scale.repeats)][1:]
        gbps = Spread.of(bytes_ / s / 1e9 for s in seconds)
        part.row(what=f"{what}, {order} pages", gbps=gbps, bytes=bytes_)


def _drive_tiles(layers: Layers, plan: StepPlan) -> float:
    """Take every tile of a forward as soon as it is there. Reaches into CudaExecutor: only it holds the stream."""
    synchronize()
    begun_s = time.perf_counter()
    layers.executor.begin_forward(plan)
    stream = layers.executor._forward.stream
    for layer in range(layers.shape.layers):
        for _ in stream.tiles:
            stream.ready(layer, torch.cuda.current_stream())
            stream.read(torch.cuda.current_stream())
    synchronize()
    return time.perf_counter() - begun_s


def _zero_copy(layers: Layers, scale, part) -> None:
    alone, beside, copy = zero_copy(layers, scale)
    part.row(what="zero-copy attention alone", gbps=alone)
    part.row(what="zero-copy attention beside H2D", gbps=beside)
    part.row(what="H2D beside zero-copy attention", gbps=copy)


def _joint(layers: Layers, scale, part) -> None:
    read, copy = joint(layers.team, scale)
    part.row(what="DRAM read beside H2D", gbps=read)
    part.row(what="H2D beside DRAM read", gbps=copy)
