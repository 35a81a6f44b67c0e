"""Entries of one sequence and layer in torch tensors that grow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sparse_attn.base import Space


class GrowingStore:
    """An EntryStore that owns its memory: one tensor for each space, at least doubled when full.

    A ring space keeps what Space.ring promises and drops older rows when it runs full, so its memory is bounded by the ring and
    the longest append. Dtype and device are those of a space's first rows.
    """

    def __init__(self, spaces: Mapping[str, Space]) -> None:
        self._spaces = spaces
        self._rows: dict[str, Tensor] = {}
        self._first = dict.fromkeys(spaces, 0)  # id of the first row kept
        self._count = dict.fromkeys(spaces, 0)  # id behind the last one

    def count(self, space: str) -> int:
        return self._count[space]

    def append(self, space: str, first: int, values: Tensor) -> None:
        geometry = self._spaces[space]
        if first != self._count[space]:
            raise ValueError(f"{space} holds {self._count[space]} entries, {first} is not the next")
        if values.shape[1:] != (geometry.kv_heads, geometry.width):
            raise ValueError(
                f"entries of {space} are {(geometry.kv_heads, geometry.width)}, not {tuple(values.shape[1:])}"
            )
        last = first + len(values)
        if space not in self._rows:
            self._rows[space] = values.new_empty(0, *values.shape[1:])
        if last - self._first[space] > len(self._rows[space]):
            self._make_room(space, last, values)
        base = self._first[space]
        self._rows[space][first - base : last - base] = values
        self._count[space] = last

    def _make_room(self, space: str, last: int, values: Tensor) -> None:
        old, base, count = self._rows[space], self._first[space], self._count[space]
        ring = self._spaces[space].ring
        kept_from = base if ring is None else max(base, count - ring)
        rows = values.new_empty(2 * (last - kept_from), *values.shape[1:])
        rows[: count - kept_from] = old[kept_from - base : count - base]
        self._rows[space], self._first[space] = rows, kept_from

    def _kept(self, space: str, first: int, last: int) -> tuple[int, int]:
        base, count = self._first[space], self._count[space]
        if not base <= first <= last <= count:
            raise IndexError(f"entries {first} .. {last} of {space} asked, {base} .. {count} are kept")
        return first - base, last - base

    def rows(self, space: str, first: int, last: int) -> Tensor:
        if space not in self._rows:  # of dtype and device nothing is known yet
            geometry = self._spaces[space]
            self._kept(space, first, last)
            return torch.empty(0, geometry.kv_heads, geometry.width)
        start, stop = self._kept(space, first, last)
        return self._rows[space][start:stop]

    def slots(self, space: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Where entries lie: a tensor [rows, kv_heads, width], and the rows of `ids` in it. -1 stays -1.

        Raises IndexError for an entry that is not kept.
        """
        listed = ids[ids >= 0]
        if listed.numel():
            self._kept(space, int(listed.min()), int(listed.max()) + 1)
        rows = self._rows.get(space)
        if rows is None:
            rows = self.rows(space, 0, 0)
        return rows, torch.where(ids >= 0, ids - self._first[space], -1)

    def truncate(self, space: str, count: int) -> None:
        if not self._first[space] <= count <= self._count[space]:
            raise ValueError(
                f"{space} keeps {self._first[space]} .. {self._count[space]}, cannot end at {count}"
            )
        self._count[space] = count
