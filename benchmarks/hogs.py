"""What takes the link or the CPU away from a decode."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager

import torch

_COPY_BYTES = 2**26  # as large as a tile of the decode, so that the two take turns evenly
_READ_BYTES = 2**27  # of each process; together beyond any cache
_QUEUED = 4  # copies ahead, lest the link rest while this thread is kept from the interpreter
_END_S = 30.0
_READER = """
import os, sys
import numpy as np
os.sched_setaffinity(0, {int(sys.argv[1])})
data = np.ones(int(sys.argv[2]) // 8)
print("reads", flush=True)
while os.getppid() == int(sys.argv[3]):
    data.sum()
"""


class LinkHog:
    """Copies pinned memory to the GPU, on a stream of its own, without a pause; without a GPU, memory to memory."""

    def __init__(self) -> None:
        cuda = torch.cuda.is_available()
        self._source = torch.ones(_COPY_BYTES, dtype=torch.uint8, pin_memory=cuda)
        self._target = torch.empty_like(self._source, device="cuda" if cuda else "cpu")
        self._stream = torch.cuda.Stream() if cuda else None
        self.gbps = 0.0

    @contextmanager
    def working(self) -> Iterator[None]:
        over, pool = threading.Event(), ThreadPoolExecutor(1, "link hog")
        copying = pool.submit(self._copy, over)
        try:
            yield
        finally:
            over.set()
            pool.shutdown(wait=False)
            if not wait([copying], _END_S).done:
                raise TimeoutError(f"the link hog still copies {_END_S:g} s after it was to end")
            self.gbps = copying.result()

    def _copy(self, over: threading.Event) -> float:
        """GB/s."""
        begun_s, copies = time.perf_counter(), 0
        queued: list[torch.cuda.Event] = []
        while not over.is_set():
            with torch.cuda.stream(self._stream):
                self._target.copy_(self._source, non_blocking=True)
                if self._stream is not None:
                    # Blocking, so that waiting takes no core from the CPU team.
                    queued.append(torch.cuda.Event(blocking=True))
                    queued[-1].record()
            copies += 1
            if len(queued) == _QUEUED:
                queued.pop(0).synchronize()
        if self._stream is not None:
            self._stream.synchronize()
        return copies * _COPY_BYTES / (time.perf_counter() - begun_s) / 1e9


@contextmanager
def cpu_hog(cores: Sequence[int]) -> Iterator[None]:
    """A process on each of `cores` that reads memory without a pause."""
    command = [sys.executable, "-c", _READER]
    readers = [
        subprocess.Popen(
            [*command, str(core), str(_READ_BYTES), str(os.getpid())], stdout=subprocess.PIPE, text=True
        )
        for core in cores
    ]
    try:
        for reader in readers:
            if reader.stdout.readline().strip() != "reads":
                raise RuntimeError(f"a reader of the CPU hog ended with {reader.wait(_END_S)}")
        yield
    finally:
        for reader in readers:
            reader.kill()
            reader.wait(_END_S)
            reader.stdout.close()
