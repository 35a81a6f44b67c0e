"""Executor for hosts without a GPU: torch plays the GPU's part, threads play its streams.

It is no special case of the protocol. T really crosses into P tiles, C is really attended in place by cpu_attn, prefill
and flushes really are asynchronous; only the arithmetic of the device side is torch on the CPU.

    queue     plays                        orders
    copy      host-to-device stream        T (and C of a prefill) -> P
    write     device-to-host stream        prefill K/V -> homes
    flush     flush stream                 full windows -> homes
    compute   compute stream               attention over D and P
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

import cpu_attn
from sglang_inplacekv.attention import partial_attention
from sglang_inplacekv.executors.base import Executor
from sglang_inplacekv.executors.home_writer import CpuHomeWriter, HomeWriter
from sglang_inplacekv.executors.tile_stream import Tile, TileStream
from sglang_inplacekv.layout import ROLE_COMPUTE
from sglang_inplacekv.page_table import compute_table
from sglang_inplacekv.regions import Regions
from sglang_inplacekv.step_plan import StepPlan
from sglang_inplacekv.tickets import Ticket, wait_all
from sparse_attn.attend import empty_state, merge


class _State:
    """Partial states of one layer, merged row by row as its parts arrive on the compute queue."""

    def __init__(self, rows: int, heads: int, out_dim: int) -> None:
        self.out, self.lse = empty_state(rows, heads, out_dim)

    def merge(self, rows: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        self.out[rows], self.lse[rows] = merge([(self.out[rows], self.lse[rows]), (out, lse)])


@dataclass(frozen=True)
class _Forward:
    """A plan in the form that every layer uses."""

    plan: StepPlan
    rows: list[slice]  # new tokens of each request
    read_slots: list[torch.Tensor]  # device slots attended, by request
    write_tokens: torch.Tensor
    write_slots: torch.Tensor
    homes: HomeWriter
    stream: TileStream
    table: cpu_attn.PageTable | None  # the CPU's pages of a decode


class CpuExecutor(Executor):
    def __init__(self, regions: Regions) -> None:
        super().__init__(regions, ("copy", "write", "flush", "compute"))
        self._copy, self._write, self._flush, self._compute = self._queues.values()
        shape, self._poison = regions.shape, regions.config.poison
        block = shape.block_bytes // shape.dtype.itemsize
        fill = torch.nan if self._poison else 0.0
        self._tiles = [
            torch.full((regions.sizes.tile_pages, shape.parts, block), fill, dtype=shape.dtype)
            for _ in range(2)
        ]

    def begin_forward(self, plan: StepPlan, graph_rows: int | None = None) -> None:
        page_size, shape = self.regions.sizes.page_size, self.regions.shape
        stream = TileStream(
            self.regions, self._copy, self._tiles, plan, self._note_copy if plan.is_decode else None
        )
        if plan.is_decode:
            self._costs.transfer_tokens += plan.transfer_tokens * shape.layers
            self._costs.transfer_bytes += sum(len(tile.pages) for tile in stream.tiles) * shape.page_bytes
        self._current = _Forward(
            plan,
            [plan.token_range(request) for request in range(len(plan.spans))],
            [torch.from_numpy(reads.device_slots(page_size)) for reads in plan.reads],
            torch.from_numpy(plan.device_tokens),
            torch.from_numpy(plan.device_slots),
            CpuHomeWriter(self.regions, self._write, plan),
            stream,
            self._compute_table(plan) if plan.is_decode else None,
        )

    def _note_copy(self, seconds: float) -> None:
        self._costs.transfer_s += seconds

    def _note_exposed(self, seconds: float) -> None:
        self._costs.exposed_s += seconds

    def _compute_table(self, plan: StepPlan) -> cpu_attn.PageTable | None:
        """The CPU's pages of a decode, after those that are still being written."""
        pages = np.concatenate([reads.cpu_pages for reads in plan.reads]).tolist()
        waiting = [plan.pending[page] for page in pages if page in plan.pending]
        wait_all(waiting, self._timeout_s, f"{plan.who}, region C,")
        return compute_table(plan, self.regions.sizes)

    def write_layer(self, layer: int, *parts: torch.Tensor) -> None:
        forward = self._forward
        for target, source in zip(self.regions.device_kv[layer], parts, strict=True):
            target[forward.write_slots] = source[forward.write_tokens]
        forward.homes.write(layer, parts, self._timeout_s)

    def decode_device(self, layer: int, q: torch.Tensor, scale: float) -> _State:
        """Queue the parts over D and P; they go on while decode_host attends C."""
        self._state = _State(len(q), q.shape[1], self.regions.shape.out_dim)
        self._parts = self._attend_device_side(self._state, layer, q, scale)
        return self._state

    def decode_host(self, layer: int, q: torch.Tensor, scale: float) -> None:
        table, job = self._forward.table, None
        if table is not None:
            job = self.regions.team.submit_arguments(self._computed_arguments(layer, q, table, scale))
        self._wait(self._parts, layer)
        if job is not None:
            self._state.merge(slice(None), *self._collect(job, layer))

    def decode_merge(self, state: _State, out: torch.Tensor) -> None:
        out.copy_(state.out)

    def extend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        state, rows = _State(len(q), q.shape[1], self.regions.shape.out_dim), self._forward.rows

        def attend_chunk() -> None:
            for own in rows:
                state.merge(own, *partial_attention(q[own], k[own], v[own], scale, causal=True))

        chunk = self._compute.submit(attend_chunk, f"attention over the chunk, layer {layer}")
        self._wait([chunk, *self._attend_device_side(state, layer, q, scale)], layer)
        out.copy_(state.out)

    def _wait(self, parts: list[Ticket], layer: int) -> None:
        for part in parts:
            part.wait(self._timeout_s, f"{self._forward.plan.who}, layer {layer},")

    def _attend_device_side(self, state: _State, layer: int, q: torch.Tensor, scale: float) -> list[Ticket]:
        """Queue attention over D (homes and windows) and over every P tile of this layer, merging into `state`."""
        stream = self._forward.stream
        note_wait = self._note_exposed if self._forward.plan.is_decode else None
        device = partial(self._attend_device, self._forward, state, layer, q, scale)
        parts = [self._compute.submit(device, f"attention over region D, layer {layer}")]
        for tile in stream.tiles:
            buffer, copied = stream.ready(layer)
            attend = partial(self._attend_tile, self._forward, state, tile, buffer, q, scale)
            parts.append(
                self._compute.submit(attend, f"attention over region P, layer {layer}", (copied,), note_wait)
            )
            stream.read_by(parts[-1])
        return parts

    def _attend_device(
        self, forward: _Forward, state: _State, layer: int, q: torch.Tensor, scale: float
    ) -> None:
        for rows, slots in zip(forward.rows, forward.read_slots, strict=True):
            if len(slots):
                k, v = self.regions.device_k[layer][slots], self.regions.device_v[layer][slots]
                state.merge(rows, *partial_attention(q[rows], k, v, scale))

    def _attend_tile(
        self,
        forward: _Forward,
        state: _State,
        tile: Tile,
        buffer: torch.Tensor,
        q: torch.Tensor,
        scale: float,
    ) -> None:
        shape = self.regions.shape
        if tile.role == ROLE_COMPUTE:
            inner = (shape.kv_heads, shape.page_size)
            pages = buffer.view(-1, shape.parts, *inner, shape.head_dim).transpose(2, 3)
        else:
            pages = buffer.view(-1, shape.parts, shape.page_size, shape.kv_heads, shape.head_dim)
        for request, places in tile.readers:
            rows = forward.rows[request]
            k, v = (pages[places, part].flatten(0, 1) for part in (0, -1))
            state.merge(rows, *partial_attention(q[rows], k, v[..., : shape.out_dim], scale))
        if self._poison:
            buffer.fill_(torch.nan)

    def _submit_flush(self, page: int) -> Ticket:
        regions = self.regions
        rows = regions.window_rows(page)
        computed = regions.homes.role_of(page) == ROLE_COMPUTE
        home = regions.arena.page_bytes_view(page)

        def copy() -> None:
            window = regions.device_kv[:, :, rows]
            home.copy_((window.transpose(2, 3) if computed else window).flatten(2))

        return self._flush.submit(copy, f"flush of page {page} to {'C' if computed else 'T'}")
