"""How fast a thread team reads memory and multiplies, in the process that will run the kernel."""

import mmap
import statistics
import time

import torch
from torch import Tensor

from cpu_attn.executor import Executor
from cpu_attn.library import library

PROBE_WAIT_S = 120.0
MULTIPLY_S = 0.01  # of one timed run


def huge_buffer(size_bytes: int, executor: Executor, part_bytes: int | None = None) -> Tensor:
    """Return [size_bytes] uint8 in huge pages where the system grants them, each part touched by all of the team."""
    return _touched_buffer(size_bytes, executor, part_bytes, "MADV_HUGEPAGE")


def small_page_buffer(size_bytes: int, executor: Executor, part_bytes: int | None = None) -> Tensor:
    """Return as huge_buffer, in ordinary pages."""
    return _touched_buffer(size_bytes, executor, part_bytes, "MADV_NOHUGEPAGE")


def _touched_buffer(size_bytes: int, executor: Executor, part_bytes: int | None, advice: str) -> Tensor:
    # Private: shared anonymous memory gets no huge pages.
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, advice):
        memory.madvise(getattr(mmap, advice))
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    for part in buffer.split(part_bytes or size_bytes):
        executor.submit_first_touch(part).wait(PROBE_WAIT_S)
    return buffer


def read_probe_gbps(
    size_bytes: int = 1 << 30,
    *,
    executor: Executor | None = None,
    threads: int | None = None,
    repeats: int = 5,
) -> float:
    """Return the median GB/s (1e9 bytes) at which a team reads `size_bytes` of fresh memory.

    Uses `executor`, or a temporary one of `threads`. Choose a size well above the caches.
    """
    team = Executor(threads) if executor is None else executor
    try:
        buffer = huge_buffer(size_bytes, team)
        buffer.fill_(1)
        rates = []
        for _ in range(repeats):
            job = team.submit_read(buffer)
            job.wait(PROBE_WAIT_S)
            rates.append(size_bytes / job.seconds / 1e9)
        return statistics.median(rates)
    finally:
        if executor is None:
            team.close()


def hand_over_seconds(executor: Executor, repeats: int = 200) -> float:
    """Return the seconds from submitting a job that has nothing to do until its end is known.

    The lower quartile: whatever else the host does meanwhile only adds to it.
    """
    nothing = torch.zeros(1, dtype=torch.uint8)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        executor.submit_first_touch(nothing).wait(PROBE_WAIT_S)
        times.append(time.perf_counter() - start)
    return statistics.quantiles(times, n=4)[0]


class Multiplier:
    """Times bf16 products that stay in the registers of all threads of an executor.

    Multiplies as paged_mla_decode of bf16 does its scores: AMX tiles, bf16 pairs, or widened to fp32.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._rounds = 1000
        while self._seconds() < MULTIPLY_S:
            self._rounds *= 2
        self._flops = float(library().multiply_flops()) * self._rounds * executor.threads

    def gflops(self) -> float:
        """Return the GFLOP/s of one run of about MULTIPLY_S."""
        return self._flops / self._seconds() / 1e9

    def _seconds(self) -> float:
        job = self._executor.submit_multiply(self._rounds)
        job.wait(PROBE_WAIT_S)
        return job.seconds


def multiply_probe_gflops(executor: Executor, *, repeats: int = 5) -> float:
    """Return the median GFLOP/s of a Multiplier."""
    multiplier = Multiplier(executor)
    return statistics.median(multiplier.gflops() for _ in range(repeats))
