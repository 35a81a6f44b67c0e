"""Executor for a CUDA GPU: FlashInfer over P and D, cpu_attn over C, copies on streams of their own.

    stream or queue   carries
    current stream    writes to D and windows, attention over D and P, packing, merging
    copy stream       T (and C of a prefill, through pinned bounce buffers) -> P, one tile ahead across layers
    write queue       prefill K/V -> homes, on its stream; completes write tickets
    flush queue       full windows -> homes, on its stream; completes write tickets

The queues are host threads that drive a stream each, because what they complete are host-side tickets, and because C is
pageable: its bytes land in a pinned bounce buffer and are copied on by the thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

import cpu_attn
from sglang_inplacekv.executors.base import Executor
from sglang_inplacekv.executors.cuda_homes import CudaHomeWriter, FlushWriter
from sglang_inplacekv.executors.cuda_tiles import CudaTileStream, TransferClocks, TransferTimings
from sglang_inplacekv.executors.device_attention import DeviceAttention, InPlaceAttention
from sglang_inplacekv.executors.dma import to_gpu
from sglang_inplacekv.executors.flashinfer_mla import LatentAttention
from sglang_inplacekv.executors.flashinfer_paged import (
    Captured,
    ChunkAttention,
    Geometry,
    PagedAttention,
    PagedCall,
    make_workspace,
)
from sglang_inplacekv.executors.hand_over import HandOver
from sglang_inplacekv.executors.host_reads import HostReads, HostReadsOfDecodes
from sglang_inplacekv.executors.merge_kernel import State, fold, merge
from sglang_inplacekv.executors.plan_fence import PlanFence
from sglang_inplacekv.executors.prefix_gather import PrefixGather
from sglang_inplacekv.feedback import Costs
from sglang_inplacekv.layout import ROLE_COMPUTE
from sglang_inplacekv.regions import Regions
from sglang_inplacekv.step_plan import StepPlan
from sglang_inplacekv.tickets import Ticket, wait_all


@dataclass
class _Writes:
    """Where an extend's new tokens go."""

    tokens: torch.Tensor | None  # None: every token goes to the device, in order
    slots: torch.Tensor
    homes: CudaHomeWriter


@dataclass
class _Forward:
    """A plan in the form that every layer uses. The attention calls are planned at the first layer, which knows q."""

    plan: StepPlan
    writes: _Writes | None  # of an extend
    host: HostReads
    stream: CudaTileStream
    in_place: bool  # T is read where it lies, not through P
    rows: int  # of q: the plan's tokens, or those of the captured decode that is replayed
    replayed: bool
    planned: bool = False
    padded: bool = False
    answer: tuple[int, cpu_attn.Job] | None = None  # of the CPU, to be collected, and the layer it is for
    gather: PrefixGather | None = None
    tiles: list[PagedCall] = field(default_factory=list)


def _paged_call(
    workspace: torch.Tensor, lora_rank: int | None, layout: str, captured: Captured | None = None
) -> PagedCall:
    if lora_rank is None:
        return PagedAttention(workspace, layout, captured)
    return LatentAttention(workspace, lora_rank, captured)


class CudaExecutor(Executor):
    def __init__(self, regions: Regions) -> None:
        super().__init__(regions, ("copy", "write", "flush"))
        shape, sizes = regions.shape, regions.sizes
        self._copy_stream, self._write_stream, self._flush_stream = (torch.cuda.Stream() for _ in range(3))
        block = shape.block_bytes // shape.dtype.itemsize
        tile = (sizes.tile_pages, shape.parts, block)
        self._tiles = [torch.zeros(tile, dtype=shape.dtype, device="cuda") for _ in range(2)]
        self._bounce = [torch.zeros(tile, dtype=shape.dtype, pin_memory=True) for _ in range(2)]
        self._flusher = FlushWriter(regions, self._queues["flush"], self._flush_stream)
        self._workspace = make_workspace()
        self._paged_call = partial(_paged_call, self._workspace, shape.value_dim)
        self._device = DeviceAttention(regions, partial(self._paged_call, "NHD"))
        self._in_place = InPlaceAttention(regions, self._paged_call("NHD"))
        # An extend over latent rows is SGLang's own affair.
        self._chunk = ChunkAttention(self._workspace) if shape.value_dim is None else None
        self._tile_attention: dict[str, list[PagedCall]] = {"NHD": [], "HND": []}
        self._capturing_rows: int | None = None
        # Of what a graph reads, slots and plans of captured calls, and of all other plans.
        self._graph_fence, self._fence = PlanFence(), PlanFence()
        self._hand: HandOver | None = None
        self._host_reads = HostReadsOfDecodes(regions)
        self._clocks = TransferClocks(shape.layers)
        self.reserve_rows(0)

    def reserve_rows(self, rows: int) -> None:
        # Windows outnumber running requests, so these addresses are good for every decode there will be.
        rows = max(rows, self.regions.sizes.window_pages)
        self._decode_slots = torch.zeros(rows, dtype=torch.int64, device="cuda")
        self._staged_slots = torch.zeros(rows, dtype=torch.int64, pin_memory=True)
        self._hand = None
        self._host_reads.forget()

    def begin_capture(self, rows: int) -> None:
        self._capturing_rows = rows

    def begin_forward(self, plan: StepPlan, graph_rows: int | None = None) -> None:
        self._capturing_rows = None
        self._end_last_answer()
        wait_all(plan.pending.values(), self._timeout_s, f"{plan.who}, region C or T,")
        # The GPU is done with the forward before last, or nearly so, even where that was cut short and never finishes.
        self._clocks.read_all(self._costs, but=1)
        in_place = plan.is_decode and self.regions.config.transfer == "zero-copy"
        rows = graph_rows or plan.tokens
        host = self._host_reads.of(plan, rows, streams=not in_place)
        # Its first copies are under way from here on.
        stream = CudaTileStream(
            self.regions,
            self._copy_stream,
            self._tiles,
            self._bounce,
            host.copies,
            plan.who,
            self._queues["copy"],
        )
        self._current = _Forward(
            plan,
            None if plan.is_decode else self._writes_of(plan),
            host,
            stream,
            in_place and any(len(reads.transfer_pages) for reads in plan.reads),
            rows=rows,
            replayed=graph_rows is not None,
        )
        self._clocks.add(stream, plan)
        if plan.is_decode:
            with self._graph_fence:
                self._send_slots(plan.device_slots)
                if graph_rows is not None:
                    self._device.plan_replay(plan, host.row_counts, graph_rows)

    def _send_slots(self, slots: np.ndarray) -> None:
        """Put them where graphs read them. Rows that only fill up a captured batch write to page 0, the padding."""
        staged = self._staged_slots.numpy()
        staged[: len(slots)] = slots
        staged[len(slots) :] = 0
        self._decode_slots.copy_(self._staged_slots, non_blocking=True)

    def _writes_of(self, plan: StepPlan) -> _Writes:
        everything = len(plan.device_tokens) == plan.tokens
        return _Writes(
            None if everything else to_gpu(plan.device_tokens),
            to_gpu(plan.device_slots),
            CudaHomeWriter(self.regions, self._queues["write"], plan, self._write_stream),
        )

    def take_costs(self) -> Costs:
        self._clocks.read_finished(self._costs)
        return super().take_costs()

    def take_transfers(self) -> dict[str, TransferTimings]:
        """What has crossed to P in the decodes and extends since this was last asked. Waits for the GPU."""
        torch.cuda.synchronize()
        self._clocks.read_all(self._costs)
        return self._clocks.take()

    def write_decoded(self, layer: int, *parts: torch.Tensor) -> None:
        for target, source in zip(self.regions.device_kv[layer], parts, strict=True):
            target.index_copy_(0, self._decode_slots[: len(source)], source)

    def write_layer(self, layer: int, *parts: torch.Tensor) -> None:
        writes = self._forward.writes
        if writes is None:
            self.write_decoded(layer, *parts)
            return
        if len(writes.slots):
            tokens = writes.tokens
            for target, source in zip(self.regions.device_kv[layer], parts, strict=True):
                target.index_copy_(0, writes.slots, source if tokens is None else source[tokens])
        writes.homes.write(layer, parts, self._timeout_s)

    def decode_device(self, layer: int, q: torch.Tensor, scale: float) -> State:
        if self._capturing_rows is not None:
            return self._device.run_captured(layer, q, self._geometry_of(q, scale), len(self._decode_slots))
        self._plan_once(q, scale)
        return self._device.run(layer, q)

    def decode_host(self, layer: int, q: torch.Tensor, scale: float) -> None:
        forward, hand = self._forward, self._hand_over(q)
        self._plan_once(q, scale)
        rows, table, signal = forward.plan.tokens, forward.host.table, None
        q = q[:rows]
        # Asked once: it takes torch longer than what is then queued there takes.
        current = torch.cuda.current_stream()
        if table is not None:
            sent = hand.send(q, current)
            if layer == 0:
                # The team is idle, so it starts first. Later it is still at the layer before, and the GPU's work comes first.
                signal = self._compute(layer, hand, sent, table, scale)
        if forward.in_place:
            self._in_place.run(layer, q, hand.transferred(rows))
        elif forward.tiles:
            self._attend_tiles(layer, q, hand.transferred(rows), current)
        if forward.tiles:
            forward.stream.read(current)
        if table is not None:
            hand.queue_wait(signal or self._compute(layer, hand, sent, table, scale), current)
            if layer == self.regions.shape.layers - 1:
                self._collect_answer()

    def _compute(
        self, layer: int, hand: HandOver, q: torch.Tensor, table: cpu_attn.PageTable, scale: float
    ) -> cpu_attn.Signal:
        """Let the CPU attend its part of this layer to q, which is on its way there.

        The host returns before the CPU has answered, and queues the next layer meanwhile. That layer's q comes after the
        answer, so there the answer is collected first; the last layer's is collected at once.
        """
        forward = self._forward
        if layer:
            # q of layer - 1 has come, so the GPU is past layer - 2.
            forward.stream.read_clocks(layer - 1)
        self._collect_answer()
        hand.await_q()
        if not forward.padded:
            hand.clear_padding(forward.rows, forward.plan.tokens)
            forward.padded = True
        host = forward.host
        if host.arguments is None:
            into = [part[: len(q)] for part in hand.to_compute(forward.rows)]
            host.arguments = self._computed_arguments(layer, q, table, scale, *into)
        arguments = replace(host.arguments, kv=self._computed_kv(layer), scale=scale)
        signal = hand.next_answer()
        forward.answer = layer, self.regions.team.submit_arguments(arguments, signal)
        return signal

    def _collect_answer(self) -> None:
        forward = self._forward
        if forward.answer is not None:
            (layer, job), forward.answer = forward.answer, None
            try:
                self._collect(job, layer)
            except BaseException:  # an interrupt too
                assert self._hand is not None
                self._hand.give_up()
                raise

    def _end_last_answer(self) -> None:
        """Of a forward that was cut short: this one's answers come to the same memory."""
        if self._current is not None and self._current.answer is not None:
            _, job = self._current.answer
            with suppress(RuntimeError, ValueError):  # a job that failed has ended too
                job.wait(self._timeout_s)

    def _attend_tiles(self, layer: int, q: torch.Tensor, into: State, current: torch.cuda.Stream) -> None:
        """Attend every P tile of this layer; the last one's buffer is still to be given back."""
        if len(self._forward.tiles) == 1:
            self._forward.tiles[0].run(q, self._next_tile(layer, 0, current), into)
            return
        parts: list[State] = []
        for index, attention in enumerate(self._forward.tiles):
            if index:
                self._forward.stream.read(current)
            parts = fold([*parts, attention.run(q, self._next_tile(layer, index, current))])
        merge(into[0], parts, into[1])

    def decode_merge(self, state: State, out: torch.Tensor) -> None:
        hand, rows = self._hand_over(out), len(out)
        merge(out, [state, hand.transferred(rows), hand.computed(rows)])

    def _hand_over(self, q: torch.Tensor) -> HandOver:
        if self._hand is None:
            shape = self.regions.shape
            self._hand = HandOver(
                len(self._decode_slots), q.shape[1], (shape.head_dim, shape.out_dim), q.dtype
            )
        return self._hand

    def extend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        q = q.contiguous()
        self._plan_once(q, scale)
        assert self._chunk is not None
        parts = [self._chunk.run(q, k.contiguous(), v.contiguous())]
        if not self._device.empty:
            parts.append(self._device.run(layer, q))
        current = torch.cuda.current_stream()
        for index, attention in enumerate(self._forward.tiles):
            parts = fold([*parts, attention.run(q, self._next_tile(layer, index, current))])
            self._forward.stream.read(current)
        merge(out, parts)

    def read_prefix(self, layer: int) -> torch.Tensor:
        """The latent rows of all planned prefixes, [tokens, lora_rank + rope], request after request, in any order within one.

        Once a layer: the tiles of a layer cross once.
        """
        forward, shape = self._forward, self.regions.shape
        if forward.gather is None:
            forward.gather = PrefixGather(forward.plan, forward.stream.tiles, shape.page_size, to_gpu)
        rows = torch.empty(forward.gather.tokens, shape.head_dim, dtype=shape.dtype, device="cuda")
        forward.gather.from_device(rows, self.regions.device_kv[layer, 0, :, 0])
        current = torch.cuda.current_stream()
        for index in range(len(forward.stream.tiles)):
            forward.gather.from_tile(rows, index, self._next_tile(layer, index, current))
            forward.stream.read(current)
        return rows

    def _plan_once(self, q: torch.Tensor, scale: float) -> None:
        forward = self._forward
        if forward.planned:
            return
        forward.planned = True
        with self._fence:
            self._plan_calls(q, scale)

    def _plan_calls(self, q: torch.Tensor, scale: float) -> None:
        forward, geometry = self._forward, self._geometry_of(q, scale)
        if not forward.plan.is_decode and self._chunk is not None:
            self._chunk.plan(geometry, forward.host.row_counts.tolist())
        if not forward.replayed:
            self._device.plan(geometry, forward.plan, forward.host.row_counts)
        if forward.in_place:
            self._in_place.plan(geometry, forward.plan, forward.host.row_counts)
        if forward.plan.is_decode:
            self._hand_over(q).begin(
                forward.rows,
                computed=forward.host.table is not None,
                transferred=forward.in_place or bool(forward.stream.tiles),
            )
        used = {"NHD": 0, "HND": 0}
        for tile, lists in zip(forward.stream.tiles, forward.host.lists, strict=True):
            layout = "HND" if tile.role == ROLE_COMPUTE else "NHD"
            attention = self._attention_for(layout, used[layout])
            used[layout] += 1
            attention.plan(geometry, lists)
            forward.tiles.append(attention)

    def _geometry_of(self, q: torch.Tensor, scale: float) -> Geometry:
        shape = self.regions.shape
        return Geometry(
            q.shape[1], shape.kv_heads, shape.head_dim, shape.page_size, q.dtype, shape.dtype, scale
        )

    def _attention_for(self, layout: str, index: int) -> PagedCall:
        pool = self._tile_attention[layout]
        if index == len(pool):
            pool.append(self._paged_call(layout))
        return pool[index]

    def _next_tile(self, layer: int, index: int, current: torch.cuda.Stream) -> torch.Tensor:
        """Tile `index` of this layer as FlashInfer takes it, valid for what the current stream does from now on."""
        shape, size = self.regions.shape, self.regions.sizes.page_size
        computed = self._forward.stream.tiles[index].role == ROLE_COMPUTE
        buffer = self._forward.stream.ready(layer, current)
        if shape.value_dim is not None:
            return buffer.view(-1, size, shape.head_dim)
        inner = (shape.kv_heads, size) if computed else (size, shape.kv_heads)
        return buffer.view(-1, shape.parts, *inner, shape.head_dim)

    def submit_write(self, copy: Callable[[], None], what: str, after: Sequence[Ticket] = ()) -> Ticket:
        ready = torch.cuda.Event()
        ready.record()

        def run() -> None:
            torch.cuda.set_device(self._write_stream.device)
            with torch.cuda.stream(self._write_stream):
                self._write_stream.wait_event(ready)
                copy()

        return super().submit_write(run, what, after)

    def _submit_flush(self, page: int) -> Ticket:
        return self._flusher.submit(page)

    def drain(self) -> None:
        torch.cuda.synchronize()
        super().drain()
