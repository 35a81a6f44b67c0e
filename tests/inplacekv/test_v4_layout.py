"""Bytes and pages of DeepSeek-V4's state."""

from __future__ import annotations

import pytest
import torch

from sglang_inplacekv.config import ConfigError, InplaceConfig
from sglang_inplacekv.models.deepseek_v4 import V4Geometry
from sglang_inplacekv.v4.layout import V4Layout, plan_v4_regions
from tests.models.v4_checkpoints import FLASH, PRO

FLASH_RECORD = 43 * 128 * 512 * 2 + 21 * 4 * (2048 + 512) * 4


def layout(config: dict, page: int = 256) -> V4Layout:
    return V4Layout(V4Geometry.from_config(config), torch.bfloat16, page)


@pytest.mark.parametrize(("config", "token_bytes"), [(FLASH, 6880), (PRO, 9848)], ids=["flash", "pro"])
def test_bytes_that_grow_with_tokens(config: dict, token_bytes: int) -> None:
    """CSA entries and index keys of 1024 and 256 B every 4 tokens, HCA entries every 128."""
    for page in (128, 256, 1024):
        own = layout(config, page)
        assert own.shape.page_bytes + own.kept_page_bytes == token_bytes * page


def test_bytes_of_a_request() -> None:
    """Of Flash: 128 raw rows in each of 43 layers; journals of 8 tokens (C, Z; two series) and of 128."""
    windows = 43 * 128 * 512 * 2
    journals = 21 * 8 * 2 * 2 * (512 + 128) * 4 + 20 * 128 * 2 * 512 * 4
    assert layout(FLASH).request_bytes == windows + journals


def plan(gpu: str, host: str, capacity: int | None = None, *, prefix_cache: bool = False):
    return plan_v4_regions(
        InplaceConfig.from_env({"SGLANG_INPLACEKV_GPU_MEMORY": gpu, "SGLANG_INPLACEKV_HOST_MEMORY": host}),
        layout(FLASH),
        max_running_requests=2,
        device_bytes_auto=0,
        host_bytes_auto=0,
        staging_tokens=2048,
        workspace_bytes=0,
        capacity_tokens=capacity,
        prefix_cache=prefix_cache,
    )


def test_every_page_pays_for_what_stays_on_the_device() -> None:
    own, sizes = layout(FLASH), plan("4GB", "6GB")
    assert sizes.host_pages == 6 * 10**9 // own.shape.page_bytes
    assert sizes.capacity_tokens == (sizes.device_pages + sizes.host_pages) * 256
    assert sizes.page_size == 64 and sizes.page_tokens == 256
    held = sizes.device_pages * (own.shape.page_bytes + own.kept_page_bytes)
    held += (sizes.host_pages + 1) * own.kept_page_bytes + 3 * own.request_bytes
    held += sizes.window_pages * own.shape.page_bytes + 2 * 8 * own.shape.block_bytes
    spare = 4 * 10**9 - held
    assert 0 <= spare < own.shape.page_bytes + own.kept_page_bytes


def test_the_gpu_bounds_the_host() -> None:
    own, sizes = layout(FLASH), plan("1GB", "900GB")
    assert sizes.device_pages == 0
    assert sizes.host_pages * own.kept_page_bytes < 10**9


def test_capacity_and_tokens() -> None:
    sizes = plan("1024tok", "1GB", capacity=4096)
    assert (sizes.device_pages, sizes.host_pages, sizes.capacity_tokens) == (4, 12, 4096)
    with pytest.raises(ConfigError, match="asked 100tok, possible are multiples of --page-size 256"):
        plan("100tok", "1GB")
    with pytest.raises(ConfigError, match="asked 1000 bytes, possible are at least two pages"):
        plan("256tok", "1KB")
    with pytest.raises(
        ConfigError, match="--inplacekv-gpu-memory: asked 1000000 bytes, possible is at least"
    ):
        plan("1MB", "1GB")


def test_bytes_of_a_tail_record() -> None:
    """The window of every layer, and 4 rows of CSA's two journals, whatever the page."""
    assert {layout(FLASH, page).record_bytes for page in (128, 256, 1024)} == {FLASH_RECORD} == {6_496_256}
    ratios = PRO["compress_ratios"][: PRO["num_hidden_layers"]]
    assert layout(PRO).record_bytes == len(ratios) * 128 * 512 * 2 + ratios.count(4) * 4 * (2048 + 512) * 4


def test_a_quarter_of_the_host_is_for_tail_records() -> None:
    own, sizes = layout(FLASH), plan("8GB", "6GB", prefix_cache=True)
    assert sizes.tail_records == 1_500_000_000 // FLASH_RECORD == 230
    assert sizes.host_pages == (6_000_000_000 - 230 * FLASH_RECORD) // own.shape.page_bytes == 3273
    assert plan("8GB", "6GB").tail_records == plan("1024tok", "25MB", prefix_cache=True).tail_records == 0
    assert plan("1024tok", "6GB", capacity=4096, prefix_cache=True).tail_records == 16, "one a page"


def test_what_crosses_to_tail_records_is_paid_by_the_device() -> None:
    own, cached, plain = layout(FLASH), plan("6GB", "1GB", prefix_cache=True), plan("6GB", "1GB")
    paid = 2 * (2048 // 256 + 2) * (128 * 512 * 2 + 4 * (2048 + 512) * 4) + FLASH_RECORD
    paid -= (plain.host_pages - cached.host_pages) * own.kept_page_bytes
    page = own.shape.page_bytes + own.kept_page_bytes
    assert abs((plain.device_pages - cached.device_pages) * page - paid) <= page
