"""Regions and executor in the model's shape, without the model: what attention and its transfers take alone."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace

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
from sglang_inplacekv.planning import ModelKV
from sglang_inplacekv.regions import Regions
from sglang_inplacekv.step_plan import Planner, Span, StepPlan

from .model import HEAD_DIM, KV_HEADS, PAGE_TOKENS, Q_HEADS
from .scale import Shape

_CHUNKS = 32
_WAIT_S = 60.0


def device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def qwen(layers: int) -> ModelKV:
    return ModelKV(KVShape(layers, KV_HEADS, HEAD_DIM, torch.bfloat16, PAGE_TOKENS), Q_HEADS)


class Layers:
    """The KV of `model` with `host_tokens` of random data, after D homes of zeros, if any; close it."""

    def __init__(self, model: ModelKV, host_tokens: int, max_batch: int, device_pages: int = 0) -> None:
        device = device_type()
        # The CPU stands in for the GPU in fp32, which torch attends fastest there.
        tile = DEFAULT_TILE_TOKENS_CUDA if device == "cuda" else DEFAULT_TILE_TOKENS
        dtype = model.shape.dtype if device == "cuda" else torch.float32
        self.model = replace(model, shape=replace(model.shape, dtype=dtype))
        self.shape = self.model.shape
        windows = window_count(max_batch)
        # Two chunks more than needed, since C and T each end in a chunk that they do not fill.
        needed = host_tokens // PAGE_TOKENS + windows
        chunk_pages = max(1, needed // _CHUNKS)
        host_pages = needed + 2 * chunk_pages
        tile_pages = max(1, tile // PAGE_TOKENS)
        sizes = RegionSizes(device_pages, windows, host_pages, chunk_pages, tile_pages, PAGE_TOKENS)
        self.team = make_team(None, device)
        self.regions = Regions(InplaceConfig(wait_timeout_s=_WAIT_S), self.shape, sizes, self.team, device)
        self.executor = make_executor(self.regions, device)
        self._inputs: dict[int, tuple[torch.Tensor, ...]] = {}  # by batch
        self._pieces: dict[int, list[torch.cuda.CUDAGraph]] = {}  # likewise
        # As the server's forwards, not on the default stream, where all else would wait for them.
        self._stream = torch.cuda.Stream() if device == "cuda" else None
        if device == "cuda":
            self.executor.reserve_rows(max_batch)
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
        self.regions.scope.target_share = share
        return self.plan(self.allocate(shape, scattered=scattered))

    def allocate(self, shape: Shape, *, scattered: bool = False) -> list[Span]:
        """The decode of every request's next token, with homes as the scope wants them now."""
        self.release()
        pages_each = shape.context // PAGE_TOKENS + 1
        if scattered:
            pages = self._allocate(self.regions.homes.free_pages)
            random.Random(0).shuffle(pages)
            own = [pages[i * pages_each : (i + 1) * pages_each] for i in range(shape.batch)]
        else:
            # The open page comes last, as it does when a prompt of whole pages begins to decode.
            prompts = [self._allocate(pages_each - 1) for _ in range(shape.batch)]
            own = [pages + self._allocate(1) for pages in prompts]
        return [
            Span(f"r{request}", np.array(homes, dtype=np.int64), shape.context, shape.context + 1)
            for request, homes in enumerate(own)
        ]

    def grown(self, spans: Sequence[Span]) -> list[Span]:
        """The same requests a page later. What was the open page is full, and read from its home, which holds random data."""
        for span in spans:
            self.regions.windows.page_freed(int(span.pages[-1]))
        return [
            Span(
                span.label,
                np.append(span.pages, self._allocate(1)),
                span.prefix + PAGE_TOKENS,
                span.length + PAGE_TOKENS,
            )
            for span in spans
        ]

    def plan(self, spans: Sequence[Span]) -> StepPlan:
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
        """Run one decode step's attention over all layers and return its seconds. On a GPU under graphs, as a server does.

        inputs: what `inputs` gave for the plan's batch.
        """
        q, *parts, out = inputs
        executor, scale = self.executor, self.shape.head_dim**-0.5
        with torch.cuda.stream(self._stream):
            pieces = self._captured(inputs)
            synchronize()
            begun_s = time.perf_counter()
            executor.begin_forward(plan, len(q) if pieces else None)
            for layer in range(self.shape.layers):
                if pieces:
                    pieces[layer].replay()
                    executor.decode_host(layer, q, scale)
                else:
                    executor.write_layer(layer, *parts)
                    executor.decode(layer, q, scale, out)
            executor.end_forward()
            if pieces:
                pieces[-1].replay()
            synchronize()
            return time.perf_counter() - begun_s

    def _captured(self, inputs: tuple[torch.Tensor, ...]) -> list[torch.cuda.CUDAGraph]:
        """Graphs of the layers, cut at decode_host, which no graph can hold; none without a GPU."""
        q, *parts, out = inputs
        if self._stream is None or len(q) in self._pieces:
            return self._pieces.get(len(q), [])
        executor, layers, state = self.executor, self.shape.layers, None

        def run_piece(layer: int) -> None:
            nonlocal state
            if layer:
                executor.decode_merge(state, out)
            if layer < layers:
                executor.write_decoded(layer, *parts)
                state = executor.decode_device(layer, q, self.shape.head_dim**-0.5)

        executor.begin_capture(len(q))
        for layer in range(layers + 1):  # loads kernels and pays one-time set-up before the capture
            run_piece(layer)
        pieces, pool = [torch.cuda.CUDAGraph() for _ in range(layers + 1)], torch.cuda.graph_pool_handle()
        for layer, piece in enumerate(pieces):
            # Meanwhile a thread of the regions' may pin a chunk ahead of need.
            with torch.cuda.graph(piece, pool, self._stream, capture_error_mode="thread_local"):
                run_piece(layer)
        self._pieces[len(q)] = pieces
        return pieces

    def inputs(self, batch: int) -> tuple[torch.Tensor, ...]:
        """(q, k, v, out) of one decode step, or (q, latent, out): random, the same for every step of a batch."""

        def draw(heads: int, width: int) -> torch.Tensor:
            return torch.randn(batch, heads, width, device=self._device).to(self.shape.dtype)

        if batch not in self._inputs:
            shape, heads = self.shape, self.model.q_heads
            parts = [draw(shape.kv_heads, shape.head_dim) for _ in range(shape.parts)]
            self._inputs[batch] = draw(heads, shape.head_dim), *parts, draw(heads, shape.out_dim)
        return self._inputs[batch]

    def host_bytes(self, plan: StepPlan) -> dict[str, int]:
        """Bytes of C and of T that a step of `plan` reads in all layers."""
        attended = plan.attended_tokens(PAGE_TOKENS)
        return {region: attended[region] * self.shape.token_bytes for region in ("C", "T")}

    def close(self) -> None:
        self.release()
        self.executor.close()
        self.team.close()
