"""Attention over pages that the GPU reads where they lie: D's, captured for CUDA graphs too, and T's by zero-copy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from sglang_inplacekv.executors.flashinfer_paged import KV, Captured, Geometry, PagedCall, PagedLists
from sglang_inplacekv.executors.host_reads import full_pages
from sglang_inplacekv.executors.merge_kernel import State
from sglang_inplacekv.layout import KVShape
from sglang_inplacekv.regions import Regions
from sglang_inplacekv.step_plan import StepPlan


class DeviceAttention:
    """Over what a forward reads in GPU memory, D's pages and windows. What a graph holds is planned at each replay."""

    def __init__(self, regions: Regions, make_call: Callable[[Captured | None], PagedCall]) -> None:
        self._regions, self._make_call = regions, make_call
        self._call = make_call(None)
        # By number of rows: what captured decodes attend with, and the geometry that they were captured for.
        self._captured: dict[int, PagedCall] = {}
        self._captured_pages: torch.Tensor | None = None
        self._geometry: Geometry | None = None

    @property
    def empty(self) -> bool:
        return self._call.empty

    def plan(self, geometry: Geometry, plan: StepPlan, row_counts: np.ndarray) -> None:
        self._call.plan(geometry, self._lists(plan, row_counts))

    def run(self, layer: int, q: torch.Tensor) -> State:
        return self._call.run(q, self._pages(layer))

    def run_captured(self, layer: int, q: torch.Tensor, geometry: Geometry, most_rows: int) -> State:
        """As `run`, for decodes of this many rows, of which there are `most_rows` at most.

        Planned in the warm-up, for one token each, before the capture.
        """
        rows = len(q)
        if rows not in self._captured:
            self._geometry = geometry
            if self._captured_pages is None:
                most = most_rows * self._regions.sizes.device_tensor_pages
                self._captured_pages = torch.zeros(most, dtype=torch.int32, device="cuda")
            call = self._make_call((rows, self._captured_pages))
            ones = np.ones(rows, dtype=np.int32)
            call.plan(geometry, PagedLists(ones, ones, np.zeros(rows, dtype=np.int32), ones))
            self._captured[rows] = call
        return self._captured[rows].run(q, self._pages(layer))

    def plan_replay(self, plan: StepPlan, row_counts: np.ndarray, rows: int) -> None:
        """Plan the call in the graph of so many rows. Those that only fill it up attend one token of the padding page."""
        lists = self._lists(plan, row_counts)
        spare = np.ones(rows - len(row_counts), dtype=np.int32)
        filled = PagedLists(
            np.concatenate((lists.row_counts, spare)),
            np.concatenate((lists.page_counts, spare)),
            np.concatenate((lists.pages, 0 * spare)),
            np.concatenate((lists.last_page_tokens, spare)),
        )
        assert self._geometry is not None
        self._captured[rows].plan(self._geometry, filled)

    def _lists(self, plan: StepPlan, row_counts: np.ndarray) -> PagedLists:
        tokens = np.array([own.device_tokens for own in plan.reads], dtype=np.int32)
        pages = [own.device_pages for own in plan.reads]
        counts = np.array([len(own) for own in pages], dtype=np.int32)
        last = tokens - (counts - 1) * self._regions.sizes.page_size
        return PagedLists(row_counts, counts, np.concatenate(pages).astype(np.int32), last)

    def _pages(self, layer: int) -> KV:
        shape = self._regions.shape
        paged = self._regions.device_kv[layer].view(
            shape.parts, -1, shape.page_size, shape.kv_heads, shape.head_dim
        )
        return _as_paged(shape, (paged[0], paged[-1]))


class InPlaceAttention:
    """Over the T pages of a decode, which the GPU reads in host memory."""

    def __init__(self, regions: Regions, call: PagedCall) -> None:
        self._regions, self._call = regions, call

    def plan(self, geometry: Geometry, plan: StepPlan, row_counts: np.ndarray) -> None:
        pages = [own.transfer_pages for own in plan.reads]
        counts = np.array([len(own) for own in pages], dtype=np.int32)
        index = self._regions.arena.zero_copy_index(np.concatenate(pages))
        self._call.plan(geometry, full_pages(row_counts, counts, index, self._regions.sizes.page_size))

    def run(self, layer: int, q: torch.Tensor, into: State) -> None:
        pages = self._regions.arena.zero_copy_layer(layer)
        self._call.run(q, _as_paged(self._regions.shape, pages), into)


def _as_paged(shape: KVShape, kv: tuple[torch.Tensor, torch.Tensor]) -> KV:
    """K and V [pages, G, kv_heads, head_dim] as a PagedCall takes them: a latent row is its K."""
    return kv if shape.value_dim is None else kv[0][:, :, 0]
