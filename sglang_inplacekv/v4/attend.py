"""Attention of one layer: each request selects, what was selected is attended where it lies, and the parts are merged.

Selections and lists are sparse_attn's, as are the merge, which adds the sink, and what follows it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

import cpu_attn
from sglang_inplacekv.feedback import Costs
from sglang_inplacekv.models.deepseek_v4.geometry import CSA_RATIO, HCA_RATIO
from sglang_inplacekv.v4.entries import Located
from sglang_inplacekv.v4.layout import ENTRIES, WINDOW
from sglang_inplacekv.v4.listed import attend_list
from sglang_inplacekv.v4.pool import InplaceV4Pool
from sglang_inplacekv.v4.requests import LayerStore, Request
from sglang_inplacekv.v4.spans import attend_spans
from sparse_attn import LayerInputs, Segment, Selection, SelectorState, V4Selector
from sparse_attn.attend import State, expand, merge

_NEVER = np.iinfo(np.int64).max


def layer_attention(pool: InplaceV4Pool, layer: int, selector: V4Selector) -> LayerAttention:
    kinds = {CSA_RATIO: SparseAttention, HCA_RATIO: HeavyAttention}
    return kinds.get(pool.layout.geometry.ratios[layer], LayerAttention)(pool, layer, selector)


class LayerAttention:
    """A window alone; what the other kinds of layers attend besides, they add."""

    def __init__(self, pool: InplaceV4Pool, layer: int, selector: V4Selector) -> None:
        self.pool, self.layer, self.selector = pool, layer, selector
        self.scale = selector.config.scale

    def __call__(
        self, h: torch.Tensor, q_resid: torch.Tensor, q: torch.Tensor, kv: torch.Tensor
    ) -> torch.Tensor:
        """As InplaceV4Backend.attend."""
        requests, selector = self.pool.requests, self.selector
        states = [self.pool.states.state(request.row, self.layer) for request in requests]
        inputs, snapshots = [], []
        for request, state in zip(requests, states, strict=True):
            rows, window = request.rows, {WINDOW: kv[request.rows].unsqueeze(1)}
            x = LayerInputs(request.span.prefix, h[rows], q_resid[rows], q[rows], window)
            snapshots.append(selector.observe_marked(state, x, tuple(request.marks)))
            inputs.append(x)
        self.pool.states.write_records(self.layer, snapshots)
        self._observed()
        selections = [selector.select(state, x) for state, x in zip(states, inputs, strict=True)]
        parts = [
            [self._attend_window(request, q[request.rows], segment_of(selection, WINDOW))]
            for request, selection in zip(requests, selections, strict=True)
        ]
        for own, more in zip(parts, self._attend_entries(q, selections), strict=False):
            own += more
        outs = []
        for own, x, selection in zip(parts, inputs, selections, strict=True):
            outs.append(selector.finish([merge(own, selection.sink)[0]], x, selection))
        for request, state in zip(requests, states, strict=True):
            # Of every layer of a long chunk they would add up.
            request.fresh.pop(self.layer, None)
            store_of(state).window = None
        return torch.cat(outs)

    def _observed(self) -> None:
        """The layer's new entries are in the requests' stores."""

    def _attend_window(self, request: Request, q: torch.Tensor, segment: Segment) -> State:
        store = store_of(self.pool.states.state(request.row, self.layer))
        assert store.window is not None and segment.span is not None
        first, last = (bound - store.window_first for bound in segment.span)
        return attend_spans(q, store.window, first, last, self.scale)

    def _attend_entries(self, q: torch.Tensor, selections: Sequence[Selection]) -> list[list[State]]:
        """More parts, by request, over disjoint sets of the layer's entries."""
        return []


class HeavyAttention(LayerAttention):
    """HCA: every entry, all of them on the device."""

    def _attend_entries(self, q: torch.Tensor, selections: Sequence[Selection]) -> list[list[State]]:
        heavy, parts = self.pool.states.heavy, []
        for request, selection in zip(self.pool.requests, selections, strict=True):
            segment = segment_of(selection, ENTRIES)
            assert segment.span is not None
            rows = heavy.read(self.layer, request.pages, request.span.length // HCA_RATIO)
            parts.append([attend_spans(q[request.rows], rows, *segment.span, self.scale)])
        return parts


class SparseAttention(LayerAttention):
    """CSA: the entries listed, on the two sides. A prefill attends all on the device; those of the host cross, each once."""

    def __init__(self, pool: InplaceV4Pool, layer: int, selector: V4Selector) -> None:
        super().__init__(pool, layer, selector)
        self._index = pool.layout.csa_layers.index(layer)

    def _observed(self) -> None:
        self.pool.write_entries(self.layer)

    def _attend_entries(self, q: torch.Tensor, selections: Sequence[Selection]) -> list[list[State]]:
        pool = self.pool
        lists = [expand(segment_of(selection, ENTRIES))[:, 0] for selection in selections]
        # Where an entry lies is known on the host. A decode's own entries have been written; a prefill's may be on their way.
        located = [
            pool.reader.locate(ids, places, _NEVER if pool.is_decode else request.first_entry)
            for ids, places, request in zip(to_host(lists), pool.places, pool.requests, strict=True)
        ]
        job = self._submit(q, located)
        parts = [
            self._attend_device(request, q[request.rows], own)
            for request, own in zip(pool.requests, located, strict=True)
        ]
        if pool.is_decode:
            self._count(located, job)
        if job is not None:
            out, lse = (part.to(q.device) for part in self._wait(job))
            for own, request in zip(parts, pool.requests, strict=True):
                own.append((out[request.rows], lse[request.rows]))
        return parts

    def _submit(self, q: torch.Tensor, located: Sequence[Located]) -> cpu_attn.Job | None:
        if not any((own.computed >= 0).any() for own in located):
            return None
        rows = [own.computed[own.computed >= 0] for own in located]
        return self.pool.reader.submit(self._index, q.cpu().contiguous(), rows, self.scale)

    def _attend_device(self, request: Request, q: torch.Tensor, located: Located) -> list[State]:
        """What lies in D and windows, what has crossed, and what this forward has made."""
        reader, parts = self.pool.reader, []
        if (located.device >= 0).any():
            parts.append(self._attend_rows(q, reader.device_rows(self._index), located.device))
        if (located.fresh >= 0).any():
            parts.append(self._attend_rows(q, request.fresh[self.layer].unsqueeze(1), located.fresh))
        if (located.gathered >= 0).any():
            parts.append(self._attend_rows(q, *reader.gather(self._index, located.gathered)))
        return parts

    def _attend_rows(self, q: torch.Tensor, rows: torch.Tensor, slots: np.ndarray) -> State:
        places = torch.from_numpy(slots).to(q.device)
        return attend_list(q, self.selector.spaces[ENTRIES], rows, places, self.scale)

    def _wait(self, job: cpu_attn.Job) -> State:
        try:
            state = job.wait(self.pool.regions.config.wait_timeout_s)
        except (TimeoutError, RuntimeError, ValueError) as error:
            assert self.pool.plan is not None
            raise RuntimeError(f"{self.pool.plan.who}, layer {self.layer}, region C: {error}") from error
        self.pool.executor.note_costs(Costs(cpu_s=job.seconds))
        return state

    def _count(self, located: Sequence[Located], job: cpu_attn.Job | None) -> None:
        """Of a decode, in which no request lists an entry twice."""
        counts: Counter[str] = Counter()
        for own in located:
            counts["D"] += int((own.device >= 0).sum())
            counts["C"] += int((own.computed >= 0).sum())
            counts["T"] += int((own.gathered >= 0).sum())
        self.pool.attended.update(counts)
        row_bytes = self.pool.regions.shape.token_bytes // self.pool.regions.shape.layers
        crossed = counts["T"] * row_bytes
        self.pool.executor.note_costs(Costs(cpu_tokens=counts["C"], transfer_bytes=crossed))


def store_of(state: SelectorState) -> LayerStore:
    assert isinstance(state.store, LayerStore)
    return state.store


def segment_of(selection: Selection, space: str) -> Segment:
    return next(segment for segment in selection.segments if segment.space == space)


def to_host(lists: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """[queries, K] each, by one copy."""
    if len(lists) == 1 or not lists[0].is_cuda:
        return [ids.cpu().numpy() for ids in lists]
    flat = torch.cat([ids.flatten() for ids in lists]).cpu().numpy()
    ends = np.cumsum([ids.numel() for ids in lists])
    return [part.reshape(ids.shape) for part, ids in zip(np.split(flat, ends[:-1]), lists, strict=True)]
