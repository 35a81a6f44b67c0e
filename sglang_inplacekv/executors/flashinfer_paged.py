"""FlashInfer over paged KV with LSE, planned once per forward and run for every layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

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

KV: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
# Rows of a captured call, and the int32 tensor on the GPU that takes its page lists.
Captured: TypeAlias = tuple[int, torch.Tensor]


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

    @cached_property
    def key(self) -> tuple[bytes, ...]:
        parts = (self.row_counts, self.page_counts, self.pages, self.last_page_tokens)
        return tuple(part.tobytes() for part in parts)


class PagedCall(ABC):
    """One planned call: some requests' queries over their pages in one buffer, no causal mask.

    Requests without pages are left out, since an empty KV list has no defined result in the kernels.
    """

    def __init__(self, *, is_captured: bool, out_dim: int | None = None) -> None:
        """out_dim: width of the output where it is not q's."""
        self._out_dim, self._is_captured = out_dim, is_captured
        self._rows: torch.Tensor | None = None  # int64 on the GPU, whose query rows take part; None: all
        self._planned: tuple | None = None
        self._pages: tuple[bytes, torch.Tensor] | None = None
        self.empty = True

    def plan(self, geometry: Geometry, lists: PagedLists) -> None:
        """Prepare for `lists`; free of cost if it is what was planned last, as for a tile from one step to the next."""
        key = None if self._is_captured else (geometry, *lists.key)
        if key is not None and key == self._planned:
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
        counts, last = lists.page_counts[taking], lists.last_page_tokens[taking]
        self._plan(geometry, PagedLists(lists.row_counts[taking], counts, lists.pages, last))
        self._planned = key

    def run(self, q: torch.Tensor, kv: KV, into: State | None = None) -> State:
        """Attend all rows of q; returns (out, lse), which are `into` if given. Rows that do not take part have lse -inf."""
        *heads, width = q.shape
        out, lse = into or (
            q.new_zeros(*heads, self._out_dim or width),
            q.new_empty(heads, dtype=torch.float32),
        )
        if self._rows is None:
            self._attend(q, kv, out, lse)
            return out, lse
        own_out, own_lse = self._attend(q[self._rows], kv, None, None)
        out.index_copy_(0, self._rows, own_out)
        lse.fill_(-torch.inf).index_copy_(0, self._rows, own_lse)
        return out, lse

    def _pages_of(self, lists: PagedLists) -> torch.Tensor:
        """The pages on the GPU: those of the last plan, if they are the same. From step to step mostly lengths alone differ."""
        data = lists.pages.tobytes()
        if self._pages is None or self._pages[0] != data:
            self._pages = data, to_gpu(lists.pages)
        return self._pages[1]

    @abstractmethod
    def _plan(self, geometry: Geometry, lists: PagedLists) -> None:
        """Every request of `lists` has pages."""

    @abstractmethod
    def _attend(self, q: torch.Tensor, kv: KV, out: torch.Tensor | None, lse: torch.Tensor | None) -> State:
        """Run as planned, into out and lse if given. LSE base 2."""


class PagedAttention(PagedCall):
    """Over K and V [pages, page_size, kv_heads, head_dim] (NHD) or [pages, kv_heads, page_size, head_dim] (HND).

    With `captured` (rows, [n] int32 on the GPU) the call is for exactly so many requests of one row each, and a CUDA graph may
    capture it; the tensor takes the page lists, and calls that are never planned for the same forward may share it.
    """

    def __init__(self, workspace: torch.Tensor, layout: str, captured: Captured | None = None) -> None:
        super().__init__(is_captured=captured is not None)
        fixed = {}
        if captured is not None:
            rows, fixed["paged_kv_indices_buf"] = captured
            sizes = {
                "qo_indptr_buf": rows + 1,
                "paged_kv_indptr_buf": rows + 1,
                "paged_kv_last_page_len_buf": rows,
            }
            fixed |= fixed_buffers(sizes)
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(
            workspace, layout, use_cuda_graph=self._is_captured, backend=_PAGED_KERNEL, **fixed
        )
        # The wrapper's own are four times as large, on both sides, and there is one for every tile of a layer.
        plan_bytes = torch.empty(PLAN_BYTES_CUDA, dtype=torch.uint8, device="cuda")
        self._wrapper.reset_workspace_buffer(workspace, plan_bytes)

    def _plan(self, geometry: Geometry, lists: PagedLists) -> None:
        self._wrapper.plan(
            indptr(lists.row_counts),
            indptr(lists.page_counts),
            self._pages_of(lists),
            torch.from_numpy(lists.last_page_tokens),
            geometry.q_heads,
            geometry.kv_heads,
            geometry.head_dim,
            geometry.page_size,
            causal=False,
            sm_scale=geometry.scale,
            q_data_type=geometry.q_dtype,
            kv_data_type=geometry.kv_dtype,
        )

    def _attend(self, q: torch.Tensor, kv: KV, out: torch.Tensor | None, lse: torch.Tensor | None) -> State:
        return self._wrapper.run(q, kv, out=out, lse=lse, return_lse=True)


class ChunkAttention:
    """A prefill chunk over itself, causal, request by request."""

    def __init__(self, workspace: torch.Tensor) -> None:
        self._wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=_CHUNK_KERNEL)

    def plan(self, geometry: Geometry, lengths: Sequence[int]) -> None:
        first = indptr(np.array(lengths, dtype=np.int32))
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


def indptr(counts: np.ndarray) -> torch.Tensor:
    """[n] -> [n + 1] int32 on the CPU."""
    return torch.from_numpy(np.concatenate(([0], np.cumsum(counts))).astype(np.int32))


def fixed_buffers(sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """int32 tensors on the GPU, at addresses that a graph may hold."""
    return {name: torch.zeros(size, dtype=torch.int32, device="cuda") for name, size in sizes.items()}
