"""Copies of entries of a spilled space in device memory: a set of fixed size, which the least recently attended ones leave."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_attn.base import Space


class HotSet:
    """Copies of entries of one space, one sequence and layer, in `capacity` rows on `device`.

    A copy never changes; entries are written once. Who was attended in this step is never evicted in it.
    """

    def __init__(self, space: Space, capacity: int, device: torch.device | str = "cpu") -> None:
        if capacity < 0:
            raise ValueError(f"a hot set of {capacity} entries")
        self.space, self.capacity = space, capacity
        self.rows = torch.empty(
            0, space.kv_heads, space.width, device=device
        )  # [capacity, ...] from the first admission on
        self.evicted = 0  # since start
        self._slot_of = torch.empty(0, dtype=torch.int64, device=device)  # by entry, -1 where not held
        self._entry_in = torch.full((capacity,), -1, device=device)  # by slot, -1 where free
        self._used = torch.zeros(
            capacity, dtype=torch.int64, device=device
        )  # step of the last use by slot, 0 where free
        self._step = 1

    def __len__(self) -> int:
        return int((self._entry_in >= 0).sum())

    def begin_step(self) -> None:
        """From here on, what earlier steps used may be evicted."""
        self._step += 1

    def slots(self, ids: Tensor) -> Tensor:
        """Rows of entries `ids`, of any shape: -1 where an entry is not held, and for -1."""
        if not len(self._slot_of):
            return torch.full_like(ids, -1)
        known = (ids >= 0) & (ids < len(self._slot_of))
        return torch.where(known, self._slot_of[ids.clamp(0, len(self._slot_of) - 1)], -1)

    def use(self, slots: Tensor) -> None:
        """Note that rows `slots` are attended in this step; -1 is passed over."""
        self._used[slots[slots >= 0]] = self._step

    def admit(self, ids: Tensor, rows: Tensor) -> int:
        """Copy entries in, in use in this step, and return how many found room: of too many the last ones.

        ids int64 [n], ascending, none of them held; rows [n, kv_heads, width].
        """
        room = int((self._used < self._step).sum())
        count = min(len(ids), room)
        if not count:
            return 0
        ids, rows = ids[len(ids) - count :].to(self.rows.device), rows[len(rows) - count :]
        self._make_room(int(ids[-1]) + 1, rows)
        taken = self._used.argsort(stable=True)[:count]
        former = self._entry_in[taken]
        former = former[former >= 0]
        self._slot_of[former] = -1
        self.evicted += len(former)
        self.rows[taken] = rows.to(self.rows)
        self._slot_of[ids], self._entry_in[taken] = taken, ids
        self._used[taken] = self._step
        return count

    def drop_from(self, entry: int) -> None:
        """Forget entries from `entry` on: a rollback gives their ids to others."""
        stale = self._entry_in >= entry
        self._slot_of[self._entry_in[stale]] = -1
        self._entry_in[stale], self._used[stale] = -1, 0

    def check_integrity(self) -> None:
        """Raise RuntimeError unless entries and slots point at each other."""
        held = self._entry_in[self._entry_in >= 0]
        back = self._slot_of[held]
        listed = int((self._slot_of >= 0).sum())
        if listed != len(held) or not torch.equal(self._entry_in[back], held):
            raise RuntimeError(f"{len(held)} slots are taken, {listed} entries have one")

    def _make_room(self, entries: int, like: Tensor) -> None:
        if not len(self.rows):
            self.rows = torch.empty(self.capacity, *like.shape[1:], dtype=like.dtype, device=self.rows.device)
        if entries > len(self._slot_of):
            grown = self._slot_of.new_full((2 * entries,), -1)
            grown[: len(self._slot_of)] = self._slot_of
            self._slot_of = grown
