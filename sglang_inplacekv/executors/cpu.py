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

import weakref
from collections import deque

import numpy as np
import torch

import cpu_attn
from sglang_inplacekv.attention import partial_attention
from sglang_inplacekv.executors.base import Executor
from sglang_inplacekv.executors.tile_stream import Tile, TileStream, adjacent_runs
from sglang_inplacekv.layout import ROLE_COMPUTE, STAGING_LAYERS
from sglang_inplacekv.merge import empty_state, merge_states
from sglang_inplacekv.queues import WorkQueue
from sglang_inplacekv.regions import Regions
from sglang_inplacekv.step_plan import StepPlan
from sglang_inplacekv.tickets import Ticket, wait_all


class _State:
    """Partial states of one layer, merged row by row as its parts arrive on the compute queue."""

    def __init__(self, rows: int, heads: int, head_dim: int) -> None:
        self.out, self.lse = empty_state(rows, heads, head_dim)

    def merge(self, rows: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        self.out[rows], self.lse[rows] = merge_states(self.out[rows], self.lse[rows], out, lse)


class CpuExecutor(Executor):
    def __init__(self, regions: Regions) -> None:
        config = regions.config
        self.regions = regions
        self._timeout_s, self._poison = config.wait_timeout_s, config.poison
        self._copy, self._write, self._flush, self._compute = (
            WorkQueue(name, config.wait_timeout_s, config.jitter_seed) for name in ("copy", "write", "flush", "compute")
        )
        shape = regions.shape
        block = shape.block_bytes // shape.dtype.itemsize
        fill = torch.nan if config.poison else 0.0
        self._tiles = [torch.full((regions.sizes.tile_pages, 2, block), fill, dtype=shape.dtype) for _ in range(2)]
        self._kv = [regions.arena.attention_regions(layer) for layer in range(shape.layers)]
        self._plan: StepPlan | None = None
        # Threads would otherwise outlive a server that was shut down inside a living process.
        self._finalizer = weakref.finalize(self, _close_queues, self._copy, self._write, self._flush, self._compute)

    def acknowledge(self) -> None:
        self.regions.windows.acknowledge()

    def begin_forward(self, plan: StepPlan) -> None:
        self._plan = plan
        self._slots = [torch.from_numpy(reads.device_slots) for reads in plan.reads]
        self._device_tokens = torch.from_numpy(plan.device_tokens)
        self._device_slots = torch.from_numpy(plan.device_slots)
        self._labels = ", ".join(span.label for span in plan.spans)
        self._begin_home_writes(plan)
        self._stream = TileStream(self.regions, self._copy, self._tiles, plan)
        self._table = self._compute_table(plan) if plan.is_decode else None

    def _begin_home_writes(self, plan: StepPlan) -> None:
        shape = self.regions.shape
        self._staged: deque[Ticket] = deque()
        self._home_pages = np.array([write.page for write in plan.home_writes], dtype=np.int64)
        first = np.array([write.first_token for write in plan.home_writes], dtype=np.int64)
        self._home_tokens = torch.from_numpy((first[:, None] + np.arange(shape.page_size)).reshape(-1))
        roles = [self.regions.homes.role_of(page) for page in self._home_pages.tolist()]
        self._home_computed = torch.tensor(roles, dtype=torch.int64) == ROLE_COMPUTE
        self._home_runs = adjacent_runs(self._home_pages, self.regions.sizes)
        self._home_ticket = Ticket(f"prefill write of {len(roles)} host pages (requests {self._labels})")
        self.regions.homes.set_ticket(self._home_pages.tolist(), self._home_ticket)

    def _compute_table(self, plan: StepPlan) -> cpu_attn.PageTable | None:
        pages = [reads.compute_pages for reads in plan.reads]
        counts = np.array([len(p) for p in pages])
        if not counts.any():
            return None
        sizes = self.regions.sizes
        offset = np.concatenate(pages) - sizes.first_host_page
        waiting = [plan.pending[p] for p in np.concatenate(pages).tolist() if p in plan.pending]
        wait_all(waiting, self._timeout_s, f"CPU attention of requests {self._labels}, region C,")
        return cpu_attn.PageTable(
            torch.from_numpy((2 * (offset // sizes.chunk_pages) + ROLE_COMPUTE).astype(np.int32)),
            torch.from_numpy((offset % sizes.chunk_pages).astype(np.int32)),
            torch.from_numpy(np.concatenate(([0], counts.cumsum())).astype(np.int32)),
            torch.from_numpy((counts * sizes.page_size).astype(np.int32)),
        )

    def write_layer(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self.regions.device_k[layer][self._device_slots] = k[self._device_tokens]
        self.regions.device_v[layer][self._device_slots] = v[self._device_tokens]
        if len(self._home_pages):
            self._stage_homes(layer, k, v)

    def _stage_homes(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Pack this layer's whole pages in their homes' layout and queue the copy; at most STAGING_LAYERS are in flight."""
        if len(self._staged) == STAGING_LAYERS:
            self._staged.popleft().wait(self._timeout_s, f"prefill of requests {self._labels}, layer {layer}, staging")
        shape = self.regions.shape
        pages = len(self._home_pages)
        staged = torch.empty(pages, 2, shape.block_bytes // shape.dtype.itemsize, dtype=shape.dtype)
        for part, source in enumerate((k, v)):
            tokens = source[self._home_tokens].view(pages, shape.page_size, shape.kv_heads, shape.head_dim)
            head_major = tokens[self._home_computed].transpose(1, 2)
            staged[self._home_computed, part] = head_major.flatten(1)
            staged[~self._home_computed, part] = tokens[~self._home_computed].flatten(1)
        arena, runs, ticket = self.regions.arena, self._home_runs, self._home_ticket
        last = layer == shape.layers - 1

        def copy() -> None:
            try:
                for chunk, slot, place, count in runs:
                    arena.raw_pages(chunk, layer)[slot : slot + count].copy_(staged[place : place + count])
            except BaseException as error:
                ticket.fail(error)
                raise
            if last:
                ticket.complete()

        self._staged.append(self._write.submit(copy, f"prefill write, layer {layer}"))

    def decode(self, layer: int, q: torch.Tensor, scale: float) -> torch.Tensor:
        job = None
        if self._table is not None:
            job = self.regions.team.submit_paged_decode(q, self._kv[layer], self._table, scale)
        state = _State(*q.shape)
        self._attend_device_side(state, layer, q, scale)
        if job is not None:
            state.merge(slice(None), *job.wait(self._timeout_s))
        return state.out

    def extend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        state = _State(*q.shape)
        plan = self._plan

        def attend_chunk() -> None:
            for request in range(len(plan.spans)):
                rows = plan.token_range(request)
                state.merge(rows, *partial_attention(q[rows], k[rows], v[rows], scale, causal=True))

        chunk = self._compute.submit(attend_chunk, f"attention over the chunk, layer {layer}")
        self._attend_device_side(state, layer, q, scale)
        chunk.wait(self._timeout_s, f"requests {self._labels}, layer {layer}, region P (chunk),")
        return state.out

    def _attend_device_side(self, state: _State, layer: int, q: torch.Tensor, scale: float) -> None:
        """Attend D (homes and windows) and every P tile of this layer into `state`; returns when all are merged."""
        device = self._compute.submit(
            lambda: self._attend_device(state, layer, q, scale), f"attention over D, layer {layer}"
        )
        parts = [(device, "D")]
        for tile in self._stream.tiles:
            buffer, copied = self._stream.ready()
            reader = self._compute.submit(
                lambda tile=tile, buffer=buffer: self._attend_tile(state, tile, buffer, q, scale),
                f"attention over P, layer {layer}",
                after=(copied,),
            )
            self._stream.read_by(reader)
            parts.append((reader, "P"))
        for ticket, region in parts:
            ticket.wait(self._timeout_s, f"requests {self._labels}, layer {layer}, region {region},")

    def _attend_device(self, state: _State, layer: int, q: torch.Tensor, scale: float) -> None:
        for request, slots in enumerate(self._slots):
            if len(slots):
                rows = self._plan.token_range(request)
                k, v = self.regions.device_k[layer][slots], self.regions.device_v[layer][slots]
                state.merge(rows, *partial_attention(q[rows], k, v, scale))

    def _attend_tile(self, state: _State, tile: Tile, buffer: torch.Tensor, q: torch.Tensor, scale: float) -> None:
        shape = self.regions.shape
        if tile.role == ROLE_COMPUTE:
            pages = buffer.view(-1, 2, shape.kv_heads, shape.page_size, shape.head_dim).transpose(2, 3)
        else:
            pages = buffer.view(-1, 2, shape.page_size, shape.kv_heads, shape.head_dim)
        for request, places in tile.readers:
            rows = self._plan.token_range(request)
            k, v = (pages[places, part].flatten(0, 1) for part in (0, 1))
            state.merge(rows, *partial_attention(q[rows], k, v, scale))
        if self._poison:
            buffer.fill_(torch.nan)

    def end_forward(self) -> None:
        for page in self._plan.flush_pages:
            ticket = self._submit_flush(page)
            self.regions.homes.set_ticket([page], ticket)
            self.regions.windows.begin_flush(page, ticket)

    def _submit_flush(self, page: int) -> Ticket:
        regions, size = self.regions, self.regions.sizes.page_size
        place = regions.sizes.first_host_page + regions.windows.window_of(page)
        computed = regions.homes.role_of(page) == ROLE_COMPUTE
        home = regions.arena.page_bytes_view(page)
        rows = slice(place * size, (place + 1) * size)

        def copy() -> None:
            for layer in range(regions.shape.layers):
                for part, source in enumerate((regions.device_k[layer][rows], regions.device_v[layer][rows])):
                    packed = source.transpose(0, 1) if computed else source
                    home[layer, part].copy_(packed.reshape(-1))

        return self._flush.submit(copy, f"flush of page {page} to {'C' if computed else 'T'}")

    def drain(self) -> None:
        for queue in (self._copy, self._write, self._flush, self._compute):
            queue.submit(lambda: None, f"drain of the {queue.name} queue").wait(self._timeout_s, "drain")
        self.acknowledge()

    def close(self) -> None:
        self._finalizer()


def _close_queues(*queues: WorkQueue) -> None:
    for queue in queues:
        queue.close()
