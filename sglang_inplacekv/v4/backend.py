"""SGLang's attention backend for DeepSeek-V4: select, then attend what was selected where it lies. Glue, no maths."""

from __future__ import annotations

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sglang_inplacekv.compat import BACKEND_NAME
from sglang_inplacekv.pool import pool_of
from sglang_inplacekv.step_plan import Span
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
        lengths, index = forward_batch.seq_lens_cpu.tolist(), forward_batch.req_pool_indices
        rids = forward_batch.rids or [f"warm-up {i}" for i in range(forward_batch.batch_size)]
        known, is_decode = forward_batch.req_pool_indices_cpu, forward_batch.forward_mode.is_decode()
        rows = (index if known is None else known).tolist()
        if is_decode:
            prefixes = [length - 1 for length in lengths]
            pages = self.pool.page_lists.of_decode(rids, index, lengths)
        elif forward_batch.forward_mode.is_extend():
            prefixes = list(forward_batch.extend_prefix_lens_cpu)
            pages = self.pool.page_lists.of_extend(rids, index, rows, prefixes, lengths)
        else:
            raise RuntimeError(
                f"forward mode {forward_batch.forward_mode} is not supported by {BACKEND_NAME}"
            )
        requests, first = [], 0
        for row, *span in zip(rows, rids, pages, prefixes, lengths, strict=True):
            own = Span(*span)
            on_device = torch.from_numpy(own.pages).to(index.device)
            own_rows = slice(first, first + own.new_tokens)
            generation = self.pool.page_lists.generation(row)
            requests.append(Request(row, own, own_rows, on_device, generation))
            first += own.new_tokens
        self.pool.begin_requests(requests, is_decode)

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
