"""Host memory: what may be taken on fake hosts and cgroups, and that exactly what was asked is mapped and touched."""

from __future__ import annotations

import gc
import mmap
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import cpu_attn
from sglang_inplacekv.arena import HostArena, check_host_budget, host_memory_available
from sglang_inplacekv.config import ConfigError
from sglang_inplacekv.layout import KVShape, RegionSizes

GB = 10**9
FREE = 20 * 1024**3


class FakeHost:
    """A /proc and a /sys/fs/cgroup under tmp_path; the host itself has 20 GiB left."""

    def __init__(self, root: Path) -> None:
        self.cgroup, self.meminfo, self.membership = root / "cgroup", root / "meminfo", root / "self_cgroup"
        self.meminfo.write_text(
            f"MemTotal:       65536000 kB\nMemFree:         1000000 kB\nMemAvailable:   {FREE // 1024} kB\n"
        )
        self.membership.write_text("0::/\n")

    def write(self, folder: str, **files: object) -> None:
        place = self.cgroup / folder
        place.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (place / name.replace("__", ".")).write_text(f"{content}\n")

    @property
    def available(self) -> int:
        return host_memory_available(self.cgroup, self.meminfo, self.membership)


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    return FakeHost(tmp_path)


def test_without_cgroup_the_host_counts(host: FakeHost) -> None:
    assert host.available == FREE
    host.membership.unlink()
    assert host.available == FREE


@pytest.mark.parametrize("folder", ["", "system.slice/server.service"])
def test_v2_limit_of_the_own_cgroup(host: FakeHost, folder: str) -> None:
    host.membership.write_text(f"0::/{folder}\n")
    host.write(folder, memory__max=8 * GB, memory__current=3 * GB)
    assert host.available == 5 * GB


def test_v2_without_limit(host: FakeHost) -> None:
    host.write("", memory__max="max", memory__current=3 * GB)
    assert host.available == FREE


def test_v2_tightest_level_counts(host: FakeHost) -> None:
    host.membership.write_text("0::/user/inner\n")
    host.write("user", memory__max=4 * GB, memory__current=3 * GB)
    host.write("user/inner", memory__max=8 * GB, memory__current=1 * GB)
    assert host.available == 1 * GB


def test_v2_page_cache_is_not_taken(host: FakeHost) -> None:
    stat = f"anon {1 * GB}\ninactive_file {2 * GB}\nactive_file 5"
    host.write("", memory__max=8 * GB, memory__current=3 * GB, memory__stat=stat)
    assert host.available == 7 * GB


def test_another_process_group_does_not_count(host: FakeHost) -> None:
    host.membership.write_text("0::/mine\n")
    host.write("other", memory__max=1, memory__current=0)
    assert host.available == FREE


@pytest.mark.parametrize("path", ["", "docker/abc"])
def test_v1(host: FakeHost, path: str) -> None:
    host.membership.write_text(f"7:cpu,cpuacct:/elsewhere\n4:memory:/{path}\n0::/\n")
    stat = f"inactive_file 0\ntotal_inactive_file {1 * GB}"
    limits = {"memory__limit_in_bytes": 6 * GB, "memory__usage_in_bytes": 2 * GB, "memory__stat": stat}
    host.write(f"memory/{path}", **limits)
    assert host.available == 5 * GB


def test_v1_path_of_the_host_is_not_visible_in_a_container(host: FakeHost) -> None:
    host.membership.write_text("4:memory:/docker/abc\n")
    host.write("memory", memory__limit_in_bytes=6 * GB, memory__usage_in_bytes=2 * GB)
    assert host.available == 4 * GB


def test_v1_without_limit(host: FakeHost) -> None:
    host.write("memory", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=2 * GB)
    assert host.available == FREE


def test_usage_above_the_limit_leaves_nothing(host: FakeHost) -> None:
    host.write("", memory__max=1 * GB, memory__current=2 * GB)
    assert host.available == 0


def test_this_machine_has_memory() -> None:
    assert 0 < host_memory_available() < 2**50


def test_budget_of_exactly_what_is_left_passes_and_one_byte_more_does_not() -> None:
    check_host_budget(5 * GB, 5 * GB)
    message = (
        f"--inplacekv-host-memory: asked {5 * GB + 1} bytes of system RAM (not VRAM), possible are at most {5 * GB} bytes "
        "that this host and its cgroup still allow"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        check_host_budget(5 * GB + 1, 5 * GB)


SHAPE = KVShape(layers=3, kv_heads=2, head_dim=64, dtype=torch.float32, page_size=16)
SIZES = RegionSizes(
    device_pages=4, window_pages=2, host_pages=800, chunk_pages=320, tile_pages=2, page_size=16
)


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)[1]) * 1024


@pytest.fixture(scope="module")
def team() -> cpu_attn.Executor:
    return cpu_attn.Executor(threads=1)


def test_maps_exactly_the_budget_and_touches_all_of_it(team: cpu_attn.Executor) -> None:
    gc.collect()
    before = resident_bytes()
    arena = HostArena(SHAPE, SIZES, team)
    grown = resident_bytes() - before
    assert arena.nbytes == 800 * SHAPE.page_bytes
    # Another allocation of this process may come or go meanwhile: 1/20 of the arena is allowed for.
    assert grown > arena.nbytes * 0.95, f"{grown} of {arena.nbytes} bytes are resident"
    assert grown < arena.nbytes * 1.05, "the gaps of the short last chunk were touched"
    del arena
    gc.collect()
    assert resident_bytes() - before < 800 * SHAPE.page_bytes * 0.05, "the arena outlived its owner"


def test_both_layouts_of_a_page_are_the_same_bytes(team: cpu_attn.Executor) -> None:
    arena = HostArena(SHAPE, SIZES, team)
    assert [len(SIZES.chunk_page_range(chunk)) for chunk in range(SIZES.chunks)] == [320, 320, 160]
    page, layer = SIZES.first_host_page + 320 + 5, 1
    arena.page_bytes_view(page)[layer, 0] = torch.arange(16 * 2 * 64, dtype=torch.float32)
    compute, transfer = arena.compute_view(1, layer)[5], arena.transfer_view(1, layer)[5]
    assert compute.shape == (2, 2, 16, 64) and transfer.shape == (2, 16, 2, 64)
    assert compute[0, 1, 3, 7] == (1 * 16 + 3) * 64 + 7, "C is [kv_head][token][d]"
    assert transfer[0, 3, 1, 7] == (3 * 2 + 1) * 64 + 7, "T is [token][kv_head][d]"
    assert torch.equal(arena.raw_pages(1, layer)[5, 0], compute[0].reshape(-1))
    others = [arena.raw_pages(chunk, at) for chunk in range(3) for at in range(3) if (chunk, at) != (1, 1)]
    assert not any(other.any() for other in others), "the write reached another layer or chunk"


def test_no_host_pages_no_arena(team: cpu_attn.Executor) -> None:
    arena = HostArena(SHAPE, RegionSizes(4, 2, 0, 32, 2, 16), team)
    assert arena.nbytes == 0 and arena.attention_regions(0) is None


def test_chunk_of_one_layer_is_contiguous(team: cpu_attn.Executor) -> None:
    arena = HostArena(SHAPE, SIZES, team)
    pages = arena.raw_pages(0, 2)
    assert pages.is_contiguous() and pages.shape == (320, 2, SHAPE.block_bytes // 4)


def test_addresses_are_affine_over_all_chunks(team: cpu_attn.Executor) -> None:
    arena = HostArena(SHAPE, SIZES, team)
    pages = np.array([5, 6, 7, 324, 325, 644, 645, 650, 649, 804])
    rows = arena.zero_copy_index(pages)
    assert rows.dtype == np.int32
    for layer in range(SHAPE.layers):
        base = arena.raw_pages(0, layer).data_ptr()
        wanted = [arena.page_bytes_view(page)[layer].data_ptr() for page in pages]
        assert (base + rows.astype(np.int64) * arena.page_stride).tolist() == wanted
        assert base == arena.raw_pages(0, 0).data_ptr() + layer * arena.layer_stride
        assert all(arena.raw_pages(chunk, layer).is_contiguous() for chunk in range(3))


def test_runs_of_pages_are_one_copy_each(team: cpu_attn.Executor) -> None:
    arena = HostArena(SHAPE, SIZES, team)
    # 324 | 325 is the border of two chunks.
    homes, offsets, sizes = arena.copy_runs(np.array([5, 6, 7, 324, 325, 645, 646, 648, 647]))
    first = [5, 324, 325, 645, 648, 647]
    assert homes.tolist() == [arena.page_bytes_view(page).data_ptr() for page in first]
    assert (offsets // arena.page_stride).tolist() == [0, 3, 4, 5, 7, 8]
    assert (sizes // arena.page_stride).tolist() == [3, 1, 1, 2, 1, 1]
    assert [len(part) for part in arena.copy_runs(np.empty(0, dtype=np.int64))] == [0, 0, 0]


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_chunks_share_no_system_page(team: cpu_attn.Executor, page_size: int) -> None:
    """Each is pinned by itself, so none may reach into another, whatever the size of a page."""
    shape = KVShape(layers=3, kv_heads=1, head_dim=80, dtype=torch.bfloat16, page_size=page_size)
    sizes = RegionSizes(1, 2, 23, 5, 2, page_size)
    arena = HostArena(shape, sizes, team)
    assert arena.nbytes == 23 * shape.page_bytes
    for page in range(2, 25):
        arena.page_bytes_view(page).fill_(page)
    for page in range(2, 25):
        assert bool((arena.page_bytes_view(page) == page).all())
    starts = [arena.raw_pages(chunk, 0).data_ptr() for chunk in range(5)]
    assert all(start % mmap.PAGESIZE == 0 for start in starts)
