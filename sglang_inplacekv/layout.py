"""Page ids, the four regions and the bytes behind them.

Page ids (one id = one page of G tokens, all layers), half-open:

    [0, 1)                       padding page of SGLang; never read, never a home
    [1, 1 + D)                   homes in GPU memory                              region D
    [1 + D, 1 + D + H)           homes in host memory, cut into chunks            region C or T, by role[chunk]

Device tensor of one layer, in pages, half-open (same ids for D, so a D page's id is its place):

    [0, 1)                       padding
    [1, 1 + D)                   D homes
    [1 + D, 1 + D + W)           decode windows: a private range, never ids, never capacity

Host chunk, layer-major: [layer][page of chunk][part] blocks of G * kv_heads * head_dim elements. Parts are K and V, or in a
latent (MLA) cache one row whose beginning is V. A block is `[kv_heads][G][d]` while the chunk is C and `[G][kv_heads][d]` while
it is T. Both layouts of a page cover the same bytes, so a chunk changes role without any other page noticing, and one layer's
adjacent pages are one copy.

Who owns a request's tokens, as half-open intervals of its n tokens with b = n // G * G:

    [0, b)   full pages          home (D, C or T); a host page not yet flushed is still read from its window
    [b, n)   open page           D home, or the window owned by the host home page
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sglang_inplacekv.config import ConfigError, InplaceConfig

ROLE_NONE, ROLE_COMPUTE, ROLE_TRANSFER = -1, 0, 1
MAX_CHUNK_BYTES = 2**30
MIN_CHUNKS = 16
DEFAULT_TILE_TOKENS = 2048
DEFAULT_TILE_TOKENS_CUDA = 32768  # 64 MiB of Qwen3-30B-A3B: long copies, few calls of the attention kernel
STAGING_LAYERS = 2
WORKSPACE_BYTES_CUDA = 128 * 2**20  # FlashInfer's split results
PLAN_BYTES_CUDA = 2 * 2**20  # FlashInfer's plan of one call, on the GPU and in pinned memory each
PLAN_BYTES_CUDA_MLA = 8 * 2**20  # what its MLA calls take themselves


@dataclass(frozen=True)
class KVShape:
    """Per-rank KV geometry.

    GQA and MHA: kv_heads x head_dim, twice. MLA: one head of head_dim = lora rank + rope, whose first value_dim elements are V.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    page_size: int  # tokens, G
    value_dim: int | None = None  # None: V is a part of its own, as wide as K

    @property
    def parts(self) -> int:
        """Blocks of one page of one layer: K and V, or K alone."""
        return 2 if self.value_dim is None else 1

    @property
    def out_dim(self) -> int:
        """Width of attention's output."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def block_bytes(self) -> int:
        """One part of one page of one layer."""
        return self.page_size * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """One page of all layers."""
        return self.parts * self.block_bytes * self.layers

    @property
    def token_bytes(self) -> int:
        return self.page_bytes // self.page_size


@dataclass(frozen=True)
class RegionSizes:
    """Everything the server allocates for KV, in pages."""

    device_pages: int  # D homes
    window_pages: int  # W
    host_pages: int  # C + T homes
    chunk_pages: int
    tile_pages: int  # of one P tile; there are two
    page_size: int  # rows of a page of a layer
    row_tokens: int = 1  # that a row stands for
    tail_records: int = 0  # in host memory, of pages of either kind; DeepSeek-V4 with a prefix cache

    @property
    def page_tokens(self) -> int:
        return self.page_size * self.row_tokens

    @property
    def capacity_tokens(self) -> int:
        return (self.device_pages + self.host_pages) * self.page_tokens

    @property
    def chunks(self) -> int:
        return -(-self.host_pages // self.chunk_pages) if self.host_pages else 0

    @property
    def first_host_page(self) -> int:
        return 1 + self.device_pages

    @property
    def pages(self) -> int:
        """Ids that exist, padding included."""
        return 1 + self.device_pages + self.host_pages

    @property
    def device_tensor_pages(self) -> int:
        return 1 + self.device_pages + self.window_pages

    def is_device(self, page: int) -> bool:
        return page < self.first_host_page

    def chunk_of(self, page: int) -> int:
        return (page - self.first_host_page) // self.chunk_pages

    def slot_of(self, page: int) -> int:
        """Place of a host page inside its chunk."""
        return (page - self.first_host_page) % self.chunk_pages

    def locate(self, pages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Chunk of each host page, and its place inside it."""
        return np.divmod(pages - self.first_host_page, self.chunk_pages)

    def adjacent_runs(self, pages: np.ndarray) -> np.ndarray:
        """Group host `pages` into copies: [runs, 4] int64 of (chunk, first slot in chunk, first place in `pages`, count)."""
        chunk, slot = self.locate(np.asarray(pages, dtype=np.int64))
        first = np.ones(len(chunk), dtype=bool)
        first[1:] = (np.diff(slot) != 1) | (np.diff(chunk) != 0)
        place = np.flatnonzero(first)
        return np.stack((chunk[place], slot[place], place, np.diff(np.append(place, len(chunk)))), axis=1)

    def chunk_page_range(self, chunk: int) -> range:
        first = self.first_host_page + chunk * self.chunk_pages
        return range(first, min(first + self.chunk_pages, self.pages))


def window_count(max_running_requests: int) -> int:
    """One open page per running request, and spares that let new pages open while full ones are being flushed."""
    return max_running_requests + min(8, max_running_requests)


def plan_regions(
    config: InplaceConfig,
    shape: KVShape,
    *,
    max_running_requests: int,
    device_bytes_auto: int,
    host_bytes_auto: int,
    staging_tokens: int,
    capacity_tokens: int | None = None,
    tile_tokens: int = DEFAULT_TILE_TOKENS,
    workspace_bytes: int = 0,
) -> RegionSizes:
    """Turn budgets into pages, or raise ConfigError with the arithmetic.

    device_bytes_auto and host_bytes_auto are what `auto` stands for on this host. staging_tokens is the longest prefill
    chunk, whose K/V is staged for STAGING_LAYERS layers. capacity_tokens is SGLang's --max-total-tokens: it lowers the
    host part first, then D. tile_tokens is a P tile's size unless the config names one; workspace_bytes is what the
    attention kernels hold on the device.
    """
    tile_pages = max(1, (config.tile_tokens or tile_tokens) // shape.page_size)
    windows = window_count(max_running_requests)
    device_pages = _device_pages(
        config, shape, windows, tile_pages, device_bytes_auto, staging_tokens, workspace_bytes
    )
    host_bytes = config.host_memory_bytes if config.host_memory_bytes is not None else host_bytes_auto
    asked = _asked(config.host_memory_bytes, host_bytes)
    chunk_pages = max(1, min(MAX_CHUNK_BYTES, host_bytes // MIN_CHUNKS) // shape.page_bytes)
    host_pages = host_bytes // shape.page_bytes
    if host_pages == 0:
        raise ConfigError(
            f"--inplacekv-host-memory: asked {asked}, possible is at least one chunk of {shape.page_bytes} bytes "
            f"(a page of {shape.page_size} tokens x {shape.token_bytes} bytes)"
        )
    if capacity_tokens is not None:
        pages = capacity_tokens // shape.page_size
        host_pages = max(0, min(host_pages, pages - device_pages))
        device_pages = min(device_pages, pages)
    return RegionSizes(device_pages, windows, host_pages, chunk_pages, tile_pages, shape.page_size)


def _asked(flag_bytes: int | None, budget_bytes: int) -> str:
    return f"{budget_bytes} bytes" if flag_bytes is not None else f"auto ({budget_bytes} bytes)"


def _device_pages(
    config: InplaceConfig,
    shape: KVShape,
    windows: int,
    tile_pages: int,
    auto_bytes: int,
    staging_tokens: int,
    workspace_bytes: int,
) -> int:
    if config.gpu_memory_tokens is not None:
        if config.gpu_memory_tokens % shape.page_size:
            raise ConfigError(
                f"--inplacekv-gpu-memory: asked {config.gpu_memory_tokens}tok, possible are multiples of "
                f"--page-size {shape.page_size}"
            )
        return config.gpu_memory_tokens // shape.page_size
    budget = config.gpu_memory_bytes if config.gpu_memory_bytes is not None else auto_bytes
    layer_page = shape.parts * shape.block_bytes
    window_bytes, tile_bytes = windows * shape.page_bytes, 2 * tile_pages * layer_page
    staging_bytes = STAGING_LAYERS * -(-staging_tokens // shape.page_size) * layer_page
    left = budget - window_bytes - tile_bytes - staging_bytes - workspace_bytes
    if left < 0:
        workspaces = f" + workspaces {workspace_bytes}" if workspace_bytes else ""
        raise ConfigError(
            f"--inplacekv-gpu-memory: asked {_asked(config.gpu_memory_bytes, budget)}, possible is at least "
            f"{budget - left} bytes = {windows} windows {window_bytes} + two P tiles {tile_bytes} + prefill staging "
            f"{staging_bytes}{workspaces}; lower --max-running-requests, --page-size or --chunked-prefill-size to need less"
        )
    return left // shape.page_bytes
