"""Where the selected CSA entries of a forward lie, and reading them there. Rows and entries are the same thing here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

import cpu_attn
from sglang_inplacekv.regions import Regions
from sglang_inplacekv.step_plan import StepPlan


@dataclass(frozen=True)
class Places:
    """One request's pages, as the forward finds them. Arrays are [pages]."""

    device: np.ndarray  # place in the device tensor, D home or window; -1: on the host
    host: np.ndarray  # place in the arena's layer rows; -1: on the device
    on_cpu: np.ndarray  # bool: of the host, those that the CPU attends


@dataclass(frozen=True)
class Located:
    """Where one request's selected entries lie, int64 [queries, K] each, -1 where not there: disjoint, together all of them."""

    fresh: np.ndarray  # made by this forward, from its first one on
    device: np.ndarray  # rows of the device tensor
    gathered: np.ndarray  # rows of the arena that cross to the device
    computed: np.ndarray  # rows of the arena that the CPU attends in place


class EntryReader:
    """Entries of all layers of CSA, by their number among those layers."""

    def __init__(self, regions: Regions, layers: int) -> None:
        self._regions = regions
        self._rows = [regions.arena.layer_rows(layer) for layer in range(layers)]
        width = regions.shape.head_dim
        # A page of one row each: the CPU's kernel takes any list of them.
        self._paged = [
            cpu_attn.PagedLatent([rows.view(-1, 1, width)], width) if len(rows) else None
            for rows in self._rows
        ]

    def places(self, plan: StepPlan) -> list[Places]:
        """Of each request. In a prefill the CPU attends nothing: that is bound by arithmetic."""
        return [
            self._places(span.pages, reads.cpu_pages if plan.is_decode else reads.cpu_pages[:0])
            for span, reads in zip(plan.spans, plan.reads, strict=True)
        ]

    def _places(self, pages: np.ndarray, cpu_pages: np.ndarray) -> Places:
        regions, sizes = self._regions, self._regions.sizes
        device = np.where(pages < sizes.first_host_page, pages, -1)
        open_pages = regions.windows.open_pages()
        for index in np.flatnonzero(device < 0).tolist():
            window = open_pages.get(int(pages[index]))
            if window is not None:
                device[index] = sizes.first_host_page + window
        at_home = device < 0
        host = np.full(len(pages), -1, dtype=np.int64)
        if at_home.any():
            host[at_home] = regions.arena.row_page_index(pages[at_home])
        return Places(device, host, np.isin(pages, cpu_pages) & at_home)

    def locate(self, ids: np.ndarray, places: Places, first_fresh: int) -> Located:
        """ids [queries, K] entries of one request, -1 for none; those from `first_fresh` on are this forward's own."""
        size = self._regions.sizes.page_size
        listed = ids >= 0
        fresh = ids >= first_fresh
        kept = listed & ~fresh
        page, slot = np.divmod(np.where(kept, ids, 0), size)
        page_known = np.minimum(page, max(len(places.device) - 1, 0))
        device, host = places.device[page_known], places.host[page_known]
        on_device, on_cpu = device >= 0, places.on_cpu[page_known]
        return Located(
            np.where(listed & fresh, ids - first_fresh, -1),
            np.where(kept & on_device, device * size + slot, -1),
            np.where(kept & ~on_device & ~on_cpu, host * size + slot, -1),
            np.where(kept & ~on_device & on_cpu, host * size + slot, -1),
        )

    def gather(self, layer: int, rows: np.ndarray) -> tuple[torch.Tensor, np.ndarray]:
        """Bring host rows to the device, each once: them [n, 1, width], and of `rows`' shape which one each is, -1 for none."""
        unique, inverse = np.unique(rows, return_inverse=True)
        if len(unique) and unique[0] < 0:
            unique, inverse = unique[1:], inverse - 1
        device = self._regions.device_kv.device
        picked = self._rows[layer].index_select(0, torch.from_numpy(unique))
        if device.type == "cuda":
            picked = picked.pin_memory().to(device, non_blocking=True)
        return picked.unsqueeze(1), inverse.reshape(rows.shape)

    def device_rows(self, layer: int) -> torch.Tensor:
        """[rows, 1, width]: D homes and windows."""
        return self._regions.device_k[layer]

    def submit(
        self, layer: int, q: torch.Tensor, rows: list[np.ndarray], scale: float
    ) -> cpu_attn.Job | None:
        """Attend q [requests, heads, width], on the CPU, in place, to each request's rows. None if there are none."""
        counts = np.array([len(own) for own in rows])
        paged = self._paged[layer]
        if not counts.any() or paged is None:
            return None
        listed = np.concatenate(rows).astype(np.int32)
        columns = (np.zeros(len(listed)), listed, np.concatenate(([0], counts.cumsum())), counts)
        table = cpu_attn.PageTable(*(torch.from_numpy(column.astype(np.int32)) for column in columns))
        arguments = cpu_attn.DecodeArguments.check(q, paged, table, scale)
        return self._regions.team.submit_arguments(arguments)
