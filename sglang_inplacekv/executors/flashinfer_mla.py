"""FlashInfer's absorbed MLA over paged latent rows, planned once per forward and run for every layer."""

from __future__ import annotations

import torch
from flashinfer.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata

from sglang_inplacekv.executors.flashinfer_paged import (
    KV,
    Captured,
    Geometry,
    PagedCall,
    PagedLists,
    fixed_buffers,
    indptr,
)
from sglang_inplacekv.executors.merge_kernel import State

# What SGLang's own MLA backend asks for: fa3 where there is one.
_KERNEL = "auto"


class LatentAttention(PagedCall):
    """Over rows [pages, page_size, lora_rank + rope] that all query heads share; q [rows, heads, lora_rank + rope].

    `captured` as for PagedAttention.
    """

    def __init__(self, workspace: torch.Tensor, lora_rank: int, captured: Captured | None = None) -> None:
        super().__init__(is_captured=captured is not None, out_dim=lora_rank)
        self._lora_rank, fixed = lora_rank, {}
        self._is_fixed = False  # captured and planned once: all that a graph holds stays where it is
        if captured is not None:
            rows, fixed["kv_indices"] = captured
            fixed |= fixed_buffers({"qo_indptr": rows + 1, "kv_indptr": rows + 1, "kv_len_arr": rows})
        self._wrapper = BatchMLAPagedAttentionWrapper(
            workspace, use_cuda_graph=self._is_captured, backend=_KERNEL, **fixed
        )

    def _plan(self, geometry: Geometry, lists: PagedLists) -> None:
        lengths = (lists.page_counts - 1) * geometry.page_size + lists.last_page_tokens
        metadata = (
            indptr(lists.row_counts),
            indptr(lists.page_counts),
            self._pages_of(lists),
            torch.from_numpy(lengths),
        )
        settings = {
            "num_heads": geometry.q_heads,
            "head_dim_ckv": self._lora_rank,
            "head_dim_kpe": geometry.head_dim - self._lora_rank,
            "page_size": geometry.page_size,
            "causal": False,
            "sm_scale": geometry.scale,
            "q_data_type": geometry.q_dtype,
            "kv_data_type": geometry.kv_dtype,
        }
        if self._is_fixed:
            # As SGLang plans its own replays: FlashInfer's plan takes ten times as long, to check and clone what stays.
            # Imported late, since with it comes most of SGLang.
            from sglang.srt.layers.attention.flashinfer_mla_backend import fast_mla_prefill_plan

            fast_mla_prefill_plan(self._wrapper, *metadata, **settings)
            return
        self._wrapper.plan(metadata=MLAPlanMetadata.csr(*metadata), **settings, lse_mode="base2")
        self._is_fixed = self._is_captured

    def _attend(self, q: torch.Tensor, kv: KV, out: torch.Tensor | None, lse: torch.Tensor | None) -> State:
        return self._wrapper.run(query=q, kv_cache=kv, out=out, lse=lse, return_lse=True)
