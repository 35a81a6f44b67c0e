"""The prefixes of an extend, brought together request after request: what SGLang expands to keys and values for MLA."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from sglang_inplacekv.executors.tile_stream import Tile
from sglang_inplacekv.step_plan import StepPlan


class PrefixGather:
    """Which rows of the result come from where, the same in every layer.

    A prefix is attended without a causal mask, so the order of its rows is free: a request's host pages come first, in the
    order in which they cross, then what it has in D.
    """

    def __init__(
        self,
        plan: StepPlan,
        tiles: Sequence[Tile],
        page_size: int,
        to_device: Callable[[np.ndarray], torch.Tensor],
    ) -> None:
        starts = np.cumsum([0, *(span.prefix for span in plan.spans)]).tolist()
        self.tokens, next_row = starts[-1], starts[:-1]
        # Of each tile: where a request's rows begin, and the places of its pages in the tile.
        self._readers: list[list[tuple[int, torch.Tensor]]] = []
        for tile in tiles:
            readers = []
            for request, places in tile.readers:
                readers.append((next_row[request], to_device(places.numpy())))
                next_row[request] += len(places) * page_size
            self._readers.append(readers)
        slots = [reads.device_slots(page_size) for reads in plan.reads]
        rows = [np.arange(first, first + len(own)) for first, own in zip(next_row, slots, strict=True)]
        ends = [first + len(own) for first, own in zip(next_row, slots, strict=True)]
        if ends != starts[1:]:
            raise RuntimeError(f"{plan.who}: prefixes end at rows {starts[1:]}, planned reads at {ends}")
        self._in_device = (
            (to_device(np.concatenate(rows)), to_device(np.concatenate(slots)))
            if any(map(len, slots))
            else None
        )

    def from_device(self, rows: torch.Tensor, source: torch.Tensor) -> None:
        """Fill what comes from D. rows [tokens, width]; source [slots, width]."""
        if self._in_device is not None:
            own, slots = self._in_device
            rows.index_copy_(0, own, source[slots])

    def from_tile(self, rows: torch.Tensor, index: int, pages: torch.Tensor) -> None:
        """Fill what comes from tile `index`. pages [tile_pages, page_size, width]."""
        for first, places in self._readers[index]:
            shape = (len(places), *pages.shape[1:])
            target = rows[first : first + shape[0] * shape[1]].view(shape)
            torch.index_select(pages, 0, places, out=target)
