"""Executor for a CUDA GPU: FlashInfer over P and D, cpu_attn over C, copies on streams of their own.

    stream or queue   carries
    current stream    writes to D and windows, attention over D and P, packing, merging
    copy stream       T (and C of a prefill, through pinned bounce buffers) -> P, one tile ahead across layers
    write queue       prefill K/V -> homes, on its stream; completes write tickets
    flush queue       full windows -> homes, on its stream; completes write tickets

The two queues are host threads that drive a stream each, because what they complete are host-side tickets, and because C is
pageable: its bytes land in a pinned bounce buffer and are copied on by the thread.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch

import cpu_attn
from sglang_inplacekv.executors.base import Executor
from sglang_inplacekv.executors.cuda_tiles import CudaTileStream
from sglang_inplacekv.executors.flashinfer_paged import (
    ChunkAttention,
    Geometry,
    PagedAttention,
    make_workspace,
)
from sglang_inplacekv.executors.home_writer import HomeWriter
from sglang_inplacekv.executors.merge_kernel import merge_into
from sglang_inplacekv.layout import ROLE_COMPUTE
from sglang_inplacekv.page_table import compute_table
from sglang_inplacekv.queues import WorkQueue
from sglang_inplacekv.regions import Regions
from sglang_inplacekv.step_plan import StepPlan
from sglang_inplacekv.tickets import Ticket, wait_all


class CudaHomeWriter(HomeWriter):
    """Staged pages leave by DMA: T pages straight into their pinned homes, C pages by way of a pinned bounce buffer."""

    def __init__(self, regions: Regions, queue: WorkQueue, plan: StepPlan, stream: torch.cuda.Stream) -> None:
        super().__init__(regions, queue, plan, "cuda")
        self._stream = stream
        # Taken now: the queue runs later, when a chunk whose pages were all freed may have dropped its role.
        self._run_computed = [regions.homes.role[chunk] == ROLE_COMPUTE for chunk, _, _, _ in self._runs]

    def _landing(self, layer: int, staged: torch.Tensor) -> Callable[[], None]:
        packed = torch.cuda.Event()
        packed.record()
        staged.record_stream(self._stream)

        def land() -> None:
            arena, bounced = self._regions.arena, []
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(packed)
                for (chunk, slot, place, count), computed in zip(self._runs, self._run_computed, strict=True):
                    home, source = (
                        arena.raw_pages(chunk, layer)[slot : slot + count],
                        staged[place : place + count],
                    )
                    if computed:
                        bounce = torch.empty(home.shape, dtype=home.dtype, pin_memory=True)
                        bounced.append((home, bounce))
                    else:
                        bounce = home
                    bounce.copy_(source, non_blocking=True)
                self._stream.synchronize()
            for home, bounce in bounced:
                home.copy_(bounce)

        return land


@dataclass
class _Forward:
    """A plan in the form that every layer uses. `device` to `chunk` are planned at the first layer, which knows q."""

    plan: StepPlan
    row_ranges: list[range]
    write_tokens: torch.Tensor
    write_slots: torch.Tensor
    homes: HomeWriter
    stream: CudaTileStream
    table: cpu_attn.PageTable | None
    planned: bool = False
    tiles: list[PagedAttention] = field(default_factory=list)


class CudaExecutor(Executor):
    def __init__(self, regions: Regions) -> None:
        config, shape, sizes = regions.config, regions.shape, regions.sizes
        self.regions = regions
        self._timeout_s = config.wait_timeout_s
        self._queues = tuple(
            WorkQueue(name, config.wait_timeout_s, config.jitter_seed) for name in ("write", "flush")
        )
        self._write, self._flush = self._queues
        self._copy_stream, self._write_stream, self._flush_stream = (torch.cuda.Stream() for _ in range(3))
        block = shape.block_bytes // shape.dtype.itemsize
        self._tiles = [
            torch.zeros(sizes.tile_pages, 2, block, dtype=shape.dtype, device="cuda") for _ in range(2)
        ]
        self._bounce = [
            torch.zeros(sizes.tile_pages, 2, block, dtype=shape.dtype, pin_memory=True) for _ in range(2)
        ]
        self._kv = [regions.arena.attention_regions(layer) for layer in range(shape.layers)]
        self._workspace = make_workspace()
        self._device, self._chunk = PagedAttention(self._workspace, "NHD"), ChunkAttention(self._workspace)
        self._tile_attention: dict[str, list[PagedAttention]] = {"NHD": [], "HND": []}
        self._current: _Forward | None = None
        self._finalizer = weakref.finalize(self, _close_queues, self._queues)

    @property
    def _forward(self) -> _Forward:
        if self._current is None:
            raise RuntimeError("no forward has begun")
        return self._current

    def acknowledge(self) -> None:
        self.regions.windows.acknowledge()

    def begin_forward(self, plan: StepPlan) -> None:
        wait_all(plan.pending.values(), self._timeout_s, f"{plan.who}, region C or T,")
        first = np.concatenate(([0], np.cumsum([span.new_tokens for span in plan.spans]))).tolist()
        self._current = _Forward(
            plan,
            [range(start, stop) for start, stop in pairwise(first)],
            torch.from_numpy(plan.device_tokens).cuda(non_blocking=True),
            torch.from_numpy(plan.device_slots).cuda(non_blocking=True),
            CudaHomeWriter(self.regions, self._write, plan, self._write_stream),
            CudaTileStream(self.regions, self._copy_stream, self._tiles, self._bounce, plan),
            compute_table(plan, self.regions.sizes) if plan.is_decode else None,
        )

    def write_layer(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        forward = self._forward
        self.regions.device_k[layer][forward.write_slots] = k[forward.write_tokens]
        self.regions.device_v[layer][forward.write_slots] = v[forward.write_tokens]
        forward.homes.write(layer, k, v, self._timeout_s)

    def decode(self, layer: int, q: torch.Tensor, scale: float) -> torch.Tensor:
        q = q.contiguous()
        self._plan_once(q, scale)
        kv, table = self._kv[layer], self._forward.table
        if kv is None or table is None:
            return _merged(q, self._attend_device_side(layer, q))
        q_host = torch.empty(q.shape, dtype=q.dtype, pin_memory=True)
        q_host.copy_(q, non_blocking=True)
        down = torch.cuda.Event()
        down.record()
        # Queued before the host waits for q, so that the GPU attends while the CPU does.
        parts = self._attend_device_side(layer, q)
        down.synchronize()
        out, lse = (torch.empty(shape, pin_memory=True) for shape in (q.shape, q.shape[:2]))
        job = self.regions.team.submit_paged_decode(q_host, kv, table, scale, out=out, lse=lse)
        try:
            job.wait(self._timeout_s)
        except (TimeoutError, RuntimeError, ValueError) as error:
            raise RuntimeError(f"{self._forward.plan.who}, layer {layer}, region C: {error}") from error
        return _merged(q, [*parts, (out.cuda(non_blocking=True), lse.cuda(non_blocking=True))])

    def extend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        self._plan_once(q, scale)
        q = q.contiguous()
        chunk = self._chunk.run(q, k.contiguous(), v.contiguous())
        return _merged(q, [chunk, *self._attend_device_side(layer, q)])

    def _plan_once(self, q: torch.Tensor, scale: float) -> None:
        forward, shape = self._forward, self.regions.shape
        if forward.planned:
            return
        forward.planned = True
        geometry = Geometry(
            q.shape[1], shape.kv_heads, shape.head_dim, shape.page_size, q.dtype, shape.dtype, scale
        )
        if not forward.plan.is_decode:
            self._chunk.plan(geometry, [len(rows) for rows in forward.row_ranges])
        places, last = self._device_pages(forward.plan)
        self._device.plan(geometry, places, last, forward.row_ranges, len(q))
        used = {"NHD": 0, "HND": 0}
        for tile in forward.stream.tiles:
            layout = "HND" if tile.role == ROLE_COMPUTE else "NHD"
            attention = self._attention_for(layout, used[layout])
            used[layout] += 1
            pages: list[list[int]] = [[] for _ in forward.row_ranges]
            for request, own in tile.readers:
                pages[request] = own.tolist()
            attention.plan(geometry, pages, [shape.page_size] * len(pages), forward.row_ranges, len(q))
            forward.tiles.append(attention)

    def _attention_for(self, layout: str, index: int) -> PagedAttention:
        pool = self._tile_attention[layout]
        if index == len(pool):
            pool.append(PagedAttention(self._workspace, layout))
        return pool[index]

    def _device_pages(self, plan: StepPlan) -> tuple[list[list[int]], list[int]]:
        """Pages of the device tensor each request attends, and the tokens in its last one."""
        size = self.regions.sizes.page_size
        pages = [(reads.device_slots[::size] // size).tolist() for reads in plan.reads]
        last = [(len(reads.device_slots) - 1) % size + 1 for reads in plan.reads]
        return pages, last

    def _attend_device_side(self, layer: int, q: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        forward, shape, size = self._forward, self.regions.shape, self.regions.sizes.page_size
        parts = []
        if not self._device.empty:
            paged = (-1, size, shape.kv_heads, shape.head_dim)
            parts.append(
                self._device.run(
                    q, (self.regions.device_k[layer].view(paged), self.regions.device_v[layer].view(paged))
                )
            )
        for tile, attention in zip(forward.stream.tiles, forward.tiles, strict=True):
            buffer = forward.stream.ready(layer)
            inner = (shape.kv_heads, size) if tile.role == ROLE_COMPUTE else (size, shape.kv_heads)
            parts.append(attention.run(q, buffer.view(-1, 2, *inner, shape.head_dim)))
            forward.stream.read()
        return parts

    def end_forward(self) -> None:
        for page in self._forward.plan.flush_pages:
            ticket = self._submit_flush(page)
            self.regions.homes.set_ticket([page], ticket)
            self.regions.windows.begin_flush(page, ticket)

    def _submit_flush(self, page: int) -> Ticket:
        regions, stream = self.regions, self._flush_stream
        computed = regions.homes.role_of(page) == ROLE_COMPUTE
        window, home = regions.device_kv[:, :, regions.window_rows(page)], regions.arena.page_bytes_view(page)
        packed = (window.transpose(2, 3) if computed else window).flatten(2)
        ready = torch.cuda.Event()
        ready.record()
        packed.record_stream(stream)

        def copy() -> None:
            with torch.cuda.stream(stream):
                stream.wait_event(ready)
                bounce = torch.empty(home.shape, dtype=home.dtype, pin_memory=True) if computed else home
                for layer in range(len(home)):
                    bounce[layer].copy_(packed[layer], non_blocking=True)
                stream.synchronize()
            if computed:
                home.copy_(bounce)

        return self._flush.submit(copy, f"flush of page {page} to {'C' if computed else 'T'}")

    def drain(self) -> None:
        torch.cuda.synchronize()
        for queue in self._queues:
            queue.submit(lambda: None, f"drain of the {queue.name} queue").wait(self._timeout_s, "drain")
        self.acknowledge()

    def close(self) -> None:
        self._finalizer()


def _merged(q: torch.Tensor, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """All parts as one fp32 result; none gives zeros."""
    if not parts:
        return torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    (first, first_lse), rest = parts[0], parts[1:]
    out, lse = first.float().contiguous(), first_lse.contiguous()
    for index in range(0, len(rest), 2):
        merge_into(
            out, lse, *((part.contiguous(), base.contiguous()) for part, base in rest[index : index + 2])
        )
    return out


def _close_queues(queues: tuple[WorkQueue, ...]) -> None:
    for queue in queues:
        queue.close()
