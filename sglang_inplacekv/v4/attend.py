"""Attention of one layer: each request selects, the two sides attend what was selected, and their parts are merged."""

from __future__ import annotations

import numpy as np
import torch

import cpu_attn
from sglang_inplacekv.v4.entries import Located
from sglang_inplacekv.v4.pool import InplaceV4Pool
from sglang_inplacekv.v4.requests import ENTRIES, WINDOW, LayerStore, Request
from sparse_attn import LayerInputs, Segment, Selection, V4Selector
from sparse_attn.attend import State, attend_rows, expand, merge


class LayerAttention:
    def __init__(self, pool: InplaceV4Pool, layer: int, selector: V4Selector) -> None:
        self._pool, self._layer, self._selector = pool, layer, selector
        self._scale, self._spaces = selector.config.scale, selector.spaces
        csa_layers = pool.layout.csa_layers
        self._csa = csa_layers.index(layer) if layer in csa_layers else None

    def __call__(
        self, h: torch.Tensor, q_resid: torch.Tensor, q: torch.Tensor, kv: torch.Tensor
    ) -> torch.Tensor:
        """As InplaceV4Backend.attend."""
        pool, layer, selector = self._pool, self._layer, self._selector
        inputs = [
            LayerInputs(
                request.span.prefix,
                h[request.rows],
                q_resid[request.rows],
                q[request.rows],
                {WINDOW: kv[request.rows, None]},
            )
            for request in pool.requests
        ]
        states = [pool.states.state(request.row, layer) for request in pool.requests]
        for state, x in zip(states, inputs, strict=True):
            selector.observe(state, x)
        if self._csa is not None:
            pool.write_entries(layer)
        selections = [selector.select(state, x) for state, x in zip(states, inputs, strict=True)]
        parts: list[list[State]] = [[] for _ in inputs]
        located = self._locate(selections)
        job = self._submit_host(q, located)
        for index, (request, x, selection) in enumerate(zip(pool.requests, inputs, selections, strict=True)):
            assert x.q is not None
            for segment in selection.segments:
                if segment.space == WINDOW:
                    parts[index].append(self._attend_window(request, x.q, segment))
                elif self._csa is None:
                    parts[index].append(self._attend_kept(request, x.q, segment))
            if located:
                parts[index] += self._attend_entries(request, x.q, located[index])
        if job is not None:
            out, lse = (part.to(q.device) for part in self._wait(job))
            for own, request in zip(parts, pool.requests, strict=True):
                own.append((out[request.rows], lse[request.rows]))
        outs = [
            selector.finish([merge(own, selection.sink)[0]], x, selection)
            for own, x, selection in zip(parts, inputs, selections, strict=True)
        ]
        return torch.cat(outs)

    def _attend_window(self, request: Request, q: torch.Tensor, segment: Segment) -> State:
        store = self._pool.states.state(request.row, self._layer).store
        assert isinstance(store, LayerStore) and store.window is not None
        ids = expand(segment)
        slots = torch.where(ids < 0, -1, ids - store.window_first)
        return attend_rows(q, self._spaces[WINDOW], store.window[:, None], slots, self._scale)

    def _attend_kept(self, request: Request, q: torch.Tensor, segment: Segment) -> State:
        """HCA: entries that the device holds."""
        heavy = self._pool.states.heavy
        slots = heavy.slots(request.pages, expand(segment))
        rows = heavy.layer(self._layer)[:, None]
        return attend_rows(q, self._spaces[ENTRIES], rows, slots, self._scale)

    def _locate(self, selections: list[Selection]) -> list[Located]:
        """Of CSA, one copy of all ids to the host: where an entry lies is known there."""
        if self._csa is None:
            return []
        listed = [
            expand(segment)[:, 0]
            for selection in selections
            for segment in selection.segments
            if segment.space == ENTRIES
        ]
        pool = self._pool
        # Before a decode attends, its own entries have been written; a prefill's may be on their way home.
        return [
            pool.reader.locate(
                ids.cpu().numpy(),
                places,
                np.iinfo(np.int64).max if self._is_decode else request.first_entry,
            )
            for ids, places, request in zip(listed, pool.places, pool.requests, strict=True)
        ]

    @property
    def _is_decode(self) -> bool:
        plan = self._pool.plan
        assert plan is not None
        return plan.is_decode

    def _submit_host(self, q: torch.Tensor, located: list[Located]) -> cpu_attn.Job | None:
        if self._csa is None or not self._is_decode:
            return None
        rows = [own.computed[own.computed >= 0] for own in located]
        if not any(len(own) for own in rows):
            return None
        return self._pool.reader.submit(self._csa, q.cpu().contiguous(), rows, self._scale)

    def _wait(self, job: cpu_attn.Job) -> State:
        plan = self._pool.plan
        assert plan is not None
        try:
            return job.wait(self._pool.regions.config.wait_timeout_s)
        except (TimeoutError, RuntimeError, ValueError) as error:
            raise RuntimeError(f"{plan.who}, layer {self._layer}, region C: {error}") from error

    def _attend_entries(self, request: Request, q: torch.Tensor, located: Located) -> list[State]:
        """CSA: what the device side attends, in D and windows, of what was gathered, and of what this forward has made."""
        assert self._csa is not None
        reader, states = self._pool.reader, []
        for rows, slots in (
            (lambda: reader.device_rows(self._csa), located.device),
            (lambda: request.fresh[self._layer][:, None], located.fresh),
        ):
            if (slots >= 0).any():
                states.append(self._attend_rows(q, rows(), torch.from_numpy(slots).to(q.device)))
        if (located.gathered >= 0).any():
            states.append(self._attend_rows(q, *reader.gather(self._csa, located.gathered)))
        return states

    def _attend_rows(self, q: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> State:
        return attend_rows(q, self._spaces[ENTRIES], rows, slots[:, None], self._scale)
