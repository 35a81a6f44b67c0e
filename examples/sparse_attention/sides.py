"""One sequence of all layers, attended by every policy at once, and a record of who attended what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparse_attn import GrowingStore, LayerInputs, Selection, Space, V4Selector
from sparse_attn.attend import attend_selection, expand
from sparse_attn.compose import Composer, CpuSide, Placement
from sparse_attn.cpu_side import LatentCpuSide, TorchCpuSide
from sparse_attn.traffic import Policy, Traffic, exchange_bytes

SIDES = ("hot", "fetched", "cpu")  # in a spilled space; all else is attended on the device


def cpu_side() -> tuple[Callable[[GrowingStore], CpuSide], str]:
    """What makes a layer's CPU side, and its name: cpu_attn's kernels where that library is built, else torch."""
    from cpu_attn import Executor, isa

    try:
        kernels = isa()
    except RuntimeError as missing:
        return TorchCpuSide, f"torch ({missing})"
    executor = Executor()
    return lambda store: LatentCpuSide(store, executor), f"cpu_attn, {kernels}"


@dataclass
class Record:
    """Of one layer and policy, over all decode steps."""

    events: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # a step's entries, and sides by index
    error: float = 0.0

    def count(self, side: str) -> int:
        return sum(int((sides == SIDES.index(side)).sum()) for _, sides in self.events)

    @property
    def listed(self) -> int:
        return sum(len(entries) for entries, _ in self.events)

    def note(self, space: str, ids: Tensor, placement: Placement) -> None:
        """Composer's on_place. Of one query: RuntimeError unless each entry that it lists goes to one side, once."""
        takers = torch.stack([placement.hot >= 0, placement.tile >= 0, placement.cpu >= 0])
        listed = ids >= 0
        entries = ids[listed]
        if not torch.equal(takers.sum(0), listed.long()) or len(entries.unique()) != len(entries):
            raise RuntimeError(f"{space}: {len(entries)} entries listed, {int(takers.sum())} attended")
        self.events.append((entries, takers[:, listed].int().argmax(0)))

    def check_bytes(self, traffic: Traffic, space: Space, heads: int, query_bytes: int) -> None:
        """RuntimeError unless Traffic's bytes are those of the events."""
        asked = sum(bool((sides == SIDES.index("cpu")).any()) for _, sides in self.events)
        exchange = exchange_bytes(1, heads, space.dk, space.dv, query_bytes)
        expected = asked * exchange + self.count("fetched") * space.entry_bytes + traffic.homed_bytes
        if expected != traffic.link_bytes:
            raise RuntimeError(f"{traffic.link_bytes} bytes counted, {expected} seen")


def in_one_softmax(q: Tensor, selection: Selection, store: GrowingStore, scale: float) -> Tensor:
    """One query [1, H, dk] over all that is selected, sink included, undivided and in fp64: [1, H, dv]."""
    rows = []
    for segment in selection.segments:
        ids = expand(segment)[0, 0]
        kept, slots = store.slots(segment.space, ids[ids >= 0])
        rows.append(kept[slots, 0])
    keys = torch.cat(rows).double()  # a row is key and value at once
    assert selection.sink is not None
    scores = torch.cat([scale * q[0].double() @ keys.T, selection.sink.double()[:, None]], -1)
    return (scores.softmax(-1)[:, :-1] @ keys)[None]


class LayerSequence:
    """The sequence in one layer: selected once, then attended by each policy with a hot set of its own."""

    def __init__(
        self,
        selector: V4Selector,
        policies: Mapping[str, Policy],
        hot_entries: int,
        make_cpu: Callable[[GrowingStore], CpuSide],
    ) -> None:
        self.selector, self.store = selector, GrowingStore(selector.spaces)
        self.hot_entries = hot_entries
        self.state = selector.new_state(self.store)
        self.records = {name: Record() for name in policies}
        cpu = make_cpu(self.store)
        self.composers = {
            name: Composer(
                selector,
                selector.config.scale,
                policy,
                resident=self.store,
                home=self.store,
                cpu=cpu,
                hot_entries=hot_entries,
                on_place=self.records[name].note,
            )
            for name, policy in policies.items()
        }
        self.on_device = self.full_bytes = 0  # summed over decode steps
        self.selected: list[Tensor] = []  # int64 [T, K] of each forward, -1 for none

    @property
    def spilled(self) -> Space | None:
        return next((space for space in self.selector.spaces.values() if space.spill), None)

    def forward(self, x: LayerInputs, followed: str) -> Tensor:
        """Observe, select and attend; the outputs are those of policy `followed` or, of a prefill, undivided."""
        selector, scale = self.selector, self.selector.config.scale
        closed = selector.observe(self.state, x)
        for composer in self.composers.values():
            composer.publish(closed)
        selection = selector.select(self.state, x)
        self.selected += [expand(segment)[:, 0] for segment in selection.segments if segment.ids is not None]
        assert x.q is not None
        if x.tokens > 1:
            # What a prefill makes is at hand where it was made; in a decode the entries have gone home.
            outs = attend_selection(x.q, selection, selector.spaces, self.store, scale)
        else:
            outs = self._decode(x.q, selection, followed)
        return selector.finish(outs, x, selection)

    def _decode(self, q: Tensor, selection: Selection, followed: str) -> list[Tensor]:
        whole = in_one_softmax(q, selection, self.store, self.selector.config.scale)
        outs = {name: composer.attend(q, selection) for name, composer in self.composers.items()}
        for name, (out,) in outs.items():
            error = float((out.double() - whole).abs().max())
            self.records[name].error = max(self.records[name].error, error)
        for segment in selection.segments:
            if not self.selector.spaces[segment.space].spill:
                self.on_device += int((expand(segment) >= 0).sum())
        if self.spilled is not None:
            self.full_bytes += self.store.count(self.spilled.name) * self.spilled.entry_bytes
        return outs[followed]

    def begin_decode(self) -> None:
        """Count from here on."""
        for composer in self.composers.values():
            composer.traffic = Traffic()


class SequenceAttention:
    """What model.Model calls. In the order of layers, token after token."""

    def __init__(self, layers: list[LayerSequence], followed: str) -> None:
        self.layers, self.followed = layers, followed

    def attend(self, layer: int, *, h: Tensor, q_resid: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        own = self.layers[layer]
        x = LayerInputs(own.state.tokens, h, q_resid, q, {"win": kv[:, None]})
        return own.forward(x, self.followed)
