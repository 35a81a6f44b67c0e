"""What every copy between the GPU and the homes must do, run on a GPU (test_dma_gpu) and with fakes (test_cuda_copies)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

import cpu_attn
from sglang_inplacekv.config import InplaceConfig
from sglang_inplacekv.executors.cuda_homes import CudaHomeWriter, FlushWriter
from sglang_inplacekv.executors.cuda_tiles import CudaTileStream, TileCopies
from sglang_inplacekv.executors.dma import CopyBatch
from sglang_inplacekv.executors.tile_stream import plan_tiles
from sglang_inplacekv.layout import ROLE_COMPUTE, KVShape, RegionSizes
from sglang_inplacekv.queues import WorkQueue
from sglang_inplacekv.regions import Regions
from sglang_inplacekv.step_plan import HomeWrite, Reads, Span, StepPlan

NONE = np.empty(0, dtype=np.int64)
# Chunks of 5 pages, the last one of 2: its layer stride is that of the others.
SHAPE = KVShape(layers=3, kv_heads=2, head_dim=64, dtype=torch.bfloat16, page_size=8)
SIZES = RegionSizes(device_pages=2, window_pages=4, host_pages=22, chunk_pages=5, tile_pages=4, page_size=8)


class Bench:
    """Regions whose host pages are all allocated, `share` of them as C, with everything that the copies need."""

    def __init__(self, device: str, make_stream: Callable[[], torch.cuda.Stream], share: float) -> None:
        self.device = device
        self.generator = torch.Generator().manual_seed(0)
        self.team = cpu_attn.Executor(threads=1)
        config = InplaceConfig(cpu_share=share, jitter_seed=3, wait_timeout_s=20)
        self.regions = Regions(config, SHAPE, SIZES, self.team, device)
        self.queue, self.stream = WorkQueue("test", 20, jitter_seed=3), make_stream()
        self.pages = np.array(self.regions.homes.allocate(24)[2:], dtype=np.int64)
        computed = np.array([self.regions.homes.role_of(page) == ROLE_COMPUTE for page in self.pages])
        self.computed, self.transferred = self.pages[computed], self.pages[~computed]

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(SHAPE.dtype)

    def fill_homes(self) -> None:
        for page in self.pages:
            home = self.regions.arena.page_bytes_view(page)
            home.copy_(self.random(*home.shape))

    def close(self) -> None:
        self.queue.close()
        self.team.close()


@contextmanager
def bench(device: str, make_stream: Callable[[], torch.cuda.Stream], share: float = 0.5) -> Iterator[Bench]:
    own = Bench(device, make_stream, share)
    try:
        yield own
    finally:
        own.close()


def check_batch(b: Bench) -> None:
    """Scattered and adjacent pages in one batch, layer after layer, the short last chunk included."""
    b.fill_homes()
    arena, half = b.regions.arena, len(b.transferred) // 2
    pages = np.array([*b.transferred[:half:-1], *b.transferred[: half + 1]])
    assert set(SIZES.chunk_page_range(4)) < set(pages.tolist()), "the short last chunk takes part"
    homes, offsets, sizes = arena.copy_runs(pages)
    batch = CopyBatch(offsets, homes, sizes)
    assert batch.nbytes == len(pages) * arena.page_stride and 1 < len(batch) < len(pages)
    block = SHAPE.block_bytes // SHAPE.dtype.itemsize
    target = torch.zeros(len(pages), 2, block, dtype=SHAPE.dtype, device=b.device)
    if b.device == "cuda":
        torch.cuda.synchronize()  # the copies below are not ordered behind the zeros
    for layer in range(SHAPE.layers):
        batch.issue(b.stream, layer * arena.layer_stride, target.data_ptr())
        b.stream.synchronize()
        for place, page in enumerate(pages):
            assert torch.equal(target[place].cpu(), arena.page_bytes_view(page)[layer])


def tile_stream(b: Bench, is_decode: bool, timed: bool = True) -> tuple[CudaTileStream, StepPlan]:
    """A forward of two requests that share some of their pages."""
    own = [b.transferred[:6], b.transferred[2:7]], [b.computed[:5], b.computed[3:7]]
    reads = [
        Reads(device_pages=NONE, device_tokens=0, compute_pages=c, transfer_pages=t)
        for t, c in zip(*own, strict=True)
    ]
    spans = [Span(label=f"r{i}", pages=NONE, prefix=0, length=1) for i in range(2)]
    plan = StepPlan(spans, is_decode, reads=reads)
    tile = (SIZES.tile_pages, 2, SHAPE.block_bytes // SHAPE.dtype.itemsize)
    buffers = [torch.zeros(tile, dtype=SHAPE.dtype, device=b.device) for _ in range(2)]
    bounce = [torch.zeros(tile, dtype=SHAPE.dtype, pin_memory=b.device == "cuda") for _ in range(2)]
    copies = TileCopies(b.regions, plan_tiles(plan, b.regions.sizes))
    return CudaTileStream(b.regions, b.stream, buffers, bounce, copies, plan.who, b.queue, timed), plan


def read_all(stream: CudaTileStream) -> None:
    for layer in range(SHAPE.layers):
        for _ in stream.tiles:
            stream.ready(layer, torch.cuda.current_stream())
            stream.read(torch.cuda.current_stream())


def check_tiles(b: Bench, is_decode: bool, timed: bool) -> None:
    b.fill_homes()
    stream, _ = tile_stream(b, is_decode, timed)
    assert len(stream.tiles) == (2 if is_decode else 4)
    for layer in range(SHAPE.layers):
        for own_tile in stream.tiles:
            buffer = stream.ready(layer, torch.cuda.current_stream())
            got = buffer[: len(own_tile.pages)].clone().cpu()
            wanted = [b.regions.arena.page_bytes_view(page)[layer] for page in own_tile.pages]
            assert torch.equal(got, torch.stack(wanted))
            stream.read(torch.cuda.current_stream())
    b.stream.synchronize()
    assert stream.finished
    timings = stream.timings()
    if not timed:
        assert timings is None
        return
    pages = 7 if is_decode else 14
    assert timings.bytes == pages * SHAPE.layers * 2 * SHAPE.block_bytes
    assert timings.transfer_s > 0 and timings.exposed_s >= 0


def check_home_writer(b: Bench, scattered: bool) -> None:
    """Pages of both roles and many runs; with `scattered` the tokens are not consecutive from page to page."""
    pages, size = b.pages[:17].tolist(), SHAPE.page_size
    step = size + 1 if scattered else size
    writes = [HomeWrite(page, 3 + place * step) for place, page in enumerate(pages)]
    plan = StepPlan([Span("r1", b.pages, 0, 3 + 18 * step)], False, home_writes=writes)
    qkv = b.random(SHAPE.layers, 3 + 18 * step, 4, SHAPE.head_dim)
    writer = CudaHomeWriter(b.regions, b.queue, plan, b.stream)
    for layer in range(SHAPE.layers):
        on_device = qkv[layer].to(b.device, copy=True)
        k, v = on_device.split(2, dim=1)  # strided, as parts of a fused projection are
        writer.write(layer, (k, v), 20)
        on_device.fill_(7)  # the caller's again
    for page in pages:
        b.regions.homes.tickets[page].wait(20, "the test")
    for write in writes:
        for layer in range(SHAPE.layers):
            tokens = qkv[layer, write.first_token : write.first_token + size]
            check_page(b, write.page, layer, tokens[:, :2], tokens[:, 2:])


def check_page(b: Bench, page: int, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
    chunk, slot = SIZES.chunk_of(page), SIZES.slot_of(page)
    if b.regions.homes.role_of(page) == ROLE_COMPUTE:
        home = b.regions.arena.compute_view(chunk, layer)[slot].transpose(1, 2)
    else:
        home = b.regions.arena.transfer_view(chunk, layer)[slot]
    assert torch.equal(home[0], k) and torch.equal(home[1], v), f"page {page}, layer {layer}"


def check_flush(b: Bench) -> None:
    flusher = FlushWriter(b.regions, b.queue, b.stream)
    b.regions.device_kv.copy_(b.random(*b.regions.device_kv.shape))
    pages = [*b.computed[:2].tolist(), *b.transferred[-2:].tolist()]
    for page in pages:
        b.regions.windows.open(page, 20)
    tickets = [flusher.submit(page) for page in pages]
    for page, ticket in zip(pages, tickets, strict=True):
        ticket.wait(20, "the test")
        for layer in range(SHAPE.layers):
            window = b.regions.device_kv[layer, :, b.regions.window_rows(page)].cpu()
            check_page(b, page, layer, window[0], window[1])
