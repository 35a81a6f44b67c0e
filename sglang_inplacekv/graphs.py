"""CUDA graphs of the decode step, in two forms.

    device     all pages in D: SGLang's own FlashInfer backend, one graph for the whole step
    spilled    some page on the host: graphs of everything but attention, which runs eagerly between them

SGLang captures each batch size once per form (its "attention variants") and asks at each step which form the batch has. A step
that holds a host page can therefore never replay a graph that reads D alone.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import FullCudaGraphBackend
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import (
    BreakableCUDAGraph,
    BreakableCUDAGraphCapture,
)
from sglang.srt.model_executor.runner_utils.pool import graph_pool_capture_scope, graph_pool_replay_scope

DEVICE, SPILLED = "inplacekv-device", "inplacekv-spilled"


class DecodeForms:
    """SGLang's AttentionGraphVariants: which of the two graphs serves a batch."""

    capture_labels: ClassVar[tuple[str, ...]] = (DEVICE, SPILLED)

    def select(self, forward_batch) -> str:
        return get_attn_backend().choose_form(forward_batch)


class DecodeGraphs(FullCudaGraphBackend):
    """Whole graphs for the device form, SGLang's breakable ones for the spilled form."""

    def __init__(self, cuda_graph_runner) -> None:
        super().__init__(cuda_graph_runner)
        self._broken: dict[Any, BreakableCUDAGraph] = {}

    def capture_one(self, shape_key, forward_fn, capture_inputs=None, post_warmup_hook=None) -> None:
        if shape_key.attention_variant == DEVICE:
            super().capture_one(shape_key, forward_fn, capture_inputs, post_warmup_hook)
            return
        for _ in range(2):  # loads kernels and pays one-time set-up before the capture
            torch.cuda.synchronize()
            forward_fn()
        graph = BreakableCUDAGraph()
        with (
            graph_pool_capture_scope(),
            BreakableCUDAGraphCapture(graph, pool=self._pool, stream=self._capture_stream),
        ):
            self._outputs[shape_key] = forward_fn()
        self._broken[shape_key] = graph

    def can_run(self, forward_batch, shape_key) -> bool:
        return shape_key in self._broken or super().can_run(forward_batch, shape_key)

    def replay(self, shape_key, static_forward_batch, **kwargs):
        if shape_key not in self._broken:
            return super().replay(shape_key, static_forward_batch, **kwargs)
        with graph_pool_replay_scope():
            self._broken[shape_key].replay()
        return self._outputs[shape_key]

    def cleanup(self) -> None:
        self._broken.clear()
        super().cleanup()
