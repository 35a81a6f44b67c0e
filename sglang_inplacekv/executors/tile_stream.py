"""Host pages streaming through the two P tiles.

The stream of a forward is a fixed sequence: layer 0's tiles, layer 1's tiles, and so on. Tile k lands in buffer k % 2, so its
copy waits only for the attention over tile k - 2; copies run ahead across layers, because what they read does not depend on
any layer's result. Who may touch buffer k % 2 when:

    copy queue      after the last reader of tile k - 2, until its copy ticket k completes
    compute queue   after copy ticket k, until its reader ticket k completes
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sglang_inplacekv.layout import ROLE_COMPUTE, ROLE_TRANSFER, RegionSizes
from sglang_inplacekv.queues import WorkQueue
from sglang_inplacekv.regions import Regions
from sglang_inplacekv.step_plan import StepPlan
from sglang_inplacekv.tickets import Ticket


@dataclass(frozen=True)
class Tile:
    """Pages of one role that cross together, and where each request finds its own among them."""

    role: int
    pages: np.ndarray  # [n] distinct host pages, n <= tile_pages
    readers: list[tuple[int, torch.Tensor]]  # (request index, places in the tile [m] int64)


def plan_tiles(plan: StepPlan, sizes: RegionSizes) -> list[Tile]:
    """Cut the streamed pages of one layer into tiles. A page that several requests share crosses once.

    A decode streams T. An extend streams T and C, one role a tile: the CPU does not attend a prefill.
    """
    tiles = []
    for role in (ROLE_TRANSFER,) if plan.is_decode else (ROLE_TRANSFER, ROLE_COMPUTE):
        lists = [r.transfer_pages if role == ROLE_TRANSFER else r.compute_pages for r in plan.reads]
        pages = np.array(list(dict.fromkeys(np.concatenate(lists).tolist())) if lists else [], dtype=np.int64)
        order = np.argsort(pages)
        # For each request: where its pages stand in the list of distinct pages.
        stands = [order[np.searchsorted(pages, own, sorter=order)] for own in lists]
        for start in range(0, len(pages), sizes.tile_pages):
            stop = start + sizes.tile_pages
            readers = []
            for request, place in enumerate(stands):
                mine = place[(place >= start) & (place < stop)]
                if len(mine):
                    readers.append((request, torch.from_numpy(mine - start)))
            tiles.append(Tile(role, pages[start:stop], readers))
    return tiles


class TileStream:
    """The P tiles of one forward. `ready` gives the next tile's buffer and copy ticket, `read_by` returns the buffer."""

    def __init__(
        self,
        regions: Regions,
        copy_queue: WorkQueue,
        buffers: Sequence[torch.Tensor],
        plan: StepPlan,
        note_copy: Callable[[float], None] | None = None,
    ) -> None:
        """note_copy(seconds) is called by the queue's thread after each copy."""
        self._note_copy = note_copy
        self._regions, self._queue, self._buffers = regions, copy_queue, buffers
        self.tiles = plan_tiles(plan, regions.sizes)
        self._runs = [regions.sizes.adjacent_runs(tile.pages).tolist() for tile in self.tiles]
        self._pending = [
            [plan.pending[p] for p in tile.pages.tolist() if p in plan.pending] for tile in self.tiles
        ]
        self._total = len(self.tiles) * regions.shape.layers
        self._copies: list[Ticket] = []
        self._next = 0
        for _ in buffers:
            self._submit_copy(None)

    def ready(self, layer: int) -> tuple[torch.Tensor, Ticket]:
        """The buffer of the next tile, one of `layer`, `[tile_pages, parts, block]`, valid once the ticket is done."""
        if self._next // len(self.tiles) != layer:
            raise RuntimeError(f"layer {layer} asks for tile {self._next} of {len(self.tiles)} a layer")
        return self._buffers[self._next % 2], self._copies[self._next]

    def read_by(self, reader: Ticket) -> None:
        """Declare the attention that reads the current tile; the copy after next may overwrite the buffer behind it."""
        self._next += 1
        self._submit_copy(reader)

    def _submit_copy(self, reader: Ticket | None) -> None:
        index = len(self._copies)
        if index >= self._total:
            return
        layer, part = divmod(index, len(self.tiles))
        buffer, runs, arena = self._buffers[index % 2], self._runs[part], self._regions.arena

        def copy() -> None:
            started_s = time.perf_counter()
            for chunk, slot, place, count in runs:
                buffer[place : place + count].copy_(arena.raw_pages(chunk, layer)[slot : slot + count])
            if self._note_copy is not None:
                self._note_copy(time.perf_counter() - started_s)

        after = self._pending[part] + ([reader] if reader else [])
        region = "T" if self.tiles[part].role == ROLE_TRANSFER else "C"
        self._copies.append(self._queue.submit(copy, f"copy of {region} tile {part}, layer {layer}", after))
