"""Prefill straight to homes: pages that a forward begins and completes never touch a window.

Per layer the pages are packed in their homes' layout into a staging tensor (on a GPU: by the GPU) and copied on the write
queue while later layers compute. At most STAGING_LAYERS layers are staged at once: that is the back-pressure.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch

from sglang_inplacekv.layout import ROLE_COMPUTE, STAGING_LAYERS
from sglang_inplacekv.queues import WorkQueue
from sglang_inplacekv.regions import Regions
from sglang_inplacekv.step_plan import StepPlan
from sglang_inplacekv.tickets import Ticket


class HomeWriter(ABC):
    """The home writes of one forward. One ticket stands for all of them; readers of any of the pages wait on it."""

    def __init__(self, regions: Regions, write_queue: WorkQueue, plan: StepPlan) -> None:
        self._regions, self._queue, self._who = regions, write_queue, plan.who
        self._pages = np.array([write.page for write in plan.home_writes], dtype=np.int64)
        self._first_tokens = np.array([write.first_token for write in plan.home_writes], dtype=np.int64)
        self._count = len(self._pages)
        # Roles are taken now: later, a chunk whose pages were all freed may have dropped its own.
        roles = np.array([regions.homes.role_of(page) for page in self._pages.tolist()], dtype=np.int64)
        self._computed, self._transferred = (
            np.flatnonzero(own) for own in (roles == ROLE_COMPUTE, roles != ROLE_COMPUTE)
        )
        self._staged: deque[Ticket] = deque()
        self._ticket = Ticket(f"prefill write of {self._count} host pages ({self._who})")
        regions.homes.set_ticket(self._pages.tolist(), self._ticket)

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

    @abstractmethod
    def _pack(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The pages of one layer, [pages, parts, block], each in its home's layout."""

    @abstractmethod
    def _landing(self, layer: int, staged: torch.Tensor) -> Callable[[], None]:
        """What the write queue does with `staged`, which `_pack` made."""


class CpuHomeWriter(HomeWriter):
    """Stages the pages in the order of the plan."""

    def __init__(self, regions: Regions, write_queue: WorkQueue, plan: StepPlan) -> None:
        super().__init__(regions, write_queue, plan)
        tokens = self._first_tokens[:, None] + np.arange(regions.sizes.page_size)
        self._tokens = torch.from_numpy(tokens.reshape(-1))
        self._places = torch.from_numpy(self._computed), torch.from_numpy(self._transferred)
        self._runs = regions.sizes.adjacent_runs(self._pages).tolist()

    def _pack(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        shape = self._regions.shape
        block, (computed, transferred) = shape.block_bytes // shape.dtype.itemsize, self._places
        staged = torch.empty(self._count, shape.parts, block, dtype=shape.dtype)
        for part, source in enumerate(parts):
            tokens = source[self._tokens].view(self._count, shape.page_size, shape.kv_heads, shape.head_dim)
            staged[computed, part] = tokens[computed].transpose(1, 2).flatten(1)
            staged[transferred, part] = tokens[transferred].flatten(1)
        return staged

    def _landing(self, layer: int, staged: torch.Tensor) -> Callable[[], None]:
        def land() -> None:
            for chunk, slot, place, count in self._runs:
                home = self._regions.arena.raw_pages(chunk, layer)[slot : slot + count]
                home.copy_(staged[place : place + count])

        return land
