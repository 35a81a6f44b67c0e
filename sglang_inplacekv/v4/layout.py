"""Bytes of DeepSeek-V4's state, and how many pages and tail records the budgets hold. No SGLang in here.

A tail record is what a sequence needs, beside its pages, to go on after a full page: the raw rows of the window, and of each
CSA layer the 4 journal rows of the block that the next entry overlaps, of the main and the indexer's compressor. HCA needs
none: its blocks end where pages end. In bytes, of Flash in bf16:

    43 layers x 128 x 512 x 2 + 21 CSA layers x 4 x (2048 + 512) x 4 = 5,636,096 + 860,160 = 6,496,256

as much as 1,208 tokens of CSA entries, however long the page. So a quarter of the host budget is theirs and not every page has
one: with a budget of B bytes there are B / 4 / 6,496,256 records, and (B - records x 6,496,256) / (G x 5,376) pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from sglang_inplacekv.config import ConfigError, InplaceConfig
from sglang_inplacekv.layout import (
    MAX_CHUNK_BYTES,
    MIN_CHUNKS,
    STAGING_LAYERS,
    KVShape,
    RegionSizes,
    window_count,
)
from sglang_inplacekv.models.deepseek_v4 import V4Geometry
from sglang_inplacekv.models.deepseek_v4.geometry import CSA_RATIO, HCA_RATIO

WINDOW, ENTRIES, KEYS = "win", "cmp", "idx"  # names of the selectors' spaces
_FP32 = 4
RECORD_SHARE = 4  # one part in so many of the host budget is for tail records
_TILE_PAGES = 1  # entries are gathered one by one: nothing is streamed


def check_page_tokens(page_tokens: int) -> None:
    """ConfigError unless no block of tokens crosses a page."""
    if page_tokens % HCA_RATIO:
        raise ConfigError(
            f"--page-size: asked {page_tokens}, possible with DeepSeek-V4 are multiples of {HCA_RATIO}"
        )


@dataclass(frozen=True)
class V4Layout:
    geometry: V4Geometry
    dtype: torch.dtype
    page_tokens: int  # G

    @property
    def csa_layers(self) -> tuple[int, ...]:
        return self.geometry.layers_of(CSA_RATIO)

    @property
    def hca_layers(self) -> tuple[int, ...]:
        return self.geometry.layers_of(HCA_RATIO)

    @property
    def page_rows(self) -> int:
        """CSA entries of a page of a layer."""
        return self.page_tokens // CSA_RATIO

    @property
    def shape(self) -> KVShape:
        """Of the regions: a row is a CSA entry, key and value alike."""
        width = self.geometry.head_dim
        return KVShape(len(self.csa_layers), 1, width, self.dtype, self.page_rows, value_dim=width)

    @property
    def kept_page_bytes(self) -> int:
        """What the device holds of every page, wherever its home is."""
        geometry, size = self.geometry, self.dtype.itemsize
        keys = len(self.csa_layers) * self.page_rows * geometry.index_head_dim
        return size * (keys + len(self.hca_layers) * self.page_tokens // HCA_RATIO * geometry.head_dim)

    def read_bytes(self, context_tokens: int) -> int:
        """What a layer copies to attend, at most: index keys, and in a prefill all entries, of one context."""
        width = self.geometry.head_dim + self.geometry.index_head_dim
        return context_tokens // CSA_RATIO * width * self.dtype.itemsize

    def journals(self, ratio: int) -> dict[str, tuple[int, int]]:
        """What the compressors of a layer keep of a request, fp32 (tokens, width), by the selector's space.

        A token is a value and a logit, of one part or, where blocks overlap and two blocks are kept, of two.
        """
        geometry = self.geometry
        if ratio == HCA_RATIO:
            return {ENTRIES: (HCA_RATIO, 2 * geometry.head_dim)}
        if ratio == CSA_RATIO:
            widths = {ENTRIES: geometry.head_dim, KEYS: geometry.index_head_dim}
            return {space: (2 * CSA_RATIO, 4 * width) for space, width in widths.items()}
        return {}

    @property
    def record_parts(self) -> dict[str, tuple[tuple[int, int, int], torch.dtype]]:
        """A tail record by the selectors' spaces: (layers, rows, width), of all layers or CSA's, and the dtype."""
        geometry, overlap = self.geometry, self.journals(CSA_RATIO)
        window = geometry.layers, geometry.sliding_window, geometry.head_dim
        return {WINDOW: (window, self.dtype)} | {
            space: ((len(self.csa_layers), CSA_RATIO, width), torch.float32)
            for space, (_, width) in overlap.items()
        }

    @property
    def record_bytes(self) -> int:
        """One tail record, all layers."""
        return sum(prod(shape) * dtype.itemsize for shape, dtype in self.record_parts.values())

    @property
    def record_layer_bytes(self) -> int:
        """Of a tail record, the layer that has most of it."""
        return sum(prod(shape[1:]) * dtype.itemsize for shape, dtype in self.record_parts.values())

    @property
    def request_bytes(self) -> int:
        """What the device holds of a running request: windows and the compressors' journals."""
        geometry = self.geometry
        windows = geometry.layers * geometry.sliding_window * geometry.head_dim * self.dtype.itemsize
        journals = [shape for ratio in geometry.ratios for shape in self.journals(ratio).values()]
        return windows + _FP32 * sum(tokens * width for tokens, width in journals)


def plan_v4_regions(
    config: InplaceConfig,
    layout: V4Layout,
    *,
    max_running_requests: int,
    device_bytes_auto: int,
    host_bytes_auto: int,
    staging_tokens: int,
    workspace_bytes: int,
    capacity_tokens: int | None,
    prefix_cache: bool = False,
) -> RegionSizes:
    """Turn budgets into pages and, for a prefix cache, tail records, or raise ConfigError with the arithmetic.

    Other arguments as of layout.plan_regions.
    """
    shape, windows = layout.shape, window_count(max_running_requests)
    host_bytes = host_bytes_auto if config.host_memory_bytes is None else config.host_memory_bytes
    records = host_bytes // RECORD_SHARE // layout.record_bytes if prefix_cache else 0
    host_pages = (host_bytes - records * layout.record_bytes) // shape.page_bytes
    chunk_pages = max(1, min(MAX_CHUNK_BYTES, host_bytes // MIN_CHUNKS) // shape.page_bytes)
    limit = None if capacity_tokens is None else capacity_tokens // layout.page_tokens
    if config.gpu_memory_tokens is not None:
        if config.gpu_memory_tokens % layout.page_tokens:
            raise ConfigError(
                f"--inplacekv-gpu-memory: asked {config.gpu_memory_tokens}tok, possible are multiples of "
                f"--page-size {layout.page_tokens}"
            )
        device_pages = config.gpu_memory_tokens // layout.page_tokens
    else:
        budget = device_bytes_auto if config.gpu_memory_bytes is None else config.gpu_memory_bytes
        staging = STAGING_LAYERS * -(-staging_tokens // layout.page_tokens) * shape.block_bytes
        fixed = windows * shape.page_bytes + (max_running_requests + 1) * layout.request_bytes + staging
        fixed += workspace_bytes
        if records:
            # Rows on their way to records, of the pages that a forward completes, and one record on its way back.
            completed = staging_tokens // layout.page_tokens + max_running_requests
            fixed += STAGING_LAYERS * completed * layout.record_layer_bytes + layout.record_bytes
        left = budget - fixed - layout.kept_page_bytes  # of the padding page
        if left < 2 * layout.kept_page_bytes:
            raise ConfigError(
                f"--inplacekv-gpu-memory: asked {budget} bytes, possible is at least "
                f"{fixed + 3 * layout.kept_page_bytes} = windows, state of {max_running_requests} requests, prefill staging "
                f"and workspaces {fixed} + index keys and HCA entries of a page {layout.kept_page_bytes} x 3"
            )
        # Every page of the host, too, has its index keys and HCA entries on the device.
        host_pages = min(host_pages, left // layout.kept_page_bytes)
        left -= host_pages * layout.kept_page_bytes
        device_pages = left // (shape.page_bytes + layout.kept_page_bytes)
    if limit is not None:
        device_pages = min(device_pages, limit)
        host_pages = max(0, min(host_pages, limit - device_pages))
    if device_pages + host_pages < 2:
        raise ConfigError(
            f"--inplacekv-host-memory: asked {host_bytes} bytes, possible are at least two pages, with those of D, of "
            f"{shape.page_bytes} bytes ({layout.page_tokens} tokens)"
        )
    records = min(records, device_pages + host_pages)
    return RegionSizes(
        device_pages, windows, host_pages, chunk_pages, _TILE_PAGES, layout.page_rows, CSA_RATIO, records
    )
