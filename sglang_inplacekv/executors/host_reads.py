"""What a forward reads from host memory, in the forms that its layers use."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

import cpu_attn
from sglang_inplacekv.executors.cuda_tiles import TileCopies
from sglang_inplacekv.executors.flashinfer_paged import PagedLists
from sglang_inplacekv.executors.tile_stream import Tile, plan_tiles
from sglang_inplacekv.page_table import compute_table
from sglang_inplacekv.regions import Regions
from sglang_inplacekv.step_plan import StepPlan


@dataclass
class HostReads:
    copies: TileCopies
    table: cpu_attn.PageTable | None  # of a decode in which the CPU takes part
    row_counts: np.ndarray  # new tokens of each request, int32
    page_size: int
    # Of the CPU's part, but for the layer's KV and the scale. Made by the first decode that has these reads.
    arguments: cpu_attn.DecodeArguments | None = None

    @cached_property
    def lists(self) -> list[PagedLists]:
        """What attention over each tile is planned with."""
        return [self._tile_lists(tile) for tile in self.copies.tiles]

    def _tile_lists(self, tile: Tile) -> PagedLists:
        counts = np.zeros(len(self.row_counts), dtype=np.int32)
        for request, own in tile.readers:
            counts[request] = len(own)
        pages = np.concatenate([own.numpy() for _, own in tile.readers]).astype(np.int32)
        return full_pages(self.row_counts, counts, pages, self.page_size)


class HostReadsOfDecodes:
    """Makes HostReads. A decode that reads what the last one did has that one's: from step to step most pages stay."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions
        self._last: tuple[tuple[int, tuple[bytes, ...]], HostReads] | None = None

    def forget(self) -> None:
        """The buffers that `arguments` names are others from here on."""
        self._last = None

    def of(self, plan: StepPlan, rows: int, *, streams: bool) -> HostReads:
        """rows: of q, with those that only fill up a captured batch. Unless `streams`, T has no tiles."""
        if not plan.is_decode:
            return self._make(plan, streams)
        pages = (
            own
            for reads in plan.reads
            for own in (reads.compute_pages, reads.stolen_pages, reads.transfer_pages)
        )
        key = rows, tuple(own.tobytes() for own in pages)
        if self._last is None or self._last[0] != key:
            self._last = key, self._make(plan, streams)
        return self._last[1]

    def _make(self, plan: StepPlan, streams: bool) -> HostReads:
        sizes = self._regions.sizes
        return HostReads(
            TileCopies(self._regions, plan_tiles(plan, sizes) if streams else []),
            compute_table(plan, sizes) if plan.is_decode else None,
            np.array([span.new_tokens for span in plan.spans], dtype=np.int32),
            sizes.page_size,
        )


def full_pages(row_counts: np.ndarray, counts: np.ndarray, pages: np.ndarray, page_size: int) -> PagedLists:
    """Host pages are full, all of them."""
    return PagedLists(row_counts, counts, pages, np.full(len(counts), page_size, dtype=np.int32))
