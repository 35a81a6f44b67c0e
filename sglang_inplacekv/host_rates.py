"""How fast this host reads memory and attends a model's KV, alone and beside copies: measured in under two seconds.

The sweep over team sizes takes `_SWEEP_S` and what its last team takes, most of it for the memory that each team touches and
fills: that of another team may lie on other nodes. The best team does so once more, for `_LINE_S` of calls beside copies. The
link alone takes 20 copies, from the same pinned memory.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

import cpu_attn
from cpu_attn.bench_inputs import WAIT_S, fill_random, paged_kv_of
from cpu_attn.probe import huge_buffer
from sglang_inplacekv.arena import host_memory_available
from sglang_inplacekv.config import ConfigError
from sglang_inplacekv.cores import make_team
from sglang_inplacekv.planning import ModelKV
from sglang_inplacekv.queued_copies import QueuedCopies

_CALL_BYTES = 64 * 2**20  # of one read or attention call: long enough that starting it does not count
_THREAD_BYTES = 64 * 2**20  # read in turn for each thread of the largest team, since caches grow with cores
_LEAST_BYTES, _MOST_BYTES = 2**28, 2**30
_MEMORY_PART = 8  # at most so small a part of the memory that is left
_TIMED_S = 0.04  # of reads, and of attention, by one team
_LEAST_CALLS = 4
_HAND_OVERS = 100
_SWEEP_S = 1.0  # smaller teams are tried while it lasts
_SMALL_PART = 8  # an attention line is drawn through calls of two sizes: this is their ratio
_LINE_S = 0.15  # of these calls
_QUEUED = 8  # copies at first: longer than a call
# A rate within so little of the best is as good: what is left is the noise of a host, and cores for others.
_AS_GOOD = 0.97


@dataclass(frozen=True)
class TeamRates:
    """What a team of so many threads does."""

    threads: int
    read_bytes_s: float
    hand_over_s: float
    token_s: float | None  # attention over a token of a layer, at best; None without a model


@dataclass(frozen=True)
class AttentionRates:
    """What a team's attention usually takes, beside copies where there is a GPU, and what it leaves the link."""

    threads: int
    fixed_s: float  # of a call, besides the hand-over
    token_s: float  # of a token of a layer, besides that
    link_bytes_s: float | None  # None without a GPU


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
    total = _cold_bytes(sizes[0])
    for threads in sizes:
        if found and time.monotonic() >= end:
            break
        with make_team(threads, device) as team:
            found.append(_measure_team(team, model, total))
    return found


def _cold_bytes(most_threads: int) -> int:
    wanted = min(max(_THREAD_BYTES * most_threads, _LEAST_BYTES), _MOST_BYTES)
    return min(wanted, host_memory_available() // _MEMORY_PART)


def _measure_team(team: cpu_attn.Executor, model: ModelKV | None, total_bytes: int) -> TeamRates:
    page_bytes = 4096 if model is None else model.layer_token_bytes * model.shape.page_size
    memory, pages = _memory(team, page_bytes, total_bytes)
    buffers = memory.split(pages * page_bytes)
    read_s = _call_seconds(lambda index: team.submit_read(buffers[index % len(buffers)]))
    token_s = None
    if model is not None:
        attention = _Attention(model, team, memory)
        tokens = pages * model.shape.page_size
        token_s = _call_seconds(lambda index: attention.submit(tokens)) / tokens
    hand_over_s = cpu_attn.hand_over_seconds(team, _HAND_OVERS)
    return TeamRates(team.threads, len(buffers[0]) / read_s, hand_over_s, token_s)


def _memory(team: cpu_attn.Executor, page_bytes: int, total_bytes: int) -> tuple[torch.Tensor, int]:
    """Random, of whole calls, and the pages of one."""
    pages = max(1, min(_CALL_BYTES, total_bytes) // page_bytes)
    call_bytes = pages * page_bytes
    size = call_bytes * max(1, total_bytes // call_bytes)
    if size > total_bytes and size > (left := host_memory_available()):
        raise ConfigError(
            f"--page-size: probes need a page, of which a layer takes {page_bytes / 1e9:.2f} GB, and this host has "
            f"{left / 1e9:.2f} GB of memory left: possible are smaller pages"
        )
    memory = huge_buffer(size, team)
    fill_random(memory, team)
    return memory, pages


def _call_seconds(submit: Callable[[int], cpu_attn.Job]) -> float:
    """The least of many calls: whatever else the host does meanwhile only adds to it."""
    least_s, end = math.inf, time.monotonic() + _TIMED_S
    for index in itertools.count():
        if index >= _LEAST_CALLS and time.monotonic() >= end:
            break
        job = submit(index)
        job.wait(WAIT_S)
        least_s = min(least_s, job.seconds)
    return least_s


class _Attention:
    """Calls over memory that is laid out as region C is, each over the pages after those of the last."""

    def __init__(self, model: ModelKV, team: cpu_attn.Executor, memory: torch.Tensor) -> None:
        shape = model.shape
        self._page_size, self._next = shape.page_size, 0
        self._pages = len(memory) // (model.layer_token_bytes * shape.page_size)
        q, scale = torch.randn(1, model.q_heads, shape.head_dim).to(shape.dtype), shape.head_dim**-0.5
        if shape.value_dim is not None:
            rows = memory.view(shape.dtype).view(-1, shape.page_size, 1, shape.head_dim)
            latent = cpu_attn.PagedLatent([rows], shape.value_dim)
            self._submit = lambda table: team.submit_paged_mla_decode(q, latent, table, scale)
        else:
            kv = paged_kv_of(memory, shape.dtype, shape.kv_heads, shape.page_size, shape.head_dim)
            self._submit = lambda table: team.submit_paged_decode(q, kv, table, scale)

    def submit(self, tokens: int) -> cpu_attn.Job:
        count = -(-tokens // self._page_size)
        pages = torch.arange(self._next, self._next + count, dtype=torch.int32) % self._pages
        self._next = (self._next + count) % self._pages
        region, indptr = torch.zeros_like(pages), torch.tensor([0, count], dtype=torch.int32)
        return self._submit(
            cpu_attn.PageTable(region, pages, indptr, torch.tensor([tokens], dtype=torch.int32))
        )


def measure_attention(
    threads: int, most_threads: int, model: ModelKV, device: str, copies: QueuedCopies | None
) -> AttentionRates:
    """The attention line of a team of `threads`, and the link's rate beside it if there are copies.

    most_threads: of the largest team of this host, by which its caches are judged.
    """
    with make_team(threads, device) as team:
        page_bytes = model.layer_token_bytes * model.shape.page_size
        memory, pages = _memory(team, page_bytes, _cold_bytes(most_threads))
        large = pages * model.shape.page_size
        sizes = (large, max(1, large // _SMALL_PART))
        seconds = _seconds_beside(_Attention(model, team, memory), sizes, copies)
    return AttentionRates(
        team.threads, *line_through(sizes, seconds), None if copies is None else copies.take_rate()
    )


def _seconds_beside(
    attention: _Attention, sizes: tuple[int, int], copies: QueuedCopies | None
) -> tuple[float, float]:
    """Medians of calls of two sizes in turn, while copies go on without a pause."""
    seconds: dict[int, list[float]] = {tokens: [] for tokens in sizes}
    queued, end = _QUEUED, time.monotonic() + _LINE_S
    while min(map(len, seconds.values())) < _LEAST_CALLS or time.monotonic() < end:
        tokens = min(sizes, key=lambda tokens: len(seconds[tokens]))
        if copies is not None:
            copies.top_up(queued)
        job = attention.submit(tokens)
        job.wait(WAIT_S)
        if copies is not None and not copies.waiting:
            queued *= 2  # the call was longer than they
        else:
            seconds[tokens].append(job.seconds)
    large, small = (statistics.median(each) for each in seconds.values())
    return large, small


def line_through(sizes: tuple[int, int], seconds: tuple[float, float]) -> tuple[float, float]:
    """(fixed_s, token_s) of the line through a large and a small call."""
    (large, small), (large_s, small_s) = sizes, seconds
    token_s = (large_s - small_s) / (large - small)
    fixed_s = large_s - token_s * large
    # A small call that is too fast, or slower than the large one, tells noise: the large one alone is believed.
    return (fixed_s, token_s) if token_s > 0 and fixed_s >= 0 else (0.0, large_s / large)
