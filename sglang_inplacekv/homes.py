"""Which page ids are free, and which home the next page gets. Pure bookkeeping: no torch, no SGLang."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from sglang_inplacekv.layout import ROLE_COMPUTE, ROLE_NONE, ROLE_TRANSFER, RegionSizes
from sglang_inplacekv.tickets import Ticket
from sglang_inplacekv.write_scope import WriteScope


class Pins(Protocol):
    """What a chunk's role means to the host besides bookkeeping: pinning.ChunkPins where there is CUDA."""

    def is_pinned(self, chunk: int) -> bool: ...

    def prepare(self, chunk: int, role: int) -> None: ...

    def keep_spare(self, empty: Sequence[int]) -> None: ...


class HomeTable:
    """Free lists of D and of every host chunk, chunk roles, and the write ticket of each page.

    Order of choice for a new page: D while it has room; then the role WriteScope wants, in a chunk that already has it;
    then an empty chunk, which takes the role; then the other role (counted as a fallback). So an allocation fails only
    when no id is free. T takes chunks from the low end and prefers pinned ones, C from the high end and prefers others.
    A freed page is free at once and goes to the tail of its list; it is handed out only after its write ticket has
    completed.
    """

    def __init__(
        self,
        sizes: RegionSizes,
        scope: WriteScope,
        wait_timeout_s: float,
        pins: Pins | None = None,
    ) -> None:
        self.sizes, self.scope = sizes, scope
        self._pins = pins
        self._timeout_s = wait_timeout_s
        self.device_evicted_tokens = 0  # cached tokens given up, since start, to make room in D
        self.tickets: dict[int, Ticket] = {}  # of pages, free or not, whose home is still being written
        self.clear()

    def clear(self) -> None:
        self._device_free = deque(range(1, self.sizes.first_host_page))
        self._chunk_free = [deque(self.sizes.chunk_page_range(c)) for c in range(self.sizes.chunks)]
        self.role = [ROLE_NONE] * self.sizes.chunks
        self._used = bytearray(self.sizes.pages)
        self._host_free = self.sizes.host_pages
        self.scope.compute_pages = self.scope.transfer_pages = 0

    @property
    def device_free_pages(self) -> int:
        return len(self._device_free)

    @property
    def device_used_pages(self) -> int:
        return self.sizes.device_pages - len(self._device_free)

    @property
    def free_pages(self) -> int:
        return len(self._device_free) + self._host_free

    def all_free(self) -> Iterator[int]:
        yield from self._device_free
        for free in self._chunk_free:
            yield from free

    def all_used(self) -> list[int]:
        return [page for page, used in enumerate(self._used) if used]

    def role_of(self, page: int) -> int:
        return self.role[self.sizes.chunk_of(page)]

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` pages, D first, then C, then T so that one request's T pages are adjacent. None if too few are free."""
        if count > self.free_pages:
            return None
        from_device = min(count, len(self._device_free))
        pages = [self._take(self._device_free) for _ in range(from_device)]
        host = count - from_device
        compute = self.scope.wanted_compute(host)
        pages += [self._take_host(ROLE_COMPUTE) for _ in range(compute)]
        pages += [self._take_host(ROLE_TRANSFER) for _ in range(host - compute)]
        return pages

    def _take_host(self, wanted: int) -> int:
        chunk = self._chunk_with(wanted)
        if chunk is None:
            chunk = self._claim_empty(wanted)
        if chunk is None:
            chunk = self._chunk_with(ROLE_COMPUTE + ROLE_TRANSFER - wanted)
            self.scope.fallback_pages += 1
        if chunk is None:
            raise RuntimeError(
                f"{self._host_free} host pages counted free, no chunk of {self.sizes.chunks} has one"
            )
        self._host_free -= 1
        self._count(chunk, +1)
        return self._take(self._chunk_free[chunk])

    def _chunk_with(self, role: int) -> int | None:
        chunks = range(self.sizes.chunks)
        order = reversed(chunks) if role == ROLE_COMPUTE else chunks
        return next((c for c in order if self.role[c] == role and self._chunk_free[c]), None)

    def _empty_chunks(self) -> list[int]:
        return [chunk for chunk, role in enumerate(self.role) if role == ROLE_NONE]

    def _claim_empty(self, role: int) -> int | None:
        """Give an empty chunk `role`, if there is one."""
        empty, pins = self._empty_chunks(), self._pins
        if not empty:
            return None
        order = sorted(empty, key=lambda chunk: (pins is not None and not pins.is_pinned(chunk), chunk))
        chunk = order[-1] if role == ROLE_COMPUTE else order[0]
        self.role[chunk] = role
        if pins is not None:
            # Writes to freed pages may still be under way, by DMA to memory that must stay pinned so long.
            for page in self.sizes.chunk_page_range(chunk):
                if page in self.tickets:
                    self.tickets[page].wait(self._timeout_s, f"giving page {page}'s chunk {chunk} a new role")
            pins.prepare(chunk, role)
            pins.keep_spare([other for other in empty if other != chunk])
        return chunk

    def _take(self, free: deque[int]) -> int:
        page = free.popleft()
        ticket = self.tickets.pop(page, None)
        if ticket is not None:
            ticket.wait(self._timeout_s, f"handing out page {page}")
        self._used[page] = 1
        return page

    def free(self, pages: Iterable[int]) -> None:
        """Give pages back. Raises RuntimeError on a double free or a foreign id."""
        for page in pages:
            if not 0 < page < self.sizes.pages or not self._used[page]:
                raise RuntimeError(f"page {page} freed but not allocated (ids 1..{self.sizes.pages - 1})")
            self._used[page] = 0
            if self.sizes.is_device(page):
                self._device_free.append(page)
                continue
            chunk = self.sizes.chunk_of(page)
            self._chunk_free[chunk].append(page)
            self._host_free += 1
            self._count(chunk, -1)
            if len(self._chunk_free[chunk]) == len(self.sizes.chunk_page_range(chunk)):
                self.role[chunk] = ROLE_NONE
                if self._pins is not None:
                    self._pins.keep_spare(self._empty_chunks())

    def _count(self, chunk: int, pages: int) -> None:
        if self.role[chunk] == ROLE_COMPUTE:
            self.scope.compute_pages += pages
        else:
            self.scope.transfer_pages += pages

    def set_ticket(self, pages: Iterable[int], ticket: Ticket) -> None:
        for page in pages:
            self.tickets[page] = ticket

    def outstanding(self) -> dict[int, Ticket]:
        """Write tickets that have not completed, by page. Completed ones are forgotten, failed ones raise."""
        for page in [page for page, ticket in self.tickets.items() if ticket.done]:
            self.tickets.pop(page).wait(0, f"reading page {page}")
        return self.tickets

    def check_integrity(self) -> None:
        """Raise RuntimeError unless free + used = capacity in D and on the host, and each id is in exactly one place."""
        free = list(self.all_free())
        used = sum(self._used)
        if (
            len(free) + used != self.sizes.pages - 1
            or len(set(free)) != len(free)
            or any(self._used[p] for p in free)
        ):
            raise RuntimeError(
                f"pages: {len(free)} free ({len(set(free))} distinct) + {used} used != {self.sizes.pages - 1}"
            )
        if len(free) != self.free_pages:
            raise RuntimeError(f"{len(free)} pages on free lists, {self.free_pages} counted")
        live = self.sizes.host_pages - self._host_free
        if self.scope.host_pages != live:
            raise RuntimeError(
                f"C {self.scope.compute_pages} + T {self.scope.transfer_pages} pages != {live} live host pages"
            )
        for chunk, role in enumerate(self.role):
            whole = len(self._chunk_free[chunk]) == len(self.sizes.chunk_page_range(chunk))
            if whole != (role == ROLE_NONE):
                raise RuntimeError(
                    f"chunk {chunk} has role {role} and {len(self._chunk_free[chunk])} free pages"
                )
