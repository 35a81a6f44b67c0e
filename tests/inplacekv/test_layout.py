"""The arithmetic of pages, chunks and budgets."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_inplacekv.config import ConfigError, InplaceConfig
from sglang_inplacekv.layout import (
    DEFAULT_TILE_TOKENS,
    MAX_CHUNK_BYTES,
    MIN_CHUNKS,
    STAGING_LAYERS,
    KVShape,
    RegionSizes,
    plan_regions,
    window_count,
)

GB = 10**9
# 2 (K, V) x 4 heads x 128 x 2 bytes x 24 layers = 48 KiB a token
SHAPE = KVShape(layers=24, kv_heads=4, head_dim=128, dtype=torch.bfloat16, page_size=256)
TOKEN = 2 * 4 * 128 * 2 * 24


def plan(config: InplaceConfig | None = None, shape: KVShape = SHAPE, **given_sizes) -> RegionSizes:
    sizes = {
        "max_running_requests": 4,
        "device_bytes_auto": 8 * GB,
        "host_bytes_auto": 64 * GB,
        "staging_tokens": 2048,
    } | given_sizes
    return plan_regions(config or InplaceConfig(), shape, **sizes)


def test_bytes_of_a_page() -> None:
    assert SHAPE.token_bytes == TOKEN
    assert SHAPE.page_bytes == 256 * TOKEN
    assert SHAPE.block_bytes == SHAPE.page_bytes // (2 * 24)


@given(device=st.integers(0, 9), windows=st.integers(0, 9), host=st.integers(0, 40), chunk=st.integers(1, 11))
def test_ids_are_partitioned(device: int, windows: int, host: int, chunk: int) -> None:
    sizes = RegionSizes(device, windows, host, chunk, tile_pages=2, page_size=16)
    assert sizes.pages == 1 + device + host
    assert sizes.capacity_tokens == (device + host) * 16
    on_device = [page for page in range(1, sizes.pages) if sizes.is_device(page)]
    assert on_device == list(range(1, 1 + device))
    in_chunks = [page for c in range(sizes.chunks) for page in sizes.chunk_page_range(c)]
    assert in_chunks == list(range(1 + device, sizes.pages)), "every host page is in one chunk, in order"
    for c in range(sizes.chunks):
        pages = sizes.chunk_page_range(c)
        assert 0 < len(pages) <= chunk and all(sizes.chunk_of(page) == c for page in pages)
        assert [sizes.slot_of(page) for page in pages] == list(range(len(pages)))
    assert sizes.device_tensor_pages == 1 + device + windows, "windows follow the D homes and are never ids"


@pytest.mark.parametrize(("running", "windows"), [(1, 2), (4, 8), (8, 16), (32, 40)])
def test_a_window_for_each_request_and_spares(running: int, windows: int) -> None:
    assert window_count(running) == windows
    assert plan(max_running_requests=running).window_pages == windows


def device_overhead(shape: KVShape, running: int, tile_pages: int, staging_tokens: int) -> int:
    layer_page = shape.page_bytes // shape.layers
    staging_pages = -(-staging_tokens // shape.page_size)
    tiles_and_staging = (2 * tile_pages + STAGING_LAYERS * staging_pages) * layer_page
    return window_count(running) * shape.page_bytes + tiles_and_staging


@settings(max_examples=200, deadline=None)
@given(
    gpu_mb=st.integers(800, 20_000),
    host_mb=st.integers(300, 300_000),
    page=st.sampled_from([16, 64, 256]),
    layers=st.integers(1, 48),
    running=st.integers(1, 12),
    staging=st.integers(1, 9000),
)
def test_budgets_are_kept_and_used(
    gpu_mb: int, host_mb: int, page: int, layers: int, running: int, staging: int
) -> None:
    shape = KVShape(layers, 4, 128, torch.bfloat16, page)
    gpu, host = gpu_mb * 10**6, host_mb * 10**6
    config = InplaceConfig(gpu_memory_bytes=gpu, host_memory_bytes=host)
    sizes = plan(config, shape, max_running_requests=running, staging_tokens=staging)
    used = sizes.device_pages * shape.page_bytes + device_overhead(shape, running, sizes.tile_pages, staging)
    assert used <= gpu < used + shape.page_bytes
    chunk_bytes = sizes.chunk_pages * shape.page_bytes
    assert sizes.host_pages * shape.page_bytes <= host < (sizes.host_pages + 1) * shape.page_bytes
    assert chunk_bytes <= max(shape.page_bytes, min(MAX_CHUNK_BYTES, host // MIN_CHUNKS))


def test_least_gpu_budget_passes_and_one_byte_less_is_refused() -> None:
    least = device_overhead(SHAPE, 4, DEFAULT_TILE_TOKENS // 256, 2048)
    assert plan(InplaceConfig(gpu_memory_bytes=least)).device_pages == 0
    assert plan(InplaceConfig(gpu_memory_bytes=least + SHAPE.page_bytes)).device_pages == 1
    with pytest.raises(ConfigError) as refusal:
        plan(InplaceConfig(gpu_memory_bytes=least - 1))
    line = str(refusal.value)
    numbers = re.fullmatch(
        r"--inplacekv-gpu-memory: asked (\d+) bytes, possible is at least (\d+) bytes = (\d+) windows (\d+) \+ "
        r"two P tiles (\d+) \+ prefill staging (\d+); lower --max-running-requests, --page-size or "
        r"--chunked-prefill-size to need less",
        line,
    )
    assert numbers, line
    asked, possible, windows, window_bytes, tile_bytes, staging_bytes = map(int, numbers.groups())
    assert (asked, possible, windows) == (least - 1, least, 8)
    assert window_bytes + tile_bytes + staging_bytes == least


def test_gpu_budget_that_was_not_asked_is_called_auto() -> None:
    with pytest.raises(ConfigError, match=r"^--inplacekv-gpu-memory: asked auto \(1000 bytes\), possible"):
        plan(device_bytes_auto=1000)


def test_gpu_budget_in_tokens_counts_homes_alone() -> None:
    assert plan(InplaceConfig(gpu_memory_tokens=4096), device_bytes_auto=0).device_pages == 16
    assert plan(InplaceConfig(gpu_memory_tokens=0), device_bytes_auto=0).device_pages == 0
    with pytest.raises(ConfigError, match=r"asked 4000tok, possible are multiples of --page-size 256$"):
        plan(InplaceConfig(gpu_memory_tokens=4000))


def test_least_host_budget_is_one_chunk() -> None:
    sizes = plan(InplaceConfig(host_memory_bytes=SHAPE.page_bytes))
    assert (sizes.host_pages, sizes.chunk_pages, sizes.chunks) == (1, 1, 1)
    for asked in (SHAPE.page_bytes - 1, 0):
        message = (
            f"--inplacekv-host-memory: asked {asked} bytes, possible is at least one chunk of {SHAPE.page_bytes} bytes "
            f"(a page of 256 tokens x {TOKEN} bytes)"
        )
        with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
            plan(InplaceConfig(host_memory_bytes=asked))


def test_chunks_are_at_most_a_gibibyte_and_at_least_sixteen() -> None:
    large = plan(InplaceConfig(host_memory_bytes=64 * 2**30))
    assert large.chunk_pages == MAX_CHUNK_BYTES // SHAPE.page_bytes
    small = plan(InplaceConfig(host_memory_bytes=MIN_CHUNKS * 5 * SHAPE.page_bytes))
    assert (small.chunks, small.chunk_pages) == (MIN_CHUNKS, 5)


def test_tile_is_whole_pages_and_at_least_one() -> None:
    assert plan().tile_pages == DEFAULT_TILE_TOKENS // 256
    assert plan(InplaceConfig(tile_tokens=600)).tile_pages == 2
    assert plan(InplaceConfig(tile_tokens=1)).tile_pages == 1


@pytest.mark.parametrize(
    ("capacity", "device", "host"),
    [(10**9, 10, 16), (26 * 256, 10, 16), (20 * 256, 10, 10), (10 * 256, 10, 0), (3 * 256 + 255, 3, 0)],
)
def test_max_total_tokens_lowers_the_host_first(capacity: int, device: int, host: int) -> None:
    config = InplaceConfig(gpu_memory_tokens=10 * 256, host_memory_bytes=16 * SHAPE.page_bytes)
    sizes = plan(config, capacity_tokens=capacity)
    assert (sizes.device_pages, sizes.host_pages) == (device, host)
    assert sizes.capacity_tokens <= capacity
