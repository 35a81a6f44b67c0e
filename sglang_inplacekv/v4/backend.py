"""SGLang's attention backend for DeepSeek-V4: select, then attend what was selected where it lies. Glue, no maths."""

from __future__ import annotations

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sglang_inplacekv.forward_spans import rows_of, spans_of
from sglang_inplacekv.pool import pool_of
from sglang_inplacekv.v4.attend import layer_attention
from sglang_inplacekv.v4.pool import InplaceV4Pool
from sglang_inplacekv.v4.requests import Request
from sglang_inplacekv.v4.selectors import make_selectors


class InplaceV4Backend(AttentionBackend):
    """One per model runner. The model calls `attend` once a layer, in order; there is no RadixAttention."""

    def __init__(self, runner) -> None:
        super().__init__()
        self.kv_index_translator = runner.kv_index_translator
        pool: InplaceV4Pool = pool_of(runner, InplaceV4Pool)
        self.pool = self.token_to_kv_pool = pool
        self.req_to_token_pool = runner.req_to_token_pool
        selectors = make_selectors(runner.model, pool.dtype)
        pool.states.adopt(selectors)
        self._layers = [layer_attention(pool, layer, selector) for layer, selector in enumerate(selectors)]

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        spans, device = spans_of(forward_batch, self.pool.page_lists), forward_batch.req_pool_indices.device
        requests, first = [], 0
        for row, own in zip(rows_of(forward_batch), spans, strict=True):
            on_device = torch.from_numpy(own.pages).to(device)
            rows, generation = slice(first, first + own.new_tokens), self.pool.page_lists.generation(row)
            requests.append(Request(row, own, rows, on_device, generation))
            first += own.new_tokens
        self.pool.begin_requests(requests, forward_batch.forward_mode.is_decode())

    def attend(
        self, layer: int, *, h: torch.Tensor, q_resid: torch.Tensor, q: torch.Tensor, kv: torch.Tensor
    ) -> torch.Tensor:
        """Attention of one layer over what its selector names, rotated back: fp32 [tokens, heads, head_dim].

        Of this forward's tokens, request after request: h [tokens, hidden] the layer's normalised input, q_resid
        [tokens, q_lora_rank], q [tokens, heads, head_dim] and kv [tokens, head_dim] normalised and rotated.
        """
        out = self._layers[layer](h, q_resid, q, kv)
        if layer == len(self._layers) - 1:
            self.pool.executor.end_forward()
        return out

    def support_triton(self) -> bool:
        return self.pool.on_gpu
