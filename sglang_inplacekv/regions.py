"""The four regions of one rank as one object: homes, windows, host arena and the device tensors. No SGLang in here."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import cpu_attn
from sglang_inplacekv.arena import HostArena
from sglang_inplacekv.config import InplaceConfig
from sglang_inplacekv.homes import HomeTable
from sglang_inplacekv.layout import KVShape, RegionSizes
from sglang_inplacekv.windows import WindowTable
from sglang_inplacekv.write_scope import WriteScope


class Regions:
    """Owner of all KV bytes.

    device_kv [layers, parts, device_tensor_pages * G, kv_heads, head_dim] holds D homes and windows; device_k[layer] and
    device_v[layer] are what attention reads of it. The host arena holds C and T. P belongs to the executor that streams.
    """

    def __init__(
        self,
        config: InplaceConfig,
        shape: KVShape,
        sizes: RegionSizes,
        team: cpu_attn.Executor,
        device: str = "cpu",
    ) -> None:
        self.config, self.shape, self.sizes, self.team = config, shape, sizes, team
        self.scope = WriteScope.from_config(config.cpu_share)
        self.arena = HostArena(shape, sizes, team)
        pins = self.arena.start_pinning(config.wait_timeout_s) if device != "cpu" else None
        self.homes = HomeTable(sizes, self.scope, config.wait_timeout_s, pins)
        self.windows = WindowTable(sizes.window_pages, self._window_released)
        rows = sizes.device_tensor_pages * shape.page_size
        fill = torch.nan if config.poison else 0.0
        self.device_kv = torch.full(
            (shape.layers, shape.parts, rows, shape.kv_heads, shape.head_dim),
            fill,
            dtype=shape.dtype,
            device=device,
        )
        self.device_k = [layer[0] for layer in self.device_kv]
        self.device_v = [layer[-1][..., : shape.out_dim] for layer in self.device_kv]

    @property
    def device_bytes(self) -> int:
        return self.device_kv.nbytes

    def tokens_by_region(self) -> dict[str, int]:
        """Allocated tokens per region (whole pages), and open windows as tokens."""
        size = self.sizes.page_tokens
        return {
            "D": self.homes.device_used_pages * size,
            "C": self.scope.compute_pages * size,
            "T": self.scope.transfer_pages * size,
            "window": self.windows.open_count * size,
        }

    def window_rows(self, page: int) -> slice:
        """Rows of the device tensors that hold an open host page."""
        window = self.windows.window_of(page)
        if window is None:
            raise RuntimeError(f"host page {page} owns no window")
        return self._device_rows(self.sizes.first_host_page + window)

    def _device_rows(self, place: int) -> slice:
        return slice(place * self.sizes.page_size, (place + 1) * self.sizes.page_size)

    def pages_freed(self, pages: Sequence[int]) -> None:
        """Called after the home table took `pages` back: their windows go too."""
        for page in pages:
            self.windows.page_freed(page)
        if self.config.poison:
            if self.device_kv.is_cuda:
                torch.cuda.synchronize()  # a forward that still reads them may be in flight
            for page in pages:
                self._poison_page(page)

    def forget_all_pages(self) -> None:
        """All pages are about to be free at once; nothing may be in flight."""
        self.windows.forget_all()
        self.homes.outstanding()
        if self.config.poison:
            for page in self.homes.all_used():
                self._poison_page(page)

    def _poison_page(self, page: int) -> None:
        if self.sizes.is_device(page):
            self._poison_device_page(page)
            return
        ticket = self.homes.tickets.get(page)
        if ticket is not None:
            ticket.wait(self.config.wait_timeout_s, f"poisoning freed page {page}")
        self.arena.page_bytes_view(page).fill_(torch.nan)

    def _window_released(self, window: int) -> None:
        if self.config.poison:
            self._poison_device_page(self.sizes.first_host_page + window)

    def _poison_device_page(self, place: int) -> None:
        rows = self._device_rows(place)
        self.device_kv[:, :, rows] = torch.nan

    def check_integrity(self) -> None:
        self.homes.check_integrity()
        self.windows.check_integrity()
