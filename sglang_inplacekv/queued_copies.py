"""The link's rate: copies from pinned memory to the GPU, queued so that it never pauses."""

from __future__ import annotations

import mmap
import statistics
from contextlib import ExitStack
from itertools import pairwise

import numpy as np
import torch

from sglang_inplacekv.executors.dma import CopyBatch
from sglang_inplacekv.pinning import pinned

_COPY_BYTES = 2**26
_PINNED_BYTES = 2**28  # read in turn: what lies in a cache is no memory
_COPIES_ALONE = 20
_LEAST_GAPS = 3


class QueuedCopies:
    """Copies one after the other on a stream of their own. Each is of pieces that lie apart: one layer of a page each, say.

    RuntimeError where CUDA refuses to pin memory or to copy. The calling thread's device is the one that is copied to.
    """

    def __init__(self, piece_bytes: int = _COPY_BYTES) -> None:
        pieces = max(1, _COPY_BYTES // piece_bytes)
        self.nbytes = pieces * piece_bytes  # of one copy
        self._sources, self._turn = max(1, _PINNED_BYTES // self.nbytes), 0
        # Mapped, since what is pinned should begin with a system page.
        mapped = mmap.mmap(-1, self._sources * self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        host = torch.frombuffer(mapped, dtype=torch.uint8)
        self._target: torch.Tensor | None = torch.empty_like(host[: self.nbytes], device="cuda")
        self._stream = torch.cuda.Stream()
        places = np.arange(pieces, dtype=np.uint64) * np.uint64(piece_bytes)
        self._batch = CopyBatch(
            places + np.uint64(self._target.data_ptr()),
            places[::-1] + np.uint64(host.data_ptr()),
            np.full(pieces, piece_bytes, dtype=np.uint64),
        )
        self._ends: list[torch.cuda.Event] = []
        self._done = 0  # of them
        self._pin = ExitStack()
        self._pin.enter_context(pinned(host))

    def top_up(self, copies: int) -> None:
        """Have so many queued, the one that runs included."""
        waiting = self.waiting
        if not waiting:
            self._forget()  # a pause is no copy's time
        for _ in range(copies - waiting):
            self._batch.issue(self._stream, source_shift=self._turn % self._sources * self.nbytes)
            self._turn += 1
            end = torch.cuda.Event(enable_timing=True)
            end.record(self._stream)
            self._ends.append(end)

    @property
    def waiting(self) -> int:
        """Copies that have not ended."""
        while self._done < len(self._ends) and self._ends[self._done].query():
            self._done += 1
        return len(self._ends) - self._done

    def rate_alone(self) -> float:
        """Bytes a second with nothing beside them."""
        self.top_up(_COPIES_ALONE)
        self._ends[-1].synchronize()
        return self.take_rate()

    def take_rate(self) -> float:
        """Bytes a second of the copies that have ended since the link was last idle, by the median time from end to end.

        If they are few, a few more are waited for. Then those that are queued are, and the link is idle.
        """
        self._ends[min(_LEAST_GAPS, len(self._ends) - 1)].synchronize()
        ended = self._ends[: len(self._ends) - self.waiting]
        self._ends[-1].synchronize()
        self._forget()
        return self.nbytes / statistics.median(a.elapsed_time(b) / 1e3 for a, b in pairwise(ended))

    def _forget(self) -> None:
        self._ends, self._done = [], 0

    def close(self) -> None:
        """Wait for what is queued, then give the memory back."""
        self._stream.synchronize()
        self._pin.close()
        self._target = None
        torch.cuda.empty_cache()  # what it took is for the regions
