"""Prefill straight to homes: pages that a forward begins and completes never touch a window.

Per layer the pages are packed in their homes' layout into a staging tensor (on a GPU: by the GPU) and copied on the write
queue while later layers compute. At most STAGING_LAYERS layers are staged at once: that is the back-pressure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch

from sglang_inplacekv.executors.tile_stream import adjacent_runs
from sglang_inplacekv.layout import ROLE_COMPUTE, STAGING_LAYERS
from sglang_inplacekv.queues import WorkQueue
from sglang_inplacekv.regions import Regions
from sglang_inplacekv.step_plan import StepPlan
from sglang_inplacekv.tickets import Ticket


class HomeWriter:
    """The home writes of one forward. One ticket stands for all of them; readers of any of the pages wait on it."""

    def __init__(
        self, regions: Regions, write_queue: WorkQueue, plan: StepPlan, device: torch.device | str = "cpu"
    ) -> None:
        self._regions, self._queue, self._who = regions, write_queue, plan.who
        page_size = regions.sizes.page_size
        pages = np.array([write.page for write in plan.home_writes], dtype=np.int64)
        first = np.array([write.first_token for write in plan.home_writes], dtype=np.int64)
        self._count = len(pages)
        self._tokens = torch.from_numpy((first[:, None] + np.arange(page_size)).reshape(-1)).to(device)
        roles = np.array([regions.homes.role_of(page) for page in pages.tolist()], dtype=np.int64)
        computed, transferred = np.flatnonzero(roles == ROLE_COMPUTE), np.flatnonzero(roles != ROLE_COMPUTE)
        self._computed, self._transferred = (
            torch.from_numpy(own).to(device) for own in (computed, transferred)
        )
        self._runs = adjacent_runs(pages, regions.sizes)
        self._staged: deque[Ticket] = deque()
        self._ticket = Ticket(f"prefill write of {self._count} host pages ({self._who})")
        regions.homes.set_ticket(pages.tolist(), self._ticket)

    def write(self, layer: int, parts: Sequence[torch.Tensor], timeout_s: float) -> None:
        """Stage and queue one layer; its parts [tokens, kv_heads, head_dim] are the caller's again on return."""
        if not self._count:
            return
        if len(self._staged) == STAGING_LAYERS:
            self._staged.popleft().wait(timeout_s, f"{self._who}, layer {layer}, prefill staging,")
        landing = self._landing(layer, self._pack(parts))
        last = layer == self._regions.shape.layers - 1

        def copy() -> None:
            try:
                landing()
            except BaseException as error:
                self._ticket.fail(error)
                raise
            if last:
                self._ticket.complete()

        self._staged.append(self._queue.submit(copy, f"prefill write, layer {layer}"))

    def _landing(self, layer: int, staged: torch.Tensor) -> Callable[[], None]:
        """What the write queue does with `staged`, [pages, parts, block]."""

        def land() -> None:
            for chunk, slot, place, count in self._runs:
                home = self._regions.arena.raw_pages(chunk, layer)[slot : slot + count]
                home.copy_(staged[place : place + count])

        return land

    def _pack(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        shape = self._regions.shape
        block = shape.block_bytes // shape.dtype.itemsize
        staged = torch.empty(self._count, shape.parts, block, dtype=shape.dtype, device=parts[0].device)
        for part, source in enumerate(parts):
            tokens = source[self._tokens].view(self._count, shape.page_size, shape.kv_heads, shape.head_dim)
            staged[self._computed, part] = tokens[self._computed].transpose(1, 2).flatten(1)
            staged[self._transferred, part] = tokens[self._transferred].flatten(1)
        return staged
