"""Decode windows: where a host-home page lives on the device from its first token until its flush is acknowledged."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from sglang_inplacekv.tickets import Ticket


@dataclass(frozen=True)
class Flush:
    """A full window on its way home. The window stays readable until the ticket is acknowledged."""

    page: int
    window: int
    ticket: Ticket


class WindowTable:
    """Who owns which window. Windows belong to pages, so finish, abort, retract and dedup need no hook of their own.

    A window is in exactly one of: free, open (owned by a page), flushing (owned by a page, or orphaned by its free).
    Changes happen between forwards only, on the scheduler's thread.
    """

    def __init__(self, count: int, on_release: Callable[[int], None]) -> None:
        self.count = count
        self._free = deque(range(count))
        self._window_of: dict[int, int] = {}
        self._flushes: deque[Flush] = deque()
        self._on_release = on_release
        self.flushed_pages = 0  # since start

    @property
    def free_count(self) -> int:
        return len(self._free)

    def open_pages(self) -> dict[int, int]:
        """Page -> window, of all pages that own one."""
        return self._window_of

    @property
    def open_count(self) -> int:
        return len(self._window_of)

    def window_of(self, page: int) -> int | None:
        return self._window_of.get(page)

    def open(self, page: int, timeout_s: float, who: str = "") -> int:
        """Give `page` a window, waiting for the oldest flush if none is free. `who` is for messages."""
        if page in self._window_of:
            raise RuntimeError(f"page {page} already owns window {self._window_of[page]}")
        while not self._free:
            if not self._flushes:
                raise RuntimeError(
                    f"no window for page {page}: {self.count} windows, {len(self._window_of)} open, none being flushed"
                )
            self._flushes[0].ticket.wait(
                timeout_s, f"{who} opening a window for page {page} (region D)".strip()
            )
            self.acknowledge()
        window = self._free.popleft()
        self._window_of[page] = window
        return window

    def begin_flush(self, page: int, ticket: Ticket) -> None:
        self._flushes.append(Flush(page, self._window_of[page], ticket))

    def acknowledge(self) -> list[Flush]:
        """Take back the windows whose flush has completed, oldest first; their pages are read from home from now on."""
        done = []
        while self._flushes and self._flushes[0].ticket.done:
            flush = self._flushes.popleft()
            flush.ticket.wait(0, f"acknowledging the flush of page {flush.page}")
            if self._window_of.get(flush.page) == flush.window:
                del self._window_of[flush.page]
            self._release(flush.window)
            self.flushed_pages += 1
            done.append(flush)
        return done

    def page_freed(self, page: int) -> None:
        """Drop the page's claim. A window still being flushed comes back with its acknowledgement."""
        window = self._window_of.pop(page, None)
        if window is not None and not any(flush.window == window for flush in self._flushes):
            self._release(window)

    def forget_all(self) -> None:
        """Release every open window. Nothing may be in flight."""
        if self._flushes:
            raise RuntimeError(f"{len(self._flushes)} flushes in flight")
        for page in list(self._window_of):
            self.page_freed(page)

    def _release(self, window: int) -> None:
        self._on_release(window)
        self._free.append(window)

    def check_integrity(self) -> None:
        flushing = {flush.window for flush in self._flushes}
        owned = set(self._window_of.values()) | flushing
        if len(self._free) + len(owned) != self.count or owned & set(self._free):
            raise RuntimeError(
                f"windows: {len(self._free)} free + {len(owned)} owned != {self.count} "
                f"(open {self._window_of}, flushing {flushing})"
            )
