"""Host memory of the C and T regions: mapped once, touched before the server is healthy, never moved."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from pathlib import Path

import torch

import cpu_attn
from sglang_inplacekv.config import ConfigError
from sglang_inplacekv.layout import ROLE_TRANSFER, KVShape, RegionSizes

_CGROUP = Path("/sys/fs/cgroup")
# (controller's folder under the mount, its field in /proc/self/cgroup, limit, usage, reclaimable part of the usage)
_CGROUP_VERSIONS = (
    ("", "", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def host_memory_available(
    cgroup: Path = _CGROUP,
    meminfo: Path = Path("/proc/meminfo"),
    membership: Path = Path("/proc/self/cgroup"),
) -> int:
    """Bytes this process may still take: the least of MemAvailable and what its cgroups (v2 or v1) leave."""
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    groups = membership.read_text().splitlines() if membership.is_file() else []
    own = [line.split(":", 2)[1:] for line in groups]
    for folder, controller, *files in _CGROUP_VERSIONS:
        path = next((path for names, path in own if controller in names.split(",")), "/")
        # A limit may stand at any level above; inside a container the levels outside are not to be seen.
        for level in (Path(path), *Path(path).parents):
            left = _cgroup_left(cgroup / folder / level.relative_to("/"), *files)
            available = available if left is None else min(available, left)
    return max(0, available)


def _cgroup_left(folder: Path, limit: str, usage: str, reclaimable: str) -> int | None:
    """Limit minus usage, page cache that the kernel would drop not counted; None without a limit here."""
    if not (folder / limit).is_file() or (text := (folder / limit).read_text().strip()) == "max":
        return None
    stat = folder / "memory.stat"
    lines = [line.split() for line in stat.read_text().splitlines()] if stat.is_file() else []
    cached = next((int(value) for name, value in lines if name == reclaimable), 0)
    return int(text) - int((folder / usage).read_text()) + cached


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


def _unpin(pinned: dict[int, int]) -> None:
    for address in pinned.values():
        torch.cuda.cudart().cudaHostUnregister(address)


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
        self._pinned: dict[int, int] = {}  # chunk -> address
        # Registrations outlive the memory otherwise, and the next mapping at that address could not be pinned.
        weakref.finalize(self, _unpin, self._pinned)
        block = shape.block_bytes // shape.dtype.itemsize
        for chunk in range(sizes.chunks):
            pages = len(sizes.chunk_page_range(chunk))
            raw = _map_private(pages * shape.page_bytes)
            # Layer by layer, since a layer is what one attention call reads: each thread touches its part of each.
            for layer in raw.view(shape.layers, -1):
                team.submit_first_touch(layer).wait(touch_timeout_s)
            self._chunks.append(raw.view(shape.dtype).view(shape.layers, pages, 2, block))

    def prepare_for(self, chunk: int, role: int) -> None:
        """On a CUDA host: pin a chunk that becomes T, so that DMA reads it; unpin one that becomes C."""
        wanted = role == ROLE_TRANSFER
        if wanted == (chunk in self._pinned):
            return
        data, cudart = self._chunks[chunk], torch.cuda.cudart()
        if wanted:
            code = int(cudart.cudaHostRegister(data.data_ptr(), data.nbytes, 0))
            self._pinned[chunk] = data.data_ptr()
        else:
            code = int(cudart.cudaHostUnregister(self._pinned.pop(chunk)))
        if code:
            raise RuntimeError(
                f"{'pinning' if wanted else 'unpinning'} {data.nbytes} bytes of system RAM (not VRAM) failed with CUDA error "
                f"{code}: lower --inplacekv-host-memory or raise the locked-memory limit (ulimit -l)"
            )

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
