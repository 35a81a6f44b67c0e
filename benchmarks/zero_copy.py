"""FlashInfer reading T where it lies, through the link, without a copy: alone and beside DMA."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from .layers import PAGE_TOKENS, Layers, synchronize
from .model import HEAD_DIM, KV_HEADS, Q_HEADS
from .probes import Copies
from .scale import Scale, Shape
from .stats import Spread

_COPIES_PER_PASS = 8
_PASSES = 5


def zero_copy(layers: Layers, scale: Scale) -> tuple[Spread, Spread, Spread]:
    """GB/s of (attention alone, attention beside copies, those copies)."""
    plan = layers.place(Shape(1, scale.stream_tokens), share=0.0)
    bytes_, attend = layers.host_bytes(plan)["T"], _attention(layers, plan.reads[0].transfer_pages)
    alone = [bytes_ / _timed(attend) / 1e9 for _ in range(1 + scale.repeats)][1:]
    copies, beside = Copies(scale.copy_bytes), []
    copies.queue(_COPIES_PER_PASS * _PASSES)
    stream = torch.cuda.Stream()
    while copies.under_way:
        with torch.cuda.stream(stream):
            begun_s = time.perf_counter()
            attend()
            stream.synchronize()
            beside.append(bytes_ / (time.perf_counter() - begun_s) / 1e9)
    # The last pass may have ended alone.
    return Spread.of(alone), Spread.of(beside[:-1] or beside), Spread.of(copies.gbps()[1:])


def _attention(layers: Layers, pages: np.ndarray) -> Callable[[], None]:
    """One query over `pages` in every layer, planned."""
    from sglang_inplacekv.executors.flashinfer_paged import (
        Geometry,
        PagedAttention,
        PagedLists,
        make_workspace,
    )

    arena, dtype = layers.regions.arena, layers.shape.dtype
    q, *_ = layers.inputs(1)
    ones = np.ones(1, dtype=np.int32)
    lists = PagedLists(ones, ones * len(pages), arena.zero_copy_index(pages), ones * PAGE_TOKENS)
    attention = PagedAttention(make_workspace(), "NHD")
    attention.plan(Geometry(Q_HEADS, KV_HEADS, HEAD_DIM, PAGE_TOKENS, dtype, dtype, HEAD_DIM**-0.5), lists)

    def attend() -> None:
        for layer in range(layers.shape.layers):
            attention.run(q, arena.zero_copy_layer(layer))

    return attend


def _timed(work: Callable[[], None]) -> float:
    synchronize()
    begun_s = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - begun_s
