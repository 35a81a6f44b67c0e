"""Host memory of the C and T regions: mapped once, touched before the server is healthy, never moved."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import torch

import cpu_attn
from sglang_inplacekv.config import ConfigError
from sglang_inplacekv.layout import KVShape, RegionSizes

_CGROUP = Path("/sys/fs/cgroup")


def host_memory_available(cgroup: Path = _CGROUP, meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes this process may still take: the lesser of MemAvailable and what the cgroup (v2 or v1) leaves."""
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    for limit_file, usage_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, usage = cgroup / limit_file, cgroup / usage_file
        if limit.is_file() and usage.is_file() and (text := limit.read_text().strip()) != "max":
            available = min(available, int(text) - int(usage.read_text()))
    return max(0, available)


def check_host_budget(asked_bytes: int, available_bytes: int) -> None:
    """Raise ConfigError if the arena would not fit what the host or its cgroup allows."""
    if asked_bytes > available_bytes:
        raise ConfigError(
            f"--inplacekv-host-memory: asked {asked_bytes} bytes of system RAM (not VRAM), possible are at most "
            f"{available_bytes} bytes that this host and its cgroup still allow"
        )


def _map_private(nbytes: int) -> torch.Tensor:
    """Anonymous private memory (shared anonymous memory would get no huge pages), freed with the tensor."""
    region = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    buffer = (ctypes.c_uint8 * nbytes).from_buffer(region)
    return torch.frombuffer(buffer, dtype=torch.uint8)


class HostArena:
    """All host chunks of one rank.

    chunk(i) is `[layers, chunk_pages, 2, block]` in the KV dtype. `compute_view` and `transfer_view` give one chunk's
    layer as `[pages, 2, kv_heads, G, d]` and `[pages, 2, G, kv_heads, d]`. `attention_regions(layer)` lists every
    chunk twice for cpu_attn, region index 2 * chunk + role.
    """

    def __init__(
        self, shape: KVShape, sizes: RegionSizes, team: cpu_attn.Executor, touch_timeout_s: float = 600.0
    ) -> None:
        self.shape, self.sizes = shape, sizes
        self._chunks: list[torch.Tensor] = []
        block = shape.block_bytes // shape.dtype.itemsize
        for chunk in range(sizes.chunks):
            pages = len(sizes.chunk_page_range(chunk))
            raw = _map_private(pages * shape.page_bytes)
            team.submit_first_touch(raw).wait(touch_timeout_s)
            self._chunks.append(raw.view(shape.dtype).view(shape.layers, pages, 2, block))

    @property
    def nbytes(self) -> int:
        return sum(chunk.nbytes for chunk in self._chunks)

    def compute_view(self, chunk: int, layer: int) -> torch.Tensor:
        s, data = self.shape, self._chunks[chunk][layer]
        return data.view(-1, 2, s.kv_heads, s.page_size, s.head_dim)

    def transfer_view(self, chunk: int, layer: int) -> torch.Tensor:
        s, data = self.shape, self._chunks[chunk][layer]
        return data.view(-1, 2, s.page_size, s.kv_heads, s.head_dim)

    def raw_pages(self, chunk: int, layer: int) -> torch.Tensor:
        """`[pages, 2, block]`: a page's bytes whatever its layout, for copies that do not look inside."""
        return self._chunks[chunk][layer]

    def page_bytes_view(self, page: int) -> torch.Tensor:
        """`[layers, 2, block]` of one host page."""
        return self._chunks[self.sizes.chunk_of(page)][:, self.sizes.slot_of(page)]

    def attention_regions(self, layer: int) -> cpu_attn.PagedKV | None:
        if not self._chunks:
            return None
        regions = []
        for chunk in range(self.sizes.chunks):
            compute = self.compute_view(chunk, layer).permute(0, 1, 3, 2, 4)
            transfer = self.transfer_view(chunk, layer)
            regions += [(compute[:, 0], compute[:, 1]), (transfer[:, 0], transfer[:, 1])]
        return cpu_attn.PagedKV(regions)
