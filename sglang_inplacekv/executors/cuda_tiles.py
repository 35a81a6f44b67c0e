"""The P tiles on a GPU: the same stream of tiles as tile_stream.TileStream, ordered by events instead of tickets."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from sglang_inplacekv.arena import HostArena
from sglang_inplacekv.executors.dma import CopyBatch
from sglang_inplacekv.executors.tile_stream import Tile
from sglang_inplacekv.feedback import Costs
from sglang_inplacekv.layout import ROLE_COMPUTE
from sglang_inplacekv.queues import WorkQueue
from sglang_inplacekv.regions import Regions
from sglang_inplacekv.step_plan import StepPlan
from sglang_inplacekv.tickets import Ticket


@dataclass(frozen=True)
class TransferTimings:
    """What the tiles of one forward cost. transfer_s without exposed_s was hidden behind other work of the GPU."""

    bytes: int
    transfer_s: float  # all copies, each from its own start
    exposed_s: float  # what the attention stream stood still for them

    def plus(self, other: TransferTimings) -> TransferTimings:
        return TransferTimings(
            self.bytes + other.bytes, self.transfer_s + other.transfer_s, self.exposed_s + other.exposed_s
        )


class EventPool:
    """Events with clocks, for the scheduler's thread: making one costs more than recording it."""

    def __init__(self) -> None:
        self._free: list[torch.cuda.Event] = []

    def take(self) -> torch.cuda.Event:
        # Blocking: a thread that waits for a copy leaves its core to the attention team.
        return self._free.pop() if self._free else torch.cuda.Event(enable_timing=True, blocking=True)

    def give_back(self, events: list[torch.cuda.Event]) -> None:
        self._free += events
        events.clear()


_EVENTS = EventPool()


class TileCopies:
    """The tiles of a layer and the copies that bring each, the same in every layer and for every plan that streams the same."""

    def __init__(self, regions: Regions, tiles: Sequence[Tile]) -> None:
        self.tiles = list(tiles)
        # Of layer 0 into a buffer at address 0; of a C tile from a bounce buffer at address 0.
        self.batches = [_batch(regions.arena, tile) for tile in tiles]
        self.runs = [
            regions.sizes.adjacent_runs(tile.pages).tolist() if tile.role == ROLE_COMPUTE else []
            for tile in tiles
        ]
        # Whether any must be brought by a thread, since its pages are pageable.
        self.queued = any(tile.role == ROLE_COMPUTE for tile in tiles)


def _batch(arena: HostArena, tile: Tile) -> CopyBatch:
    homes, places, sizes = arena.copy_runs(tile.pages)
    if tile.role == ROLE_COMPUTE:
        origin = np.zeros(1, dtype=np.uint64)
        return CopyBatch(origin, origin, sizes.sum(keepdims=True))
    return CopyBatch(places, homes, sizes)


class CudaTileStream:
    """`ready` makes the current stream wait for the next tile and returns it; `read` hands its buffer to the copy after next.

    T pages cross straight from their pinned homes, one batch of copies a tile, issued by the caller. C pages (of a prefill)
    are pageable: the CPU team copies them into a pinned bounce buffer first. A stream that has any is issued by the thread of
    `queue`, all of it so that the order holds, and the caller waits until a tile's copy has been issued, never for the copy.

    Not `timed` saves two event records a tile and layer, the other two being what orders copies and attention. `timings` is
    due after the forward either way.
    """

    def __init__(
        self,
        regions: Regions,
        stream: torch.cuda.Stream,
        buffers: Sequence[torch.Tensor],
        bounce: Sequence[torch.Tensor],
        copies: TileCopies,
        who: str,
        queue: WorkQueue,
        timed: bool = True,
    ) -> None:
        """who: the requests, for messages."""
        self._regions, self._stream, self._buffers, self._bounce = regions, stream, buffers, bounce
        self._queue, self._timed, self._who = queue, timed, who
        self._copies, self.tiles = copies, copies.tiles
        self._total = len(self.tiles) * regions.shape.layers
        self._issued: list[Ticket] = []  # of queued streams: the copy is on the stream, its event recorded
        self._taken: list[torch.cuda.Event] = []
        self._begun: list[torch.cuda.Event] = []
        self._copied: list[torch.cuda.Event] = []
        self._wanted: list[torch.cuda.Event] = []  # the attention stream comes to the tile
        self._clocks_read, self._transfer_ms, self._exposed_ms = 0, 0.0, 0.0
        self._next = 0
        if self._total:
            begun = self._event()
            begun.record()
            for _ in buffers:
                self._submit(begun)

    def _event(self) -> torch.cuda.Event:
        self._taken.append(_EVENTS.take())
        return self._taken[-1]

    def ready(self, layer: int, current: torch.cuda.Stream) -> torch.Tensor:
        """The next tile's buffer, [tile_pages, parts, block], valid for what the current stream does from now on."""
        index = self._next
        if index // len(self.tiles) != layer:
            raise RuntimeError(f"layer {layer} asks for tile {index} of {len(self.tiles)} a layer")
        if self._copies.queued:
            self._issued[index].wait(self._regions.config.wait_timeout_s, f"{self._who}, layer {layer},")
        if self._timed:
            self._wanted.append(self._event())
            self._wanted[-1].record(current)
        current.wait_event(self._copied[index])
        return self._buffers[index % 2]

    def read(self, current: torch.cuda.Stream) -> None:
        """The current stream has been given all that reads the tile of the last `ready`."""
        self._next += 1
        if len(self._copied) < self._total:
            reader = self._event()
            reader.record(current)
            self._submit(reader)

    def _submit(self, after: torch.cuda.Event) -> None:
        index = len(self._copied)
        if index >= self._total:
            return
        # Taken here and recorded there: the lists and the pool belong to the caller's thread.
        self._copied.append(self._event())
        if self._timed:
            self._begun.append(self._event())
        if not self._copies.queued:
            self._issue(index, after)
            return
        layer, part = divmod(index, len(self.tiles))
        region = "C" if self.tiles[part].role == ROLE_COMPUTE else "T"
        what = f"the copy of region {region}, tile {part}, layer {layer}"
        self._issued.append(self._queue.submit(partial(self._issue, index, after), what))

    def _issue(self, index: int, after: torch.cuda.Event) -> None:
        """Queue the copy of tile `index` behind `after`, the last reader of its buffer."""
        layer, part = divmod(index, len(self.tiles))
        source = layer * self._regions.arena.layer_stride
        if self._copies.queued:
            torch.cuda.set_device(self._stream.device)
        if self.tiles[part].role == ROLE_COMPUTE:
            # Copies before `after` have ended with it, those of the stream before this one included.
            (after if index < 2 else self._copied[index - 2]).synchronize()
            source = self._fill_bounce(self._bounce[index % 2], layer, part)
        self._stream.wait_event(after)
        if self._timed:
            self._begun[index].record(self._stream)
        self._copies.batches[part].issue(self._stream, source, self._buffers[index % 2].data_ptr())
        self._copied[index].record(self._stream)

    def _fill_bounce(self, bounce: torch.Tensor, layer: int, part: int) -> int:
        pairs = [
            (bounce[place : place + count], self._regions.arena.raw_pages(chunk, layer)[slot : slot + count])
            for chunk, slot, place, count in self._copies.runs[part]
        ]
        self._regions.team.submit_copy(pairs).wait(self._regions.config.wait_timeout_s)
        return bounce.data_ptr()

    @property
    def finished(self) -> bool:
        """Whether the GPU is past every tile that was asked for, so that `timings` waits for nothing."""
        last = [events[-1] for events in (self._copied, self._wanted) if events]
        return self._next == self._total and all(event.query() for event in last)

    def read_clocks(self, layers: int) -> None:
        """Read those of the first `layers` layers, all of whose tiles the GPU has attended.

        Where the host would only wait, this costs nothing; after the forward it holds up the next.
        """
        if self._timed:
            self._read_until(layers * len(self.tiles))

    def _read_until(self, count: int) -> None:
        for k in range(self._clocks_read, count):
            self._transfer_ms += self._begun[k].elapsed_time(self._copied[k])
            # Negative where the copy had ended before the attention came to it.
            self._exposed_ms += max(0.0, self._wanted[k].elapsed_time(self._copied[k]))
        self._clocks_read = max(self._clocks_read, count)

    def timings(self) -> TransferTimings | None:
        """Read the clocks and give the events back, once, after the forward; None unless `timed`.

        Waits for the last tile read, if the GPU is not there yet.
        """
        result = None
        if self._timed:
            done = len(self._wanted)
            if done:
                self._copied[done - 1].synchronize()
                self._wanted[done - 1].synchronize()
            self._read_until(done)
            batches = self._copies.batches
            nbytes = sum(batches[k % len(batches)].nbytes for k in range(done))
            result = TransferTimings(nbytes, self._transfer_ms / 1e3, self._exposed_ms / 1e3)
        for events in (self._begun, self._copied, self._wanted):
            events.clear()
        self._clocks_read, self._transfer_ms, self._exposed_ms = 0, 0.0, 0.0
        # A forward that was cut short leaves copies to come: their events are not reused.
        if self._next == self._total:
            _EVENTS.give_back(self._taken)
        return result


class TransferClocks:
    """The clocks of forwards' tiles. They are read in the forwards' order, each once."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._unread: deque[tuple[CudaTileStream, StepPlan]] = deque()
        self._transfers = _no_transfers()

    def add(self, stream: CudaTileStream, plan: StepPlan) -> None:
        """A forward begins."""
        self._unread.append((stream, plan))

    def read_finished(self, costs: Costs) -> None:
        """Add what the GPU is past to `costs`. Waits for nothing."""
        while self._unread and self._unread[0][0].finished:
            self._read(costs)

    def read_all(self, costs: Costs, but: int = 0) -> None:
        """Likewise all except the last `but` forwards. Waits for the GPU, if that is not past them."""
        while len(self._unread) > but:
            self._read(costs)

    def _read(self, costs: Costs) -> None:
        stream, plan = self._unread.popleft()
        timings, kind = stream.timings(), "decode" if plan.is_decode else "extend"
        if timings is None:
            return
        self._transfers[kind] = self._transfers[kind].plus(timings)
        if plan.is_decode and timings.bytes:
            costs.transfer_s += timings.transfer_s
            costs.exposed_s += timings.exposed_s
            costs.transfer_bytes += timings.bytes
            costs.transfer_tokens += plan.transfer_tokens * self._layers

    def take(self) -> dict[str, TransferTimings]:
        """Totals of decodes and extends that were read since this was last asked."""
        taken, self._transfers = self._transfers, _no_transfers()
        return taken


def _no_transfers() -> dict[str, TransferTimings]:
    return {kind: TransferTimings(0, 0.0, 0.0) for kind in ("decode", "extend")}
