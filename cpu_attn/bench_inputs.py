"""Shapes, random KV and page tables for the benchmarks."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from cpu_attn.decode import DecodeArguments
from cpu_attn.executor import Executor
from cpu_attn.paged import PagedKV, PagedLatent, PageTable
from cpu_attn.probe import huge_buffer

T = TypeVar("T")
WAIT_S = 120.0
COLD_BYTES = 512 << 20  # rotate over at least this much KV, beyond any cache
IN_A_ROW = 4
RANDOM_BYTES = 4 << 20  # over and over: drawing them takes longer than writing them


@dataclass(frozen=True)
class Model:
    """Attention with keys and values of its own for each KV head, bf16."""

    name: str
    q_heads: int
    kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def token_bytes(self) -> int:
        return 2 * self.kv_heads * self.head_dim * 2

    @property
    def title(self) -> str:
        return f"{self.name:14} group {self.group}"


MODELS = (Model("Qwen3-30B-A3B", 32, 4, 128), Model("Mixtral-8x7B", 32, 8, 128))


def in_a_row(call: Callable[[int], float], turn: int) -> float:
    """Median seconds of a few calls one after the other, as the layers of a model come; call(i) is over KV set i.

    The first does not count: it finds caches and page tables full of what was measured before.
    """
    return statistics.median([call(turn * IN_A_ROW + i) for i in range(IN_A_ROW)][1:])


def decodes(
    team: Executor, q: Tensor, layers: Sequence[PagedKV | PagedLatent], table: PageTable
) -> Callable[[int], float]:
    """call(i): seconds of a decode by `team` over the KV of layers[i], round and round."""
    arguments = [DecodeArguments.check(q, kv, table, q.shape[-1] ** -0.5) for kv in layers]

    def decode(index: int) -> float:
        job = team.submit_arguments(arguments[index % len(arguments)])
        job.wait(WAIT_S)
        return job.seconds

    return decode


def some(cases: Iterable[T], limit: str) -> list[T]:
    """`cases`; a line tells where `limit` leaves none."""
    found = list(cases)
    if not found:
        print(f"no case within {limit}", flush=True)
    return found


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median [least - most]."""
    median, least, most = statistics.median(values), min(values), max(values)
    return f"{median:{digits + 4}.{digits}f} [{least:.{digits}f} - {most:.{digits}f}]"


def fill_random(buffer: Tensor, executor: Executor | None = None) -> None:
    """Overwrite a uint8 buffer with normally distributed bf16, by the executor's team if there is one."""
    values = torch.randn(min(len(buffer), RANDOM_BYTES) // 2).bfloat16().view(torch.uint8)
    pairs = [(piece, values[: len(piece)]) for piece in buffer.split(len(values))]
    if executor is not None:
        executor.submit_copy(pairs).wait(WAIT_S)
        return
    for piece, own in pairs:
        piece.copy_(own)


def paged_kv_of(
    buffer: Tensor,
    dtype: torch.dtype,
    kv_heads: int,
    page_size: int,
    head_dim: int,
    token_major: bool = False,
) -> PagedKV:
    """The pages in a uint8 buffer, K and V of a page side by side, [pages, 2, kv_heads, page_size, head_dim] or token-major."""
    if token_major:
        blocks = buffer.view(dtype).view(-1, 2, page_size, kv_heads, head_dim)
    else:
        blocks = buffer.view(dtype).view(-1, 2, kv_heads, page_size, head_dim).transpose(2, 3)
    return PagedKV([(blocks[:, 0], blocks[:, 1])])


def random_sets(size_bytes: int, executor: Executor) -> list[Tensor]:
    """Return buffers of `size_bytes` that together exceed the caches."""
    buffers = [huge_buffer(size_bytes, executor) for _ in range(max(1, math.ceil(COLD_BYTES / size_bytes)))]
    for buffer in buffers:
        fill_random(buffer)
    return buffers


def page_table(batch: int, tokens: int, page_size: int) -> PageTable:
    pages = batch * tokens // page_size
    return PageTable(
        torch.zeros(pages, dtype=torch.int32),
        torch.arange(pages, dtype=torch.int32),
        torch.arange(0, pages + 1, pages // batch, dtype=torch.int32),
        torch.full((batch,), tokens, dtype=torch.int32),
    )
