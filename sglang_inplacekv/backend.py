"""SGLang's attention backend: turns a ForwardBatch into spans and layers into executor calls. Glue, no maths."""

from __future__ import annotations

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from cpu_attn import SUPPORTED_HEAD_DIMS
from sglang_inplacekv.compat import BACKEND_NAME
from sglang_inplacekv.config import ConfigError
from sglang_inplacekv.pool import InplaceMHAPool
from sglang_inplacekv.step_plan import Span


class InplaceAttnBackend(AttentionBackend):
    """One per model runner. Requires InplaceMHAPool and the eager, non-overlapped path."""

    def __init__(self, runner) -> None:
        super().__init__()
        self.kv_index_translator = runner.kv_index_translator
        pool = runner.token_to_kv_pool
        if not isinstance(pool, InplaceMHAPool):
            raise RuntimeError(
                f"--attention-backend {BACKEND_NAME} got the KV pool {type(pool).__name__}: a hook did not take"
            )
        self.pool = pool
        self.req_to_token = runner.req_to_token_pool.req_to_token
        self._page_size = pool.page_size
        self._last_layer = pool.start_layer + pool.layer_num - 1

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        spans = self._spans(forward_batch)
        is_decode = forward_batch.forward_mode.is_decode()
        self.forward_metadata = self.pool.begin_forward(spans, is_decode)

    def _spans(self, forward_batch: ForwardBatch) -> list[Span]:
        lengths = forward_batch.seq_lens_cpu.tolist()
        rows = forward_batch.req_pool_indices.tolist()
        if forward_batch.forward_mode.is_decode():
            prefixes = [length - 1 for length in lengths]
        elif forward_batch.forward_mode.is_extend():
            prefixes = list(forward_batch.extend_prefix_lens_cpu)
        else:
            raise RuntimeError(
                f"forward mode {forward_batch.forward_mode} is not supported by {BACKEND_NAME}"
            )
        size = self._page_size
        longest = max(lengths, default=0)
        # The one place where page ids reach the host: a page-strided slice of SGLang's own table.
        pages = (
            (self.req_to_token[forward_batch.req_pool_indices, 0:longest:size] // size).long().cpu().numpy()
        )
        labels = forward_batch.rids or [f"row {row}" for row in rows]
        return [
            Span(str(labels[i]), rows[i], pages[i, : -(-length // size)], prefixes[i], length)
            for i, length in enumerate(lengths)
        ]

    def forward_decode(
        self, q, k, v, layer: RadixAttention, forward_batch: ForwardBatch, save_kv_cache=True, **kwargs
    ):
        k, v = self._write(k, v, layer, forward_batch, save_kv_cache, kwargs)
        heads = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = self.pool.executor.decode(layer.layer_id - self.pool.start_layer, heads, layer.scaling)
        return self._finish(out, q, layer)

    def forward_extend(
        self, q, k, v, layer: RadixAttention, forward_batch: ForwardBatch, save_kv_cache=True, **kwargs
    ):
        k, v = self._write(k, v, layer, forward_batch, save_kv_cache, kwargs)
        heads = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = self.pool.executor.extend(layer.layer_id - self.pool.start_layer, heads, k, v, layer.scaling)
        return self._finish(out, q, layer)

    def _write(self, k, v, layer, forward_batch, save_kv_cache, extra) -> tuple[torch.Tensor, torch.Tensor]:
        if extra:
            raise RuntimeError(
                f"layer {layer.layer_id}: {', '.join(sorted(extra))} is not supported by {BACKEND_NAME}"
            )
        if not save_kv_cache or k is None or v is None:
            raise RuntimeError(
                f"layer {layer.layer_id}: attention without a KV write is not supported by {BACKEND_NAME}"
            )
        # Rounded once: the chunk attends what later chunks and steps will read.
        shape = (-1, self.pool.head_num, self.pool.head_dim)
        k, v = k.to(self.pool.dtype).view(shape), v.to(self.pool.dtype).view(shape)
        self.pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc), k, v)
        return k, v

    def _finish(self, out: torch.Tensor, q: torch.Tensor, layer) -> torch.Tensor:
        if layer.layer_id == self._last_layer:
            self.pool.executor.end_forward()
        return out.to(q.dtype).reshape(-1, layer.tp_q_head_num * layer.v_head_dim)

    def support_triton(self) -> bool:
        return self.req_to_token.is_cuda


def check_model(runner) -> None:
    """Refuse, by name, any attention layer that this version would compute wrongly."""
    if runner.use_mla_backend:
        raise ConfigError(
            f"--attention-backend {BACKEND_NAME}: asked an MLA model, possible are GQA and MHA models"
        )
    pool = runner.token_to_kv_pool
    layers = [(name, m) for name, m in runner.model.named_modules() if isinstance(m, RadixAttention)]
    for name, layer in layers:
        _check_layer(name, layer, pool)
    # Layers write and stream in this order, once each per forward.
    expected = list(range(pool.start_layer, pool.start_layer + pool.layer_num))
    found = sorted(layer.layer_id for _, layer in layers)
    if found != expected:
        raise ConfigError(
            f"--attention-backend {BACKEND_NAME}: asked a model whose attention layers are {found}, possible is one "
            f"in each of the layers {expected[0]} to {expected[-1]}"
        )


def _check_layer(name: str, layer: RadixAttention, pool: InplaceMHAPool) -> None:
    def refuse(asked: str, possible: str) -> None:
        raise ConfigError(
            f"--attention-backend {BACKEND_NAME}: layer {name} asks {asked}, possible is {possible}"
        )

    if layer.head_dim not in SUPPORTED_HEAD_DIMS:
        refuse(f"head_dim {layer.head_dim}", f"one of {', '.join(map(str, SUPPORTED_HEAD_DIMS))}")
    if layer.qk_head_dim != layer.v_head_dim or layer.tp_k_head_num != layer.tp_v_head_num:
        refuse(
            f"K {layer.tp_k_head_num}x{layer.qk_head_dim}, V {layer.tp_v_head_num}x{layer.v_head_dim}",
            "equal K and V shapes",
        )
    if (layer.tp_k_head_num, layer.head_dim) != (pool.head_num, pool.head_dim):
        refuse(
            f"{layer.tp_k_head_num} KV heads of {layer.head_dim}",
            f"the {pool.head_num} of {pool.head_dim} of the model's other layers",
        )
    if layer.use_irope or layer.pos_encoding_mode != "NONE" or layer.xai_temperature_len > 0:
        refuse("position-dependent attention scores", "plain scaled dot products")
    if layer.sliding_window_size is not None and layer.sliding_window_size > -1:
        refuse(f"a sliding window of {layer.sliding_window_size}", "full attention")
    if layer.logit_cap:
        refuse(f"logit soft-capping at {layer.logit_cap}", "plain softmax")
    if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER:
        refuse("cross- or encoder attention", "causal decoder attention")
