"""SGLang's attention backend: turns a ForwardBatch into spans and layers into executor calls. Glue, no maths.

A forward has one of two forms. If all its pages are homed in D, SGLang's own backend runs it over the device tensors. If any is
homed on the host, the executor runs it over the four regions.
"""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import eager_on_graph
from sglang.srt.model_executor.runner_utils.capture_mode import get_capture_attention_variant

from sglang_inplacekv.compat import BACKEND_NAME
from sglang_inplacekv.device_backend import make_device_backend
from sglang_inplacekv.executors.plan_fence import PlanFence
from sglang_inplacekv.forward_spans import spans_of
from sglang_inplacekv.graphs import DEVICE, SPILLED
from sglang_inplacekv.pool import RegionPool, pool_of
from sglang_inplacekv.step_plan import Span


class InplaceAttnBackend(AttentionBackend):
    """One per model runner. Requires one of our pools."""

    def __init__(self, runner) -> None:
        super().__init__()
        self.kv_index_translator = runner.kv_index_translator
        pool: RegionPool = pool_of(runner, RegionPool)
        self.pool = self.token_to_kv_pool = pool
        self.req_to_token_pool = runner.req_to_token_pool
        self._shape = pool.regions.shape
        self._device = make_device_backend(runner)
        self._on_gpu = pool.on_gpu
        self._last_layer = pool.start_layer + pool.layer_num - 1
        self._capturing = False
        self._planning = PlanFence() if pool.on_gpu else nullcontext()
        # Of the decode step whose graph is about to be replayed.
        self._chosen: list[Span] = []
        self._form: str | None = None

    # Eager forwards, and what both kinds share

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        self._capturing, spans = False, spans_of(forward_batch, self.pool.page_lists)
        is_decode = forward_batch.forward_mode.is_decode()
        # On a CPU stock computes a whole sequence again for each of its chunks, so it is given decodes alone.
        if (is_decode or self._on_gpu) and self.pool.all_in_device(spans):
            self.pool.begin_device_forward(spans, is_decode)
            self._device.init_forward_metadata(forward_batch)
        else:
            self.pool.begin_forward(spans, is_decode)
            if self._is_expanded_on(forward_batch) and not any(forward_batch.extend_prefix_lens_cpu):
                self._device.init_forward_metadata(forward_batch)

    def _is_expanded_on(self, forward_batch: ForwardBatch) -> bool:
        """Whether SGLang expands this forward's latent rows and its own kernels attend them (see mla.py)."""
        return self._on_gpu and self._shape.value_dim is not None and forward_batch.forward_mode.is_extend()

    def init_mha_chunk_metadata(
        self, forward_batch: ForwardBatch, disable_flashinfer_ragged: bool = False
    ) -> None:
        """SGLang has cut the prefixes of an expanded prefill into chunks."""
        self._device.init_mha_chunk_metadata(forward_batch, disable_flashinfer_ragged)
        if not self.pool.device_only:
            self.pool.begin_prefix(forward_batch)

    # Decode under CUDA graphs

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self._device.init_cuda_graph_state(max_bs, max_num_tokens)
        self.pool.executor.reserve_rows(max_bs)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return self._device.get_cuda_graph_seq_len_fill_value()

    def choose_form(self, forward_batch: ForwardBatch) -> str:
        """Which captured form serves this decode step. May be asked twice, and when no replay follows."""
        self._chosen = spans_of(forward_batch, self.pool.page_lists)
        self._form = DEVICE if self.pool.all_in_device(self._chosen) else SPILLED
        return self._form

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        form = get_capture_attention_variant() if in_capture else self._form
        if form not in (DEVICE, SPILLED):
            raise RuntimeError(
                f"a decode graph of form {form}: the hook on SGLang's graph variants did not take"
            )
        self._capturing = in_capture
        if form == SPILLED:
            if in_capture:
                self.pool.device_only, self.pool.plan = False, None
                self.pool.executor.begin_capture(forward_batch.batch_size)
            else:
                self.pool.begin_forward(self._chosen, True, graph_rows=forward_batch.batch_size)
            return
        if not in_capture and not self.pool.all_in_device(self._chosen):
            raise RuntimeError("a step that holds a host page must not replay a graph over D alone")
        self.pool.begin_device_forward([] if in_capture else self._chosen, is_decode=not in_capture)
        with self._planning:
            self._device.init_forward_metadata_out_graph(forward_batch, in_capture)

    # Layers

    def forward_decode(
        self, q, k, v, layer: RadixAttention, forward_batch: ForwardBatch, save_kv_cache=True, **kwargs
    ):
        if self.pool.device_only:
            return self._device.forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        parts = self._parts(k, v, layer, save_kv_cache, kwargs)
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim).contiguous()
        out = torch.empty(*q.shape[:2], self._shape.out_dim, dtype=q.dtype, device=q.device)
        executor, own = self.pool.executor, layer.layer_id - self.pool.start_layer
        executor.write_decoded(own, *parts)
        state = executor.decode_device(own, q, layer.scaling)
        self._decode_host(own, q, layer)
        executor.decode_merge(state, out)
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    @eager_on_graph
    def _decode_host(self, own: int, q: torch.Tensor, layer: RadixAttention) -> None:
        """The part of a spilled decode step that no graph can hold."""
        if self._capturing:
            return
        self.pool.executor.decode_host(own, q, layer.scaling)
        self._end_if_last(layer)

    def forward_extend(
        self, q, k, v, layer: RadixAttention, forward_batch: ForwardBatch, save_kv_cache=True, **kwargs
    ):
        if self.pool.device_only or self._is_expanded_on(forward_batch):
            out = self._device.forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
            if not self.pool.device_only and _is_last_call(forward_batch):
                self._end_if_last(layer)
            # SGLang merges chunks by LSEs of base e, FlashInfer's are of base 2.
            return (out[0], out[1] * math.log(2)) if isinstance(out, tuple) else out
        parts = self._parts(k, v, layer, save_kv_cache, kwargs)
        k, v = parts[0], parts[-1][..., : self._shape.out_dim]
        self.pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc), k, v)
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = torch.empty(*q.shape[:2], self._shape.out_dim, dtype=q.dtype, device=q.device)
        self.pool.executor.extend(layer.layer_id - self.pool.start_layer, q, k, v, layer.scaling, out)
        self._end_if_last(layer)
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    def _parts(self, k, v, layer, save_kv_cache, extra) -> tuple[torch.Tensor, ...]:
        """What is written: k and v, or the latent row that k is, of which v is the beginning.

        In the KV dtype: rounded once, so that the chunk attends what later chunks and steps will read.
        """
        if extra:
            raise RuntimeError(
                f"layer {layer.layer_id}: {', '.join(sorted(extra))} is not supported by {BACKEND_NAME}"
            )
        if not save_kv_cache or k is None or v is None:
            raise RuntimeError(
                f"layer {layer.layer_id}: attention without a KV write is not supported by {BACKEND_NAME}"
            )
        shape = (-1, self._shape.kv_heads, self._shape.head_dim)
        return tuple(part.to(self.pool.dtype).view(shape) for part in (k, v)[: self._shape.parts])

    def _end_if_last(self, layer: RadixAttention) -> None:
        if layer.layer_id == self._last_layer:
            self.pool.executor.end_forward()

    def support_triton(self) -> bool:
        return self._on_gpu


def _is_last_call(forward_batch: ForwardBatch) -> bool:
    """Of a layer's calls in an expanded prefill: over the chunk itself, then over each chunk of the prefixes."""
    if not any(forward_batch.extend_prefix_lens_cpu):
        return True
    last = forward_batch.num_prefix_chunks - 1
    return bool(forward_batch.attn_attend_prefix_cache) and forward_batch.prefix_chunk_idx == last
