"""FlashInfer over paged KV with LSE, planned once per forward and run for every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper

from sglang_inplacekv.executors.dma import to_gpu
from sglang_inplacekv.executors.merge_kernel import State
from sglang_inplacekv.layout import PLAN_BYTES_CUDA, WORKSPACE_BYTES_CUDA

# fa2 serves decode (one query row) and prefill alike, in both KV layouts, and returns base-2 LSE.
_PAGED_KERNEL = "fa2"
# What SGLang's own FlashInfer backend asks for the chunk: fa3 where there is one.
_CHUNK_KERNEL = "auto"


@dataclass(frozen=True)
class Geometry:
    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    scale: float


@dataclass(frozen=True)
class PagedLists:
    """What one planned call attends: per request its query rows, its pages and the tokens in its last page."""

    row_counts: np.ndarray  # [requests] int32
    page_counts: np.ndarray  # [requests] int32
    pages: np.ndarray  # [sum(page_counts)] int32, places in the buffer
    last_page_tokens: np.ndarray  # [requests] int32

    @property
    def key(self) -> tuple[bytes, ...]:
        parts = (self.row_counts, self.page_counts, self.pages, self.last_page_tokens)
        return tuple(part.tobytes() for part in parts)


class PagedAttention:
    """One planned call: some requests' queries over their pages in one buffer, no causal mask.

    Requests without pages are left out, since an empty KV list has no defined result in the kernel. With `captured` (rows,
    [n] int32 on the GPU) the call is for exactly so many requests of one row each, and a CUDA graph may capture it; the tensor
    takes the page lists, and calls that are never planned for the same forward may share it.
    """

    def __init__(
        self, workspace: torch.Tensor, layout: str, captured: tuple[int, torch.Tensor] | None = None
    ) -> None:
        self._is_captured, fixed = captured is not None, {}
        if captured is not None:
            rows, fixed["paged_kv_indices_buf"] = captured
            sizes = {
                "qo_indptr_buf": rows + 1,
                "paged_kv_indptr_buf": rows + 1,
                "paged_kv_last_page_len_buf": rows,
            }
            fixed |= {name: torch.zeros(n, dtype=torch.int32, device="cuda") for name, n in sizes.items()}
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(
            workspace, layout, use_cuda_graph=self._is_captured, backend=_PAGED_KERNEL, **fixed
        )
        # The wrapper's own are four times as large, on both sides, and there is one for every tile of a layer.
        plan_bytes = torch.empty(PLAN_BYTES_CUDA, dtype=torch.uint8, device="cuda")
        self._wrapper.reset_workspace_buffer(workspace, plan_bytes)
        self._rows: torch.Tensor | None = None  # int64 on the GPU, whose query rows take part; None: all
        self._planned: tuple | None = None
        self.empty = True

    def plan(self, geometry: Geometry, lists: PagedLists) -> None:
        """Prepare for `lists`; free of cost if it is what was planned last, as for a tile from one step to the next."""
        key = (geometry, *lists.key)
        if key == self._planned and not self._is_captured:
            return
        self._planned = None
        taking = lists.page_counts > 0
        self.empty = not taking.any()
        if self.empty:
            return
        self._rows = None
        if not taking.all():
            rows = np.flatnonzero(np.repeat(taking, lists.row_counts))
            self._rows = to_gpu(rows)
        self._wrapper.plan(
            _indptr(lists.row_counts[taking]),
            _indptr(lists.page_counts[taking]),
            to_gpu(lists.pages),
            torch.from_numpy(lists.last_page_tokens[taking]),
            geometry.q_heads,
            geometry.kv_heads,
            geometry.head_dim,
            geometry.page_size,
            causal=False,
            sm_scale=geometry.scale,
            q_data_type=geometry.q_dtype,
            kv_data_type=geometry.kv_dtype,
        )
        self._planned = key

    def run(
        self,
        q: torch.Tensor,
        kv: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        into: State | None = None,
    ) -> State:
        """Attend all rows of q; returns (out, lse), which are `into` if given. Rows that do not take part have lse -inf."""
        out, lse = into or (q.new_zeros(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32))
        if self._rows is None:
            self._wrapper.run(q, kv, out=out, lse=lse, return_lse=True)
            return out, lse
        own_out, own_lse = self._wrapper.run(q[self._rows], kv, return_lse=True)
        out.index_copy_(0, self._rows, own_out)
        lse.fill_(-torch.inf).index_copy_(0, self._rows, own_lse)
        return out, lse


class ChunkAttention:
    """A prefill chunk over itself, causal, request by request."""

    def __init__(self, workspace: torch.Tensor) -> None:
        self._wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=_CHUNK_KERNEL)

    def plan(self, geometry: Geometry, lengths: Sequence[int]) -> None:
        first = _indptr(np.array(lengths, dtype=np.int32))
        self._wrapper.plan(
            first,
            first,
            geometry.q_heads,
            geometry.kv_heads,
            geometry.head_dim,
            causal=True,
            sm_scale=geometry.scale,
            q_data_type=geometry.q_dtype,
            kv_data_type=geometry.kv_dtype,
        )

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> State:
        return self._wrapper.run(q, k, v, return_lse=True)


def make_workspace() -> torch.Tensor:
    return torch.zeros(WORKSPACE_BYTES_CUDA, dtype=torch.uint8, device="cuda")


def _indptr(counts: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(([0], np.cumsum(counts))).astype(np.int32))
