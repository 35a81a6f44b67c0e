"""How fast this host reads memory, attends a model's KV and transfers it: measured in under two seconds."""

from __future__ import annotations

import itertools
import math
import mmap
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

import cpu_attn
from cpu_attn.bench_inputs import WAIT_S, fill_random, page_table, paged_kv_of
from cpu_attn.probe import huge_buffer
from sglang_inplacekv.arena import host_memory_available
from sglang_inplacekv.cores import make_team
from sglang_inplacekv.executors.dma import CopyBatch
from sglang_inplacekv.pinning import pinned
from sglang_inplacekv.planning import ModelKV

_CALL_BYTES = 64 * 2**20  # of one read or attention call: long enough that starting it does not count
_THREAD_BYTES = 64 * 2**20  # read in turn for each thread of the largest team, since caches grow with cores
_LEAST_BYTES, _MOST_BYTES = 2**28, 2**30
_MEMORY_PART = 8  # at most so small a part of the memory that is left
_TIMED_S = 0.04  # of reads, and of attention, by one team
_LEAST_CALLS = 4
_HAND_OVERS = 100
_SWEEP_S = 1.4  # smaller teams are tried while it lasts
_COPY_BYTES = 2**28
_ROUNDS = 5
# A rate within so little of the best is as good: what is left is the noise of a host, and cores for others.
_AS_GOOD = 0.97


@dataclass(frozen=True)
class TeamRates:
    """What a team of so many threads does."""

    threads: int
    read_bytes_s: float
    hand_over_s: float
    token_s: float | None  # attention over a token of a layer; None without a model


def team_sizes(most: int) -> list[int]:
    """The largest team first, then down to a quarter of it."""
    return sorted({max(1, -(-most * eighths // 8)) for eighths in (8, 7, 6, 5, 4, 3, 2)}, reverse=True)


def knee(rates: Mapping[int, float]) -> int:
    """Of rates by threads: the fewest threads that are as good as the best."""
    best = max(rates.values())
    return min(threads for threads, rate in rates.items() if rate >= _AS_GOOD * best)


def best_team(found: Iterable[TeamRates]) -> TeamRates:
    """The smallest team that reads memory as fast as any, or, if arithmetic bounds the model's attention, attends so."""
    by_threads = {each.threads: each for each in found}
    threads = knee({each.threads: each.read_bytes_s for each in by_threads.values()})
    attention = {
        each.threads: 1 / each.token_s
        for each in by_threads.values()
        if each.token_s and each.threads >= threads
    }
    return by_threads[knee(attention) if attention else threads]


def measure_teams(sizes: Iterable[int], model: ModelKV | None, device: str) -> list[TeamRates]:
    """Rates of teams of these sizes, as `make_team` makes them, each over memory of its own; of the first in any case."""
    sizes, end = list(sizes), time.monotonic() + _SWEEP_S
    found: list[TeamRates] = []
    wanted = min(max(_THREAD_BYTES * sizes[0], _LEAST_BYTES), _MOST_BYTES)
    total = min(wanted, host_memory_available() // _MEMORY_PART)
    for threads in sizes:
        if found and time.monotonic() >= end:
            break
        with make_team(threads, device) as team:
            found.append(_measure_team(team, model, total))
    return found


def _measure_team(team: cpu_attn.Executor, model: ModelKV | None, total_bytes: int) -> TeamRates:
    page_bytes = 4096 if model is None else model.layer_token_bytes * model.shape.page_size
    pages = max(1, min(_CALL_BYTES, total_bytes) // page_bytes)
    call_bytes = pages * page_bytes
    memory = huge_buffer(call_bytes * max(1, total_bytes // call_bytes), team)
    fill_random(memory, team)
    buffers = memory.split(call_bytes)
    read_s = _call_seconds(lambda index: team.submit_read(buffers[index]), len(buffers))
    token_s = None
    if model is not None:
        token_s = _call_seconds(_attention(model, team, buffers), len(buffers))
        token_s /= pages * model.shape.page_size
    hand_over_s = cpu_attn.hand_over_seconds(team, _HAND_OVERS)
    return TeamRates(team.threads, call_bytes / read_s, hand_over_s, token_s)


def _call_seconds(submit: Callable[[int], cpu_attn.Job], buffers: int) -> float:
    """The least, over all buffers in turn: whatever else the host does meanwhile only adds to it."""
    least_s, end = math.inf, time.monotonic() + _TIMED_S
    for index in itertools.count():
        if index >= _LEAST_CALLS and time.monotonic() >= end:
            break
        job = submit(index % buffers)
        job.wait(WAIT_S)
        least_s = min(least_s, job.seconds)
    return least_s


def _attention(
    model: ModelKV, team: cpu_attn.Executor, buffers: tuple[torch.Tensor, ...]
) -> Callable[[int], cpu_attn.Job]:
    """Queues attention over buffer i, which is laid out as region C is."""
    shape = model.shape
    table = page_table(1, len(buffers[0]) // model.layer_token_bytes, shape.page_size)
    q, scale = torch.randn(1, model.q_heads, shape.head_dim).to(shape.dtype), shape.head_dim**-0.5
    if shape.value_dim is not None:
        rows = (-1, shape.page_size, 1, shape.head_dim)
        latents = [
            cpu_attn.PagedLatent([own.view(shape.dtype).view(rows)], shape.value_dim) for own in buffers
        ]
        return lambda index: team.submit_paged_mla_decode(q, latents[index], table, scale)
    layers = [
        paged_kv_of(own, shape.dtype, shape.kv_heads, shape.page_size, shape.head_dim) for own in buffers
    ]
    return lambda index: team.submit_paged_decode(q, layers[index], table, scale)


def measure_link(piece_bytes: int = _COPY_BYTES) -> float:
    """Bytes a second from pinned memory to the GPU, in one batch of pieces that lie apart: one layer of a page each, say."""
    pieces = max(1, _COPY_BYTES // piece_bytes)
    # Mapped, since what is pinned should begin with a system page.
    memory = mmap.mmap(-1, pieces * piece_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    host = torch.frombuffer(memory, dtype=torch.uint8)
    target = torch.empty_like(host, device="cuda")
    stream = torch.cuda.Stream()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    places = np.arange(pieces, dtype=np.uint64) * np.uint64(piece_bytes)
    batch = CopyBatch(
        places + np.uint64(target.data_ptr()),
        places[::-1] + np.uint64(host.data_ptr()),
        np.full(pieces, piece_bytes, dtype=np.uint64),
    )
    times = []
    with pinned(host):
        for _ in range(_ROUNDS):
            begin.record(stream)
            batch.issue(stream)
            end.record(stream)
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
    del target
    torch.cuda.empty_cache()  # what it took is for the regions
    return batch.nbytes / statistics.median(times)
