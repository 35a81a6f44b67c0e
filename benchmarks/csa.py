"""What every policy of the benchmark of a CSA layer runs over: random entries, index keys, and queries that walk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

import cpu_attn
from cpu_attn.probe import huge_buffer
from sglang_inplacekv.executors.packed_rows import pack
from sglang_inplacekv.pinning import pinned
from sparse_attn import V4Config

PAGE_ROWS = 64  # entries of a page of 256 tokens
_ROWS_AT_ONCE = 2**16


@dataclass(frozen=True)
class Walk:
    """Queries of every step of a circle, on the device.

    In the indexer's space queries and head weights walk, x' = a x + sqrt(1 - a^2) noise, over keys that do not move: what is
    selected changes little from one step to the next. The attention's own queries are drawn anew.
    """

    index_queries: torch.Tensor  # [steps, batch, index_heads, index_dim]
    index_weights: torch.Tensor  # fp32 [steps, batch, index_heads], scales included
    queries: torch.Tensor  # [steps, batch, heads, head_dim]

    @classmethod
    def of(cls, content: Content, steps: int, a: float) -> Walk:
        generator, batch, geometry = content.generator(7), content.batch, content.geometry
        heads, dim = geometry.index_heads, geometry.index_dim
        queries = _circle(steps, (batch, heads, dim), a, generator)
        weights = _circle(steps, (batch, heads), a, generator) * (heads * dim) ** -0.5
        attention = _randn((steps, batch, geometry.heads, geometry.head_dim), generator)
        return cls(queries.to(content.keys.dtype), weights, attention.to(content.keys.dtype))

    def __len__(self) -> int:
        return len(self.queries)


def _randn(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)


def _circle(steps: int, shape: tuple[int, ...], a: float, generator: torch.Generator) -> torch.Tensor:
    """A walk whose end goes on at its beginning: the same noise again, from where it led the first time."""
    noise = _randn((steps, *shape), generator)
    place, places = torch.zeros(shape, device=generator.device), torch.empty_like(noise)
    for _ in range(2):
        for step in range(steps):
            place = a * place + (1 - a * a) ** 0.5 * noise[step]
            places[step] = place
    return places


@dataclass(frozen=True)
class Content:
    """A layer's memory in one row format.

    `pool` is the layer with everything on the device: windows of the requests, then all entries. `home` has the entries in
    host memory, on a GPU host pinned, pages in random order.
    """

    geometry: V4Config
    batch: int
    entries: int
    keys: torch.Tensor  # [batch, entries, index_dim]
    pool: torch.Tensor  # [batch * (window + entries), row]
    home: torch.Tensor  # [batch * entries, row], host
    pages: torch.Tensor  # int32 [batch, pages], host
    sink: torch.Tensor  # fp32 [heads]
    team: cpu_attn.Executor

    @property
    def device(self) -> torch.device:
        return self.pool.device

    @property
    def packed(self) -> bool:
        return self.pool.dtype == torch.uint8

    @property
    def row_bytes(self) -> int:
        return self.pool.shape[1] * self.pool.itemsize

    @property
    def first_entry(self) -> int:
        """Row of the pool: windows come first."""
        return self.batch * self.geometry.window

    @property
    def kept_bytes(self) -> int:
        """Keys and windows, which are on the device whatever the policy."""
        return self.keys.nbytes + self.first_entry * self.row_bytes

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)

    def window_names(self) -> torch.Tensor:
        """Rows of the pool, int32 [batch, window]."""
        window = self.geometry.window
        return torch.arange(self.first_entry, dtype=torch.int32, device=self.device).view(self.batch, window)

    def bases(self) -> torch.Tensor:
        """The pool's row of each request's entry 0, int32 [batch, 1]."""
        requests = torch.arange(self.batch, dtype=torch.int32, device=self.device)
        return (self.first_entry + requests * self.entries).unsqueeze(1)

    def names(self, ids: torch.Tensor) -> torch.Tensor:
        """The pool's rows of each request's window and of its entries ids int32 [batch or 1, n]: int32 [batch, window + n]."""
        return torch.cat((self.window_names(), ids + self.bases()), 1)


@contextmanager
def content(
    geometry: V4Config, batch: int, entries: int, team: cpu_attn.Executor, device: str, *, packed: bool
) -> Iterator[Content]:
    """Seeded: the same rows, keys and pages in every format. fp32 without a GPU. Nothing may read it when the block ends."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(1)
    keys = torch.empty(batch, entries, geometry.index_dim, dtype=dtype, device=device)
    for own in keys:
        own.copy_(_randn(tuple(own.shape), generator))
    count = entries // PAGE_ROWS
    order = torch.stack([torch.randperm(count, generator=generator, device=device) for _ in range(batch)])
    sink = _randn((geometry.heads,), generator)
    windows = _rows(batch * geometry.window, geometry.head_dim, dtype, packed, generator)
    pool = windows.new_empty(batch * (geometry.window + entries), windows.shape[1])
    pool[: len(windows)] = windows
    size = batch * entries * windows.shape[1] * windows.itemsize
    buffer = huge_buffer(size, team)
    home = buffer.view(windows.dtype).view(batch * entries, windows.shape[1])
    with pinned(buffer) if device == "cuda" else nullcontext():
        for request in range(batch):
            first = len(windows) + request * entries
            own = pool[first : first + entries]
            for part in own.split(_ROWS_AT_ONCE):
                part.copy_(_rows(len(part), geometry.head_dim, dtype, packed, generator))
            by_page = own.view(count, -1)[order[request].argsort()]
            home[request * entries : (request + 1) * entries].view(count, -1).copy_(by_page)
        pages = order.cpu() + torch.arange(batch)[:, None] * count
        yield Content(geometry, batch, entries, keys, pool, home, pages.int(), sink, team)
        if device == "cuda":
            torch.cuda.synchronize()


def _rows(
    count: int, width: int, dtype: torch.dtype, packed: bool, generator: torch.Generator
) -> torch.Tensor:
    rows = _randn((count, width), generator).to(dtype)
    return pack(rows) if packed else rows
