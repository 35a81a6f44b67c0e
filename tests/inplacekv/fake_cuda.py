"""Just enough CUDA for a host without. A stream's copies happen as late as they may: when something waits for them.

So a buffer that is overwritten or read without a wait holds the wrong bytes, whatever the timing.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from sglang_inplacekv import pinning
from sglang_inplacekv.executors import cuda_homes, cuda_tiles, dma

_numbers = itertools.count(1)


class FakeStream:
    """Operations in order, run by whoever waits. The default stream, number 0, runs them at once."""

    numbered: ClassVar[dict[int, FakeStream]] = {}

    def __init__(self, number: int | None = None) -> None:
        self.cuda_stream = next(_numbers) if number is None else number
        self.numbered[self.cuda_stream] = self
        self.device = torch.device("cpu")
        self._operations: deque[Callable[[], None]] = deque()
        self._lock = threading.RLock()
        self.ran = self.queued = 0

    def add(self, operation: Callable[[], None]) -> None:
        self._operations.append(operation)
        self.queued += 1
        if self.cuda_stream == 0:
            self.synchronize()

    def run_until(self, count: int) -> None:
        with self._lock:
            while self.ran < count:
                self._operations.popleft()()
                self.ran += 1

    def synchronize(self) -> None:
        self.run_until(self.queued)

    def wait_event(self, event: FakeEvent) -> None:
        assert event.recorded is not None, "a wait for an event that was never recorded waits for nothing"
        recorded = event.recorded
        self.add(lambda: recorded[0].run_until(recorded[1]))


class FakeEvent:
    def __init__(self, **_: object) -> None:
        self.recorded: tuple[FakeStream, int] | None = None
        self.at = 0

    def record(self, stream: FakeStream | None = None) -> None:
        stream = stream or FakeStream.numbered[0]
        self.recorded, self.at = (stream, stream.queued), next(_numbers)

    def synchronize(self) -> None:
        assert self.recorded is not None, "a wait for an event that was never recorded waits for nothing"
        self.recorded[0].run_until(self.recorded[1])

    def query(self) -> bool:
        return self.recorded is not None and self.recorded[0].ran >= self.recorded[1]

    def elapsed_time(self, other: FakeEvent) -> int:
        assert self.query() and other.query()
        return other.at - self.at


def current_stream() -> FakeStream:
    return FakeStream.numbered[0]


def fake_library(version: int, fail: int = 0) -> SimpleNamespace:
    """A libcudart whose copies are memmoves; `calls` counts them and `copied` lists their bytes."""

    def runtime_version(out) -> int:
        out._obj.value = version
        return 0

    def later(target, source, nbytes, stream) -> None:
        library.copied.append(nbytes)
        FakeStream.numbered[stream].add(lambda: ctypes.memmove(target, source, nbytes) and None)

    def batch(targets, sources, sizes, count, attributes, first, kinds, stream) -> int:
        library.calls += 1
        assert attributes._obj.srcAccessOrder == 1 and first._obj.value == 0 and kinds == 1 and stream
        arrays = [list((ctypes.c_uint64 * count).from_address(at)) for at in (targets, sources, sizes)]
        for target, source, nbytes in zip(*arrays, strict=True):
            later(target, source, nbytes, stream)
        return fail

    def single(target, source, nbytes, kind, stream) -> int:
        library.calls += 1
        assert kind == 4 and stream
        later(target, source, nbytes, stream)
        return fail

    def error_string(code) -> bytes:
        return b"invalid argument"

    library = SimpleNamespace(
        calls=0,
        copied=[],
        cudaRuntimeGetVersion=runtime_version,
        cudaMemcpyBatchAsync=batch,
        cudaMemcpyAsync=single,
        cudaGetErrorString=error_string,
    )
    return library


def install(patch: pytest.MonkeyPatch, library: SimpleNamespace | None = None) -> SimpleNamespace:
    """Put the fakes in place of what the executor's copies use; returns the library."""
    library = library or fake_library(13000)
    runtime = dma.Runtime(library)
    patch.setattr(FakeStream, "numbered", {})
    FakeStream(0)
    patch.setattr(dma, "runtime", lambda: runtime)
    patch.setattr(torch.cuda, "Event", FakeEvent)
    patch.setattr(torch.cuda, "current_stream", current_stream)
    patch.setattr(torch.cuda, "set_device", lambda device: None)
    patch.setattr(cuda_homes, "_pinned", lambda shape, dtype: torch.empty(*shape, dtype=dtype))
    patch.setattr(cuda_homes, "to_gpu", torch.from_numpy)
    patch.setattr(cuda_tiles, "_EVENTS", cuda_tiles.EventPool())
    return library


class FakeRegistrations:
    """cudaHostRegister and its opposite: the registered ranges, no two of which may overlap."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.ranges: dict[int, int] = {}
        self.fail_after: int | None = None
        patch.setattr(pinning, "_register", self.register)
        patch.setattr(pinning, "_unregister", self.unregister)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "set_device", lambda device: None)
        patch.setattr(torch.cuda, "synchronize", lambda device: None)

    def register(self, address: int, nbytes: int) -> int:
        if self.fail_after is not None and len(self.ranges) >= self.fail_after:
            return 2
        assert address % 4096 == 0 and nbytes % 4096 == 0
        for start, length in self.ranges.items():
            assert address >= start + length or start >= address + nbytes, "registered twice"
        self.ranges[address] = nbytes
        return 0

    def unregister(self, address: int) -> int:
        return 0 if self.ranges.pop(address, None) else 713

    def covers(self, tensor: torch.Tensor) -> bool:
        """Whether every byte of each row of `tensor` [rows, ...] is registered."""
        rows = [(row.data_ptr(), row.data_ptr() + row.nbytes) for row in tensor]
        return all(any(a <= start and stop <= a + n for a, n in self.ranges.items()) for start, stop in rows)
