"""FlashInfer over paged KV with LSE, planned once per forward and run for every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper

from sglang_inplacekv.layout import WORKSPACE_BYTES_CUDA

# fa2 serves decode (one query row) and prefill alike, in both KV layouts, and returns base-2 LSE.
_KERNEL = "fa2"


@dataclass(frozen=True)
class Geometry:
    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    scale: float


class PagedAttention:
    """One planned call: some requests' queries over their pages in one buffer, no causal mask.

    Requests without pages are left out, since an empty KV list has no defined result in the kernel; `rows` says whose
    query rows take part.
    """

    def __init__(self, workspace: torch.Tensor, layout: str) -> None:
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, layout, backend=_KERNEL)
        self.rows: torch.Tensor | None = None  # int64 on the GPU, None: all rows
        self.empty = True

    def plan(
        self,
        geometry: Geometry,
        pages: Sequence[Sequence[int]],
        last_page_tokens: Sequence[int],
        row_ranges: Sequence[range],
        rows: int,
    ) -> None:
        """pages[r]: request r's pages in the buffer, all full but the last; row_ranges[r]: its query rows of `rows`."""
        taking = [r for r, own in enumerate(pages) if len(own)]
        self.empty = not taking
        if self.empty:
            return
        lengths = [len(row_ranges[r]) for r in taking]
        counts = [len(pages[r]) for r in taking]
        whole = sum(lengths) == rows
        index = [row for r in taking for row in row_ranges[r]]
        self.rows = (
            None if whole else torch.tensor(index, dtype=torch.int64, pin_memory=True).cuda(non_blocking=True)
        )
        self._wrapper.plan(
            _indptr(lengths),
            _indptr(counts),
            torch.tensor([page for r in taking for page in pages[r]], dtype=torch.int32).cuda(),
            torch.tensor([last_page_tokens[r] for r in taking], dtype=torch.int32),
            geometry.q_heads,
            geometry.kv_heads,
            geometry.head_dim,
            geometry.page_size,
            causal=False,
            sm_scale=geometry.scale,
            q_data_type=geometry.q_dtype,
            kv_data_type=geometry.kv_dtype,
        )

    def run(
        self, q: torch.Tensor, kv: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse) over all rows of q; rows that do not take part are zero and -inf."""
        if self.rows is None:
            return self._wrapper.run(q, kv, return_lse=True)
        out, lse = self._wrapper.run(q[self.rows], kv, return_lse=True)
        whole = out.new_zeros(q.shape)
        whole_lse = lse.new_full(q.shape[:2], -torch.inf)
        whole[self.rows] = out
        whole_lse[self.rows] = lse
        return whole, whole_lse


class ChunkAttention:
    """A prefill chunk over itself, causal, request by request."""

    def __init__(self, workspace: torch.Tensor) -> None:
        self._wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=_KERNEL)

    def plan(self, geometry: Geometry, lengths: Sequence[int]) -> None:
        self._wrapper.plan(
            _indptr(lengths),
            _indptr(lengths),
            geometry.q_heads,
            geometry.kv_heads,
            geometry.head_dim,
            causal=True,
            sm_scale=geometry.scale,
            q_data_type=geometry.q_dtype,
            kv_data_type=geometry.kv_dtype,
        )

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._wrapper.run(q, k, v, return_lse=True)


def make_workspace() -> torch.Tensor:
    return torch.zeros(WORKSPACE_BYTES_CUDA, dtype=torch.uint8, device="cuda")


def _indptr(counts: Sequence[int]) -> torch.Tensor:
    total, out = 0, [0]
    for count in counts:
        total += count
        out.append(total)
    return torch.tensor(out, dtype=torch.int32)
