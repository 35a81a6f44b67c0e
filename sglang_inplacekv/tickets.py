"""Tickets: the promise that bytes will have been written, and the named, bounded wait for it."""

from __future__ import annotations

import threading
from collections.abc import Iterable


class WaitTimeout(RuntimeError):
    """A wait outlived its bound; the text names what was waited for and by whom."""


class Ticket:
    """One pending write or computation. Completed or failed exactly once, by the queue that runs it."""

    __slots__ = ("_done", "_error", "what")

    def __init__(self, what: str) -> None:
        self.what = what
        self._done = threading.Event()
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def complete(self) -> None:
        self._done.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._done.set()

    def wait(self, timeout_s: float, waiter: str) -> None:
        """Return once done. Raises WaitTimeout after `timeout_s`, or RuntimeError from the failed writer."""
        if not self._done.wait(timeout_s):
            raise WaitTimeout(f"{waiter} waited {timeout_s:g} s for {self.what}")
        if self._error is not None:
            raise RuntimeError(
                f"{waiter} waited for {self.what}, which failed: {self._error}"
            ) from self._error


def wait_all(tickets: Iterable[Ticket], timeout_s: float, waiter: str) -> None:
    for ticket in tickets:
        ticket.wait(timeout_s, waiter)
