"""Entries that stay on the device whatever their page's home: CSA's index keys and HCA's entries."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class PagedEntries:
    """One array for all layers of a kind, [layers, pages, rows of a page, width], found by SGLang's page ids."""

    def __init__(
        self, layers: Sequence[int], pages: int, rows: int, width: int, dtype: torch.dtype, device: str
    ) -> None:
        """layers: the model's layer ids, in order."""
        self._index = {layer: index for index, layer in enumerate(layers)}
        self.rows = rows
        self._kept = torch.zeros(len(layers), pages, rows, width, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        return self._kept.nbytes

    def layer(self, layer: int) -> torch.Tensor:
        """[pages * rows, width]: entry e of a request is row page(e // rows) * rows + e % rows."""
        return self._kept[self._index[layer]].flatten(0, 1)

    def slots(self, pages: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
        """Rows of a layer, int64 of the shape of `entries`, of a request with `pages` [n] int64; -1 stays -1."""
        listed = entries.clamp(min=0)
        return torch.where(entries < 0, -1, pages[listed // self.rows] * self.rows + listed % self.rows)

    def write(self, layer: int, pages: torch.Tensor, first: int, values: torch.Tensor) -> None:
        """values [n, width] become a request's entries first .. first + n."""
        entries = torch.arange(first, first + len(values), device=pages.device)
        self.layer(layer)[self.slots(pages, entries)] = values

    def read(self, layer: int, pages: torch.Tensor, count: int) -> torch.Tensor:
        """A request's first `count` entries, [count, width]; a copy."""
        own = pages[: -(-count // self.rows)]
        return self._kept[self._index[layer]][own].flatten(0, 1)[:count]

    def poison(self, pages: Sequence[int]) -> None:
        self._kept[:, torch.tensor(pages, device=self._kept.device)] = torch.nan
