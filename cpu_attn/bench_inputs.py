"""Random KV and page tables for the benchmarks."""

import math

import torch
from torch import Tensor

from cpu_attn.executor import Executor
from cpu_attn.paged import PageTable
from cpu_attn.probe import huge_buffer

WAIT_S = 120.0
COLD_BYTES = 512 << 20  # rotate over at least this much KV, beyond any cache
RANDOM_BYTES = 32 << 20


def fill_random(buffer: Tensor) -> None:
    """Overwrite a uint8 buffer with normally distributed bf16."""
    chunk = torch.randn(min(len(buffer), RANDOM_BYTES) // 2).bfloat16().view(torch.uint8)
    for piece in buffer.split(len(chunk)):
        piece.copy_(chunk[: len(piece)])


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
