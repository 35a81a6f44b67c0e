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
        sizes = [span.prefix for span in plan.spans]
        self.starts = np.concatenate(([0], np.cumsum(sizes))).tolist()  # of each request, and the end
        next_row = list(self.starts[:-1])
        self._readers: list[
            list[tuple[int, torch.Tensor]]
        ] = []  # of each tile: first row, places in the tile
        for tile in tiles:
            own = []
            for request, places in tile.readers:
                own.append((next_row[request], to_device(places.numpy())))
                next_row[request] += len(places) * page_size
            self._readers.append(own)
        slots = [reads.device_slots(page_size) for reads in plan.reads]
        rows = [np.arange(first, first + len(own)) for first, own in zip(next_row, slots, strict=True)]
        found = [first + len(own) for first, own in zip(next_row, slots, strict=True)]
        if found != self.starts[1:]:
            raise RuntimeError(
                f"{plan.who}: prefixes end at rows {self.starts[1:]}, planned reads at {found}"
            )
        self._slots = to_device(np.concatenate(slots)) if any(map(len, slots)) else None
        self._rows = to_device(np.concatenate(rows))

    @property
    def tokens(self) -> int:
        return self.starts[-1]

    def from_device(self, rows: torch.Tensor, source: torch.Tensor) -> None:
        """Fill what comes from D. rows [tokens, width]; source [slots, width]."""
        if self._slots is not None:
            rows.index_copy_(0, self._rows, source[self._slots])

    def from_tile(self, rows: torch.Tensor, index: int, pages: torch.Tensor) -> None:
        """Fill what comes from tile `index`. pages [tile_pages, page_size, width]."""
        for first, places in self._readers[index]:
            shape = (len(places), *pages.shape[1:])
            target = rows[first : first + shape[0] * shape[1]].view(shape)
            torch.index_select(pages, 0, places, out=target)
