"""The way home on a GPU: whole pages of a prefill, and full windows.

T pages leave by DMA for their pinned homes. C is pageable: its bytes land in pinned memory and are copied on by a thread.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import torch

from sglang_inplacekv.executors.dma import CopyBatch, to_gpu
from sglang_inplacekv.executors.home_writer import HomeWriter
from sglang_inplacekv.layout import ROLE_COMPUTE, KVShape
from sglang_inplacekv.queues import WorkQueue
from sglang_inplacekv.regions import Regions
from sglang_inplacekv.step_plan import StepPlan
from sglang_inplacekv.tickets import Ticket

_SLOT_BYTES = 16 * 2**20  # of a prefill's bounce buffer: long copies, little memory
_MAX_SLICES = 4  # more stretches of consecutive tokens than this are gathered by index


def _pinned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, pin_memory=True)


def _finish(stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
    event.record(stream)
    event.synchronize()


class _Bounce:
    """Two pinned slots [pages, parts, block], each with the event of its last copy. A queue's thread needs no more."""

    def __init__(self, shape: KVShape) -> None:
        block = shape.block_bytes // shape.dtype.itemsize
        self.pages = max(1, _SLOT_BYTES // (shape.parts * shape.block_bytes))
        self.slots = [_pinned((self.pages, shape.parts, block), shape.dtype) for _ in range(2)]
        self.events = [torch.cuda.Event(blocking=True) for _ in range(2)]


# Pinning takes milliseconds and writers live for one forward, so the slots stay with the queue, whose jobs run one by one.
_BOUNCES: weakref.WeakKeyDictionary[WorkQueue, _Bounce] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class _Stretch:
    """Pages of one role, `places` of the staging tensor, filled from these tokens: a slice, or indices on the GPU."""

    places: slice
    tokens: slice | torch.Tensor


class CudaHomeWriter(HomeWriter):
    """Stages the C pages of a layer first, then its T pages."""

    def __init__(self, regions: Regions, queue: WorkQueue, plan: StepPlan, stream: torch.cuda.Stream) -> None:
        super().__init__(regions, queue, plan)
        self._stream = stream
        if not self._count:
            return
        computed, transferred = self._computed, self._transferred
        self._stretches = [
            *[(True, stretch) for stretch in self._stretches_of(self._first_tokens[computed], 0)],
            *[
                (False, stretch)
                for stretch in self._stretches_of(self._first_tokens[transferred], len(computed))
            ],
        ]
        homes, offsets, sizes = regions.arena.copy_runs(self._pages[transferred])
        start = len(computed) * regions.arena.page_stride
        self._to_transfer = CopyBatch(homes, offsets + np.uint64(start), sizes)
        self._pieces: list[tuple[CopyBatch, list[list[int]]]] = []
        self._done = torch.cuda.Event(blocking=True)
        if len(computed):
            if queue not in _BOUNCES:
                _BOUNCES[queue] = _Bounce(regions.shape)
            self._bounce = _BOUNCES[queue]
            self._pieces = self._cut(self._pages[computed])

    def _stretches_of(self, first_tokens: np.ndarray, place: int) -> list[_Stretch]:
        """Cover pages that begin at `first_tokens` and are staged from `place` on."""
        size = self._regions.sizes.page_size
        cuts = [0, *(np.flatnonzero(np.diff(first_tokens) != size) + 1).tolist(), len(first_tokens)]
        if not len(first_tokens):
            return []
        if len(cuts) - 1 > _MAX_SLICES:
            index = (first_tokens[:, None] + np.arange(size)).reshape(-1)
            return [_Stretch(slice(place, place + len(first_tokens)), to_gpu(index))]
        return [
            _Stretch(
                slice(place + start, place + stop),
                slice(int(first_tokens[start]), int(first_tokens[stop - 1]) + size),
            )
            for start, stop in pairwise(cuts)
        ]

    def _cut(self, pages: np.ndarray) -> list[tuple[CopyBatch, list[list[int]]]]:
        """C pages in pieces that fit a bounce slot: the copy from a staging tensor to a slot, both at 0, and the runs home."""
        pieces, stride = [], self._regions.arena.page_stride
        for start in range(0, len(pages), self._bounce.pages):
            own = pages[start : start + self._bounce.pages]
            copy = [np.array([value], dtype=np.uint64) for value in (0, start * stride, len(own) * stride)]
            pieces.append((CopyBatch(*copy), self._regions.sizes.adjacent_runs(own).tolist()))
        return pieces

    def _pack(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        shape = self._regions.shape
        size, heads, dim = shape.page_size, shape.kv_heads, shape.head_dim
        block = (self._count, shape.parts, size * heads * dim)
        staged = torch.empty(block, dtype=shape.dtype, device=parts[0].device)
        for computed, stretch in self._stretches:
            for part, source in enumerate(parts):
                tokens = source[stretch.tokens].view(-1, size, heads, dim)
                target = staged[stretch.places, part]
                if computed:
                    target.view(-1, heads, size, dim).copy_(tokens.transpose(1, 2))
                else:
                    target.view(-1, size, heads, dim).copy_(tokens)
        return staged

    def _landing(self, layer: int, staged: torch.Tensor) -> Callable[[], None]:
        packed = torch.cuda.Event()
        packed.record()

        def land() -> None:
            # `staged` needs no record_stream: this holds it until the copies have ended.
            torch.cuda.set_device(self._stream.device)
            self._stream.wait_event(packed)
            self._to_transfer.issue(self._stream, staged.data_ptr(), layer * self._regions.arena.layer_stride)
            self._land_computed(layer, staged)
            _finish(self._stream, self._done)

        return land

    def _land_computed(self, layer: int, staged: torch.Tensor) -> None:
        """Copy piece after piece: one crosses to its slot while the team copies the one before on to its homes."""
        for index, (copy, _) in enumerate(self._pieces):
            copy.issue(self._stream, staged.data_ptr(), self._bounce.slots[index % 2].data_ptr())
            self._bounce.events[index % 2].record(self._stream)
            if index:
                self._bring_home(index - 1, layer)
        if self._pieces:
            self._bring_home(len(self._pieces) - 1, layer)

    def _bring_home(self, index: int, layer: int) -> None:
        slot, arena = self._bounce.slots[index % 2], self._regions.arena
        self._bounce.events[index % 2].synchronize()
        pairs = [
            (arena.raw_pages(chunk, layer)[first : first + count], slot[place : place + count])
            for chunk, first, place, count in self._pieces[index][1]
        ]
        self._regions.team.submit_copy(pairs).wait(self._regions.config.wait_timeout_s)


class FlushWriter:
    """Full windows -> homes, all layers of a page at once. One for the life of an executor."""

    def __init__(self, regions: Regions, queue: WorkQueue, stream: torch.cuda.Stream) -> None:
        self._regions, self._queue, self._stream = regions, queue, stream
        shape, device_kv = regions.shape, regions.device_kv
        block = shape.block_bytes // shape.dtype.itemsize
        blocks = np.arange(shape.parts * shape.layers, dtype=np.uint64)  # [layers, parts], flat
        sizes = np.full(len(blocks), shape.block_bytes, dtype=np.uint64)
        layer, part = blocks // shape.parts, blocks % shape.parts
        homes = layer * np.uint64(regions.arena.layer_stride) + part * np.uint64(shape.block_bytes)
        windows = np.uint64(device_kv.data_ptr()) + blocks * np.uint64(device_kv[0, 0].nbytes)
        self._to_transfer = CopyBatch(homes, windows, sizes)
        origin = np.zeros(1, dtype=np.uint64)
        self._to_bounce = CopyBatch(origin, origin, origin + np.uint64(shape.page_bytes))
        # One slot: a job ends with its bytes at home.
        self._bounce = _pinned((shape.layers, shape.parts, block), shape.dtype)
        self._done = torch.cuda.Event(blocking=True)

    def submit(self, page: int) -> Ticket:
        """Queue the copy of `page`'s window behind what the current stream has been given. The window stays as it is."""
        regions = self._regions
        computed, rows = regions.homes.role_of(page) == ROLE_COMPUTE, regions.window_rows(page)
        if computed:
            packed = regions.device_kv[:, :, rows].transpose(2, 3).contiguous()
        ready = torch.cuda.Event()
        ready.record()
        job = partial(self._to_c, page, packed, ready) if computed else partial(self._to_t, page, rows, ready)
        return self._queue.submit(job, f"flush of page {page} to {'C' if computed else 'T'}")

    def _to_t(self, page: int, rows: slice, ready: torch.cuda.Event) -> None:
        torch.cuda.set_device(self._stream.device)
        self._stream.wait_event(ready)
        window = rows.start * (self._regions.shape.block_bytes // self._regions.shape.page_size)
        self._to_transfer.issue(self._stream, window, self._regions.arena.page_bytes_view(page).data_ptr())
        _finish(self._stream, self._done)

    def _to_c(self, page: int, packed: torch.Tensor, ready: torch.cuda.Event) -> None:
        torch.cuda.set_device(self._stream.device)
        self._stream.wait_event(ready)
        self._to_bounce.issue(self._stream, packed.data_ptr(), self._bounce.data_ptr())
        _finish(self._stream, self._done)
        self._regions.arena.page_bytes_view(page).copy_(self._bounce)
