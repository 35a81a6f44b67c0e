"""Tail records: what a sequence needs, beside its pages, to go on after a full page. In host memory, found by page id.

    of a page that ends after token e         rows       written                        read
    window, each layer                        e-W .. e   when a forward completes the   once, by the first forward of
    CSA's compressor journals (main, index)   e-4 .. e   page, layer by layer           a request whose prefix ends at e

So a full page and its record, with the pages before, are the whole state; HCA's blocks end where pages end. There may be fewer
records than pages: the least recently written or read one gives way, and SGLang's match is cut to the last page that has one.
Of two pages of the same tokens after the same prefix the prefix cache keeps one, and that one gets the record. A record is
dropped with its page, and its slot goes to the next one; the write queue keeps the writes of a slot in order, and readers wait
for the slot's ticket.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import torch

from sglang_inplacekv.executors.base import Executor
from sglang_inplacekv.layout import STAGING_LAYERS
from sglang_inplacekv.tickets import Ticket
from sglang_inplacekv.v4.layout import WINDOW, V4Layout


class RecordTable:
    """Which page's record lies in which slot. Pure bookkeeping; slots are 0 .. count."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._slot_of: dict[int, int] = {}  # least recently used first
        self._free = list(range(count))
        self.lost_records = 0  # that gave way to others or found no slot, since start

    def __contains__(self, page: int) -> bool:
        return page in self._slot_of

    def __len__(self) -> int:
        return len(self._slot_of)

    @property
    def free_count(self) -> int:
        return len(self._free)

    def take(self, pages: Sequence[int]) -> dict[int, int]:
        """Slots for the records of `pages`, which one forward completes, by page; of more than there are slots, the last."""
        kept = pages[max(0, len(pages) - self.count) :]
        self.lost_records += len(pages) - len(kept)
        return {page: self._take(page) for page in kept}

    def _take(self, page: int) -> int:
        if page in self:
            return self.use(page)
        if self._free:
            slot = self._free.pop()
        else:
            self.lost_records += 1
            slot = self._slot_of.pop(next(iter(self._slot_of)))
        self._slot_of[page] = slot
        return slot

    def use(self, page: int) -> int:
        """The page's slot, from now on the most recently used. KeyError if it has none."""
        self._slot_of[page] = slot = self._slot_of.pop(page)
        return slot

    def drop(self, pages: Iterable[int]) -> list[int]:
        """`pages` are free: their records are dead. Returns the slots that became free."""
        dropped = [self._slot_of.pop(page) for page in pages if page in self]
        self._free += dropped
        return dropped

    def hand_over(self, page: int, other: int) -> None:
        """`other` holds the same tokens after the same prefix: it gets the record of `page`, if it has none."""
        if page in self and other not in self:
            self._slot_of[other] = self._slot_of.pop(page)

    def resumable(self, pages: Sequence[int]) -> int:
        """How many of a prefix's pages lead to the last one that has a record."""
        return next((count for count in range(len(pages), 0, -1) if pages[count - 1] in self), 0)

    def check_integrity(self, used_pages: Iterable[int]) -> None:
        """RuntimeError unless every slot is either free or that of one page in use."""
        if dead := self._slot_of.keys() - set(used_pages):
            raise RuntimeError(f"tail records of free pages {sorted(dead)}")
        if sorted([*self._free, *self._slot_of.values()]) != list(range(self.count)):
            raise RuntimeError(
                f"tail records: {len(self._free)} free + {len(self._slot_of)} in use != {self.count}, or a slot twice"
            )


class TailRecords:
    """The records' bytes and how they come and go. Used by the scheduler's thread; `executor` copies."""

    def __init__(
        self, layout: V4Layout, count: int, executor: Executor, *, poison: bool, wait_timeout_s: float
    ) -> None:
        self.table = RecordTable(count)
        self._executor, self._poison, self._timeout_s = executor, poison, wait_timeout_s
        self._last_layer = layout.geometry.layers - 1
        self._csa_index = {layer: index for index, layer in enumerate(layout.csa_layers)}
        # Filled, so that the memory is there from the start: [records, layers, rows, width], by space.
        fill = torch.nan if poison else 0.0
        self._kept = {
            space: torch.full((count, *shape), fill, dtype=dtype, device="cpu")
            for space, (shape, dtype) in layout.record_parts.items()
        }
        self._tickets: dict[int, Ticket] = {}  # slot -> its latest write
        self._staged: deque[Ticket] = deque()

    @property
    def nbytes(self) -> int:
        return sum(kept.nbytes for kept in self._kept.values())

    def write(
        self,
        layer: int,
        slots: Sequence[int],
        windows: Sequence[torch.Tensor],
        journals: Sequence[Mapping[str, torch.Tensor]],
    ) -> None:
        """Of one layer: windows [W, head_dim] and, of CSA, journals {space: [4, width]}, as they were when pages ended.

        A forward writes all its layers, in order.
        """
        if len(self._staged) == STAGING_LAYERS:
            self._staged.popleft().wait(self._timeout_s, f"layer {layer}, tail records' staging,")
        staged = {WINDOW: (layer, torch.stack(list(windows)))}
        if layer in self._csa_index:
            for space in journals[0]:
                rows = torch.stack([own[space] for own in journals])
                staged[space] = self._csa_index[layer], rows
        places = torch.tensor(slots, device="cpu")

        def land() -> None:
            for space, (index, rows) in staged.items():
                self._kept[space][places, index] = rows.cpu()

        # Each after the one before, so that the last layer's ticket fails with any of them.
        before = list(self._staged)[-1:]
        ticket = self._executor.submit_write(land, f"tail records {list(slots)}, layer {layer}", before)
        self._staged.append(ticket)
        if layer == self._last_layer:
            self._tickets.update(dict.fromkeys(slots, ticket))

    def read(self, page: int, who: str) -> dict[str, torch.Tensor]:
        """The record of `page`, {space: [layers, rows, width]} in host memory, to be copied at once. RuntimeError if none."""
        if page not in self.table:
            raise RuntimeError(f"{who} goes on after page {page}, which has no tail record")
        slot = self.table.use(page)
        self._tickets[slot].wait(self._timeout_s, f"{who}, tail record of page {page},")
        return {space: kept[slot] for space, kept in self._kept.items()}

    def journals(self, layer: int, record: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Of a record, what Selector.restore wants of one layer."""
        if layer not in self._csa_index:
            return {}
        return {space: rows[self._csa_index[layer]] for space, rows in record.items() if space != WINDOW}

    def pages_freed(self, pages: Iterable[int]) -> None:
        slots = self.table.drop(pages)
        if self._poison:
            for slot in slots:
                self._tickets[slot].wait(self._timeout_s, "poisoning tail records of freed pages")
                for kept in self._kept.values():
                    kept[slot] = torch.nan
