"""The P tiles on a GPU: the same stream of tiles as tile_stream.TileStream, ordered by events instead of tickets."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_inplacekv.executors.tile_stream import adjacent_runs, plan_tiles
from sglang_inplacekv.layout import ROLE_COMPUTE
from sglang_inplacekv.regions import Regions
from sglang_inplacekv.step_plan import StepPlan


class CudaTileStream:
    """`ready` makes the current stream wait for the next tile and returns it; `read` hands its buffer to the copy after next.

    T pages cross straight from their pinned homes. C pages (of a prefill) are pageable: the CPU team copies them into a pinned
    bounce buffer first.
    """

    def __init__(
        self,
        regions: Regions,
        stream: torch.cuda.Stream,
        buffers: Sequence[torch.Tensor],
        bounce: Sequence[torch.Tensor],
        plan: StepPlan,
    ) -> None:
        self._regions, self._stream, self._buffers, self._bounce = regions, stream, buffers, bounce
        self.tiles = plan_tiles(plan, regions.sizes)
        self._runs = [adjacent_runs(tile.pages, regions.sizes) for tile in self.tiles]
        self._total = len(self.tiles) * regions.shape.layers
        self._copied: list[torch.cuda.Event] = []
        self._next = 0
        begun = torch.cuda.Event()
        begun.record()
        for _ in buffers:
            self._issue(begun)

    def ready(self, layer: int) -> torch.Tensor:
        if self._next // len(self.tiles) != layer:
            raise RuntimeError(f"layer {layer} asks for tile {self._next} of {len(self.tiles)} a layer")
        torch.cuda.current_stream().wait_event(self._copied[self._next])
        return self._buffers[self._next % 2]

    def read(self) -> None:
        self._next += 1
        reader = torch.cuda.Event()
        reader.record()
        self._issue(reader)

    def _issue(self, after: torch.cuda.Event) -> None:
        index = len(self._copied)
        if index >= self._total:
            return
        layer, part = divmod(index, len(self.tiles))
        buffer, bounce = self._buffers[index % 2], None
        if self.tiles[part].role == ROLE_COMPUTE:
            bounce = self._fill_bounce(index, layer, part)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            if bounce is not None:
                count = len(self.tiles[part].pages)
                buffer[:count].copy_(bounce[:count], non_blocking=True)
            else:
                for chunk, slot, place, count in self._runs[part]:
                    source = self._regions.arena.raw_pages(chunk, layer)[slot : slot + count]
                    buffer[place : place + count].copy_(source, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        self._copied.append(copied)

    def _fill_bounce(self, index: int, layer: int, part: int) -> torch.Tensor:
        if index >= 2:
            self._copied[index - 2].synchronize()
        bounce = self._bounce[index % 2]
        pairs = [
            (bounce[place : place + count], self._regions.arena.raw_pages(chunk, layer)[slot : slot + count])
            for chunk, slot, place, count in self._runs[part]
        ]
        self._regions.team.submit_copy(pairs).wait(self._regions.config.wait_timeout_s)
        return bounce
