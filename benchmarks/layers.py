"""Regions and executor in the model's shape, without the model: what attention and its transfers take alone."""

from __future__ import annotations

import random
import time

import numpy as np
import torch

from sglang_inplacekv.config import InplaceConfig
from sglang_inplacekv.cores import make_team
from sglang_inplacekv.executors import make_executor
from sglang_inplacekv.layout import (
    DEFAULT_TILE_TOKENS,
    DEFAULT_TILE_TOKENS_CUDA,
    KVShape,
    RegionSizes,
    window_count,
)
from sglang_inplacekv.regions import Regions
from sglang_inplacekv.step_plan import Planner, Span, StepPlan

from .model import HEAD_DIM, KV_HEADS, Q_HEADS
from .scale import Shape

PAGE_TOKENS = 256
_CHUNKS = 32
_WAIT_S = 60.0
_SCALE = HEAD_DIM**-0.5


def device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Layers:
    """`layers` layers of KV with `host_tokens` of random data and no D homes; close it."""

    def __init__(self, layers: int, host_tokens: int, max_batch: int) -> None:
        device = device_type()
        dtype, tile = (
            (torch.bfloat16, DEFAULT_TILE_TOKENS_CUDA)
            if device == "cuda"
            else (torch.float32, DEFAULT_TILE_TOKENS)
        )
        self.shape = KVShape(layers, KV_HEADS, HEAD_DIM, dtype, PAGE_TOKENS)
        windows = window_count(max_batch)
        # Two chunks more than needed, since C and T each end in a chunk that they do not fill.
        needed = host_tokens // PAGE_TOKENS + windows
        chunk_pages = max(1, needed // _CHUNKS)
        host_pages = needed + 2 * chunk_pages
        sizes = RegionSizes(0, windows, host_pages, chunk_pages, max(1, tile // PAGE_TOKENS), PAGE_TOKENS)
        self.team = make_team(None, device)
        self.regions = Regions(InplaceConfig(wait_timeout_s=_WAIT_S), self.shape, sizes, self.team, device)
        self.executor = make_executor(self.regions, device)
        self._planner = Planner(self.regions.homes, self.regions.windows, _WAIT_S)
        self._held: list[int] = []
        self._device = device
        self._fill()

    def _fill(self) -> None:
        for chunk in range(self.regions.sizes.chunks):
            for layer in range(self.shape.layers):
                target = self.regions.arena.raw_pages(chunk, layer).view(-1)
                if chunk == layer == 0:
                    template = torch.randn(target.shape).to(self.shape.dtype)
                target.copy_(template[: len(target)])

    def place(self, shape: Shape, share: float, *, scattered: bool = False) -> StepPlan:
        """Give every request homes at the CPU share, and plan the decode of its next token.

        `scattered` takes each request's pages at random from all of host memory.
        """
        self.release()
        self.regions.scope.target_share = share
        pages_each = shape.context // PAGE_TOKENS + 1
        if scattered:
            pages = self._allocate(self.regions.homes.free_pages)
            random.Random(0).shuffle(pages)
            own = [pages[i * pages_each : (i + 1) * pages_each] for i in range(shape.batch)]
        else:
            # The open page comes last, as it does when a prompt of whole pages begins to decode.
            prompts = [self._allocate(pages_each - 1) for _ in range(shape.batch)]
            own = [pages + self._allocate(1) for pages in prompts]
        spans = [
            Span(f"r{request}", np.array(homes, dtype=np.int64), shape.context, shape.context + 1)
            for request, homes in enumerate(own)
        ]
        self.executor.acknowledge()
        return self._planner.build(spans, is_decode=True)

    def _allocate(self, count: int) -> list[int]:
        pages = self.regions.homes.allocate(count)
        if pages is None:
            raise RuntimeError(f"{count} pages wanted, {self.regions.homes.free_pages} are free")
        self._held += pages
        return list(pages)

    def release(self) -> None:
        self.executor.drain()
        self.regions.homes.free(self._held)
        self.regions.pages_freed(self._held)
        self._held = []

    def step(self, plan: StepPlan, inputs: tuple[torch.Tensor, ...]) -> float:
        """Run one decode step's attention over all layers and return its seconds."""
        q, k, v, out = inputs
        synchronize()
        begun_s = time.perf_counter()
        self.executor.begin_forward(plan)
        for layer in range(self.shape.layers):
            self.executor.write_layer(layer, k, v)
            self.executor.decode(layer, q, _SCALE, out)
        self.executor.end_forward()
        synchronize()
        return time.perf_counter() - begun_s

    def inputs(self, batch: int) -> tuple[torch.Tensor, ...]:
        """(q, k, v, out) of one decode step."""

        def draw(heads: int) -> torch.Tensor:
            return torch.randn(batch, heads, HEAD_DIM, device=self._device).to(self.shape.dtype)

        return draw(Q_HEADS), draw(KV_HEADS), draw(KV_HEADS), torch.empty_like(draw(Q_HEADS))

    def host_bytes(self, plan: StepPlan) -> dict[str, int]:
        """Bytes of C and of T that a step of `plan` reads in all layers."""
        attended = plan.attended_tokens(PAGE_TOKENS)
        return {region: attended[region] * self.shape.token_bytes for region in ("C", "T")}

    def close(self) -> None:
        self.release()
        self.executor.close()
        self.team.close()
