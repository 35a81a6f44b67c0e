"""Host memory of the C and T regions: mapped once, touched before the server is healthy, never moved."""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

import cpu_attn
from sglang_inplacekv.config import ConfigError
from sglang_inplacekv.layout import KVShape, RegionSizes
from sglang_inplacekv.mapped import mapped_tensor
from sglang_inplacekv.pinning import ChunkPins

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


def _map_private(nbytes: int, gaps: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Anonymous private memory (shared anonymous memory would get no huge pages), freed with the tensor.

    No byte of a gap (offset, bytes) is ever used: a huge page across one would take memory that nobody asked for.
    """
    region = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
        for start, length in gaps:
            region.madvise(mmap.MADV_NOHUGEPAGE, start, length)
    buffer = (ctypes.c_uint8 * nbytes).from_buffer(region)
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _system_pages(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ascending (start, stop) widened to whole system pages; what then overlaps is joined."""
    out: list[tuple[int, int]] = []
    for start, stop in spans:
        start, stop = start // mmap.PAGESIZE * mmap.PAGESIZE, -(-stop // mmap.PAGESIZE) * mmap.PAGESIZE
        if out and start < out[-1][1]:
            start, _ = out.pop()
        out.append((start, stop))
    return out


class HostArena:
    """All host chunks of one rank: slices of one mapping, so that addresses are affine in chunk, layer and page.

    chunk(i) is `[layers, chunk_pages, parts, block]` in the KV dtype. `compute_view` and `transfer_view` give one chunk's
    layer as `[pages, parts, kv_heads, G, d]` and `[pages, parts, G, kv_heads, d]`. `attention_regions(layer)` lists every
    chunk twice for cpu_attn, region index 2 * chunk + role. A short last chunk has the layer stride of the others and gaps
    that are never touched; `nbytes` counts pages alone.
    """

    def __init__(
        self, shape: KVShape, sizes: RegionSizes, team: cpu_attn.Executor, touch_timeout_s: float = 600.0
    ) -> None:
        self.shape, self.sizes = shape, sizes
        self.page_stride = shape.parts * shape.block_bytes  # bytes of a page of one layer
        self.layer_stride = min(sizes.chunk_pages, sizes.host_pages) * self.page_stride
        # Chunks start at system pages, since they are pinned one by one, and at whole rows of the zero-copy tensors.
        unit = math.lcm(self.page_stride, mmap.PAGESIZE)
        self._chunk_stride = -(-shape.layers * self.layer_stride // unit) * unit
        self._chunks: list[torch.Tensor] = []
        self._cuda_layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._base = 0  # address of the mapping
        if sizes.chunks:
            self._map(team, touch_timeout_s)

    def _map(self, team: cpu_attn.Executor, touch_timeout_s: float) -> None:
        shape, last = self.shape, _system_pages(self._layer_spans(self.sizes.chunks - 1))
        gaps = [(stop, start - stop) for (_, stop), (start, _) in pairwise(last)]
        raw = _map_private(last[-1][1], [gap for gap in gaps if gap[1]])
        self._base = raw.data_ptr()
        block = shape.block_bytes // shape.dtype.itemsize
        strides = [stride // shape.dtype.itemsize for stride in (self.layer_stride, self.page_stride)]
        for chunk in range(self.sizes.chunks):
            # Layer by layer, since a layer is what one attention call reads: each thread touches its part of each.
            for start, stop in self._layer_spans(chunk):
                team.submit_first_touch(raw[start:stop]).wait(touch_timeout_s)
            pages = len(self.sizes.chunk_page_range(chunk))
            first = chunk * self._chunk_stride // shape.dtype.itemsize
            self._chunks.append(
                raw.view(shape.dtype).as_strided(
                    (shape.layers, pages, shape.parts, block), (*strides, block, 1), first
                )
            )

    def _layer_spans(self, chunk: int) -> list[tuple[int, int]]:
        """(start, stop) of each layer's pages of `chunk`, in bytes of the mapping."""
        nbytes = len(self.sizes.chunk_page_range(chunk)) * self.page_stride
        first = chunk * self._chunk_stride
        starts = [first + layer * self.layer_stride for layer in range(self.shape.layers)]
        return [(start, start + nbytes) for start in starts]

    def start_pinning(self, wait_timeout_s: float) -> ChunkPins | None:
        """On a CUDA host, before any page is handed out: pin the first spare chunk. None without host pages.

        Registrations are made layer by layer: the driver may hold up kernel launches during each. Raises RuntimeError when
        the memory cannot be pinned.
        """
        if not self._chunks:
            return None
        spans = [_system_pages(self._layer_spans(chunk)) for chunk in range(self.sizes.chunks)]
        pins = ChunkPins(
            [[(self._base + start, stop - start) for start, stop in own] for own in spans], wait_timeout_s
        )
        weakref.finalize(self, pins.close)
        pins.pin_first(0)
        # Now, because torch looks the address up once, when it makes the tensor.
        self._cuda_layers = [self._cuda_layer(layer) for layer in range(self.shape.layers)]
        return pins

    def _cuda_layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        s, item = self.shape, self.shape.dtype.itemsize
        rows = (self.sizes.chunks - 1) * (self._chunk_stride // self.page_stride)
        rows += len(self.sizes.chunk_page_range(self.sizes.chunks - 1))
        strides = (self.page_stride, s.kv_heads * s.head_dim * item, s.head_dim * item, item)
        shape, first = (rows, s.page_size, s.kv_heads, s.head_dim), self._base + layer * self.layer_stride
        parts = [
            mapped_tensor(first + part * s.block_bytes, shape, strides, s.dtype) for part in range(s.parts)
        ]
        return parts[0], parts[1] if s.parts == 2 else parts[0][..., : s.value_dim]

    def zero_copy_layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(k, v) of one layer as CUDA tensors [rows, G, kv_heads, d] over the host's own bytes; kernels may read T pages.

        Rows are those of `zero_copy_index`. All others lie in other layers or in memory that is not pinned.
        """
        return self._cuda_layers[layer]

    def zero_copy_index(self, pages: np.ndarray) -> np.ndarray:
        """Rows of the zero-copy tensors, the same in every layer, that hold these T pages; int32."""
        return self.row_page_index(pages).astype(np.int32)

    def copy_runs(self, pages: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The copies between a packed buffer [len(pages), parts, block] and the homes: (home address, buffer offset, bytes).

        Adjacent pages are one copy. Addresses are of layer 0; every further layer lies `layer_stride` behind. uint64.
        """
        chunk, slot, place, count = self.sizes.adjacent_runs(pages).T
        address = self._base + chunk * self._chunk_stride + slot * self.page_stride
        return (
            address.astype(np.uint64),
            (place * self.page_stride).astype(np.uint64),
            (count * self.page_stride).astype(np.uint64),
        )

    @property
    def nbytes(self) -> int:
        return sum(chunk.nbytes for chunk in self._chunks)

    def compute_view(self, chunk: int, layer: int) -> torch.Tensor:
        s, data = self.shape, self._chunks[chunk][layer]
        return data.view(-1, s.parts, s.kv_heads, s.page_size, s.head_dim)

    def transfer_view(self, chunk: int, layer: int) -> torch.Tensor:
        s, data = self.shape, self._chunks[chunk][layer]
        return data.view(-1, s.parts, s.page_size, s.kv_heads, s.head_dim)

    def layer_rows(self, layer: int) -> torch.Tensor:
        """All rows of one layer, `[rows, head_dim]`: of one part and one KV head, whose two layouts are the same.

        Slot s of a page is row `row_page_index(pages) * G + s`. All other rows are other layers' or no memory at all.
        """
        s = self.shape
        if s.parts * s.kv_heads != 1:
            raise ValueError(f"{s.parts} parts of {s.kv_heads} KV heads have no rows of their own")
        if not self._chunks:
            return torch.empty(0, s.head_dim, dtype=s.dtype)
        last = np.array([self.sizes.pages - 1])
        rows = (int(self.row_page_index(last)[0]) + 1) * s.page_size
        first = layer * self.layer_stride // s.dtype.itemsize
        return self._chunks[0].as_strided((rows, s.head_dim), (s.head_dim, 1), first)

    def row_page_index(self, pages: np.ndarray) -> np.ndarray:
        """Where host pages lie in `layer_rows`, in pages; int64."""
        chunk, slot = self.sizes.locate(pages)
        return chunk * (self._chunk_stride // self.page_stride) + slot

    def raw_pages(self, chunk: int, layer: int) -> torch.Tensor:
        """`[pages, parts, block]`: a page's bytes whatever its layout, for copies that do not look inside."""
        return self._chunks[chunk][layer]

    def page_bytes_view(self, page: int) -> torch.Tensor:
        """`[layers, parts, block]` of one host page."""
        return self._chunks[self.sizes.chunk_of(page)][:, self.sizes.slot_of(page)]

    def attention_regions(self, layer: int) -> cpu_attn.PagedKV | cpu_attn.PagedLatent | None:
        if not self._chunks:
            return None
        views: list[torch.Tensor] = []  # [pages, parts, G, kv_heads, d]
        for chunk in range(self.sizes.chunks):
            views += [
                self.compute_view(chunk, layer).permute(0, 1, 3, 2, 4),
                self.transfer_view(chunk, layer),
            ]
        if self.shape.value_dim is not None:
            return cpu_attn.PagedLatent([view[:, 0] for view in views], self.shape.value_dim)
        return cpu_attn.PagedKV([(view[:, 0], view[:, 1]) for view in views])
