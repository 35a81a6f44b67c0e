"""A selection attended on two sides at once: what the device holds there, the rest split between the CPU and the link.

Of each list in a spilled space
    hot    entries with a copy on the device are attended there,
    tile   fetched ones are gathered into one contiguous tile, attended on the device and then hot,
    cpu    the others are attended by the CPU where they lie,
and segments of all other spaces are attended on the device. The three lists are disjoint and together the selection. Partial
states merge for each softmax group; the sink joins in that merge alone, on the device, once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sparse_attn.attend import EntrySource, State, attend_rows, expand, merge
from sparse_attn.base import Closed, LayerInputs, Selection, Selector, SelectorState, Space
from sparse_attn.hot import HotSet
from sparse_attn.traffic import Policy, Traffic, answer_bytes, exchange_bytes


class Pending(Protocol):
    def wait(self) -> State:
        """The state, on the host; raises if the work failed."""


class CpuSide(Protocol):
    """Attends entries in host memory; cpu_side.py has two."""

    def submit(self, q: Tensor, space: Space, ids: Tensor, scale: float) -> Pending:
        """Begin to attend q [T, H, dk] to entries ids int64 [T, G, K] (-1: none) of a space; all on the host."""


@dataclass(frozen=True)
class Placement:
    """Where the entries of one segment are attended: int64 [T, G, K] each, -1 elsewhere."""

    hot: Tensor  # rows of the hot set
    tile: Tensor  # rows of the tile
    cpu: Tensor  # entries
    fetched: Tensor  # int64 [n], ascending: the entries of the tile's rows
    different: int  # entries listed
    cpu_entries: int  # different ones


def place(ids: Tensor, hot: HotSet, policy: Policy, exchange: int) -> Placement:
    """Divide entry ids [T, G, K] (-1: none) by where they are attended; changes nothing.

    exchange: bytes that the CPU's part would move. The CPU gets the lowest of the missed entries: equal inputs divide alike.
    """
    slots = hot.slots(ids)
    listed, held = ids >= 0, slots >= 0
    missed = ids[listed & ~held].unique()
    cpu_count = policy.cpu_entries(len(missed), hot.space.entry_bytes, exchange)
    fetched = missed[cpu_count:]
    if len(fetched):
        tiled = listed & ~held & (ids >= fetched[0])
        tile = torch.where(tiled, torch.searchsorted(fetched, ids.contiguous()), -1)
    else:
        tiled, tile = torch.zeros_like(listed), torch.full_like(ids, -1)
    on_cpu = listed & ~held & ~tiled
    different = len(missed) + len(slots[held].unique())
    return Placement(slots, tile, torch.where(on_cpu, ids, -1), fetched, different, cpu_count)


class Composer:
    """Attends the selections of one sequence in one layer.

    Args:
        selector: of the layer.
        scale: multiplies q . k.
        policy: for entries without a copy on the device.
        resident: entries of the spaces that do not spill, on `device`.
        home: entries of the spaces that spill, in host memory; it has every entry that a selection can name.
        cpu: attends what `home` holds.
        hot_entries: size of the hot set of each space that spills.
        on_place: told of each list before it is attended: the space, its entry ids as in Placement, and where they go.
    """

    def __init__(
        self,
        selector: Selector,
        scale: float,
        policy: Policy,
        *,
        resident: EntrySource,
        home: EntrySource,
        cpu: CpuSide,
        hot_entries: int,
        device: torch.device | str = "cpu",
        on_place: Callable[[str, Tensor, Placement], None] | None = None,
    ) -> None:
        self.policy, self.traffic = policy, Traffic()
        self._selector, self._scale = selector, scale
        self._resident, self._home, self._cpu = resident, home, cpu
        self._device, self._on_place = device, on_place
        self.hot: Mapping[str, HotSet] = {
            name: HotSet(space, hot_entries, device) for name, space in selector.spaces.items() if space.spill
        }

    def forward(self, state: SelectorState, x: LayerInputs) -> Tensor:
        """Observe, select, attend, finish: the heads' outputs [T, H, head_dim] fp32 of the tokens x, with x.q."""
        if x.q is None:
            raise ValueError("queries are missing")
        self.publish(self._selector.observe(state, x))
        selection = self._selector.select(state, x)
        return self._selector.finish(self.attend(x.q, selection), x, selection)

    def publish(self, closed: list[Closed]) -> None:
        """Hold new entries on the device, where they were made: the query that closes a block may select its entry at once."""
        for item in closed:
            hot = self.hot.get(item.space)
            if hot is not None:
                hot.begin_step()
                ids = torch.arange(item.first, item.first + len(item.values), device=item.values.device)
                hot.admit(ids, item.values)
                self.traffic.homed_bytes += len(ids) * hot.space.entry_bytes

    def rollback(self, state: SelectorState, tokens: int) -> None:
        """Selector.rollback, here too: copies of entries that are no more are dropped."""
        counts = self._selector.rollback(state, tokens)
        for name, hot in self.hot.items():
            hot.drop_from(counts[name])

    def attend(self, q: Tensor, selection: Selection) -> list[Tensor]:
        """Attend q [T, H, dk] on the device to a selection; outs [T, H, dv] fp32 by group, for Selector.finish."""
        self.traffic.steps += 1
        states: list[list[State]] = [[] for _ in range(selection.groups)]
        pending: list[tuple[int, Pending]] = []
        for segment in selection.segments:
            space, ids = self._selector.spaces[segment.space], expand(segment).to(q.device)
            if segment.space in self.hot:
                placement = self._place(q, self.hot[segment.space], ids)
                if placement.cpu_entries:
                    # Before the device begins, so that both are at work.
                    job = self._cpu.submit(q.cpu(), space, placement.cpu.cpu(), self._scale)
                    pending.append((segment.group, job))
                states[segment.group] += self._attend_hot(q, self.hot[segment.space], placement)
            else:
                rows, slots = self._resident.slots(segment.space, ids)
                states[segment.group].append(attend_rows(q, space, rows, slots, self._scale))
        for group, job in pending:
            out, lse = job.wait()
            states[group].append((out.to(q.device), lse.to(q.device)))
        return [merge(part, selection.sink if group == 0 else None)[0] for group, part in enumerate(states)]

    def _place(self, q: Tensor, hot: HotSet, ids: Tensor) -> Placement:
        space, traffic = hot.space, self.traffic
        tokens, heads, _ = q.shape
        answers = answer_bytes(tokens, heads, space.dv)
        exchange = exchange_bytes(tokens, heads, space.dk, space.dv, q.element_size())
        placement = place(ids, hot, self.policy, exchange)
        listed, hits, tiled, on_cpu = (
            int((part >= 0).sum()) for part in (ids, placement.hot, placement.tile, placement.cpu)
        )
        if hits + tiled + on_cpu != listed:
            raise RuntimeError(
                f"{listed} entries selected, {hits} hot + {tiled} fetched + {on_cpu} for the CPU"
            )
        traffic.listed += listed
        traffic.hits += hits
        traffic.selected_entries += placement.different
        traffic.selected_bytes += placement.different * space.entry_bytes
        traffic.cpu_entries += placement.cpu_entries
        traffic.fetched_entries += len(placement.fetched)
        traffic.fetched_bytes += len(placement.fetched) * space.entry_bytes
        if placement.cpu_entries:
            traffic.query_bytes += exchange - answers
            traffic.answer_bytes += answers
        if self._on_place is not None:
            self._on_place(space.name, ids, placement)
        return placement

    def _attend_hot(self, q: Tensor, hot: HotSet, placement: Placement) -> list[State]:
        """States of the hot entries and of the tile, whose entries are hot from then on."""
        hot.begin_step()
        hot.use(placement.hot)
        states = [attend_rows(q, hot.space, hot.rows, placement.hot, self._scale)]
        if len(placement.fetched):
            rows, slots = self._home.slots(hot.space.name, placement.fetched.cpu())
            tile = rows[slots].to(q.device)
            states.append(attend_rows(q, hot.space, tile, placement.tile, self._scale))
            hot.admit(placement.fetched, tile)
        return states
