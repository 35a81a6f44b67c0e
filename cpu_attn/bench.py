"""Decode attention against this host's read bandwidth and torch SDPA: python -m cpu_attn.bench.

Prints GB/s of KV read, its share of a read probe run in the same process by the same threads, and
the speed-up over scaled_dot_product_attention with the query group folded into the query axis.
Times are the worker's own, median of the repeats with [min - max]; data is random. KV sets are
rotated so that none is found in the caches.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from cpu_attn.executor import Executor, Job
from cpu_attn.library import default_threads, isa
from cpu_attn.paged import PagedKV, PageTable
from cpu_attn.probe import huge_buffer, read_probe_gbps

WAIT_S = 120.0
COLD_BYTES = 512 << 20  # rotate over at least this much KV, beyond any cache
RANDOM_BYTES = 32 << 20


@dataclass(frozen=True)
class Model:
    name: str
    q_heads: int
    kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def token_bytes(self) -> int:
        return 2 * self.kv_heads * self.head_dim * 2  # K and V, bf16


MODELS = (Model("Qwen3-30B-A3B", 32, 4, 128), Model("Mixtral-8x7B", 32, 8, 128))
LENGTHS = (2048, 8192, 32768, 65536)
BATCHES = (1, 4)
LAYOUTS = ("head-major", "token-major")

# Written before measuring. Share of the read probe from 8K tokens on, by query heads per KV head:
# FLOP per byte grows with the group, so a narrow vector unit runs out before memory does.
EXPECTED_SHARE = {4: 0.70, 8: 0.60}
# Speed-up over folded SDPA, by the same key.
EXPECTED_SPEEDUP = {4: 2.0, 8: 2.5}


@dataclass(frozen=True)
class Case:
    model: Model
    batch: int
    tokens: int
    layout: str
    page_size: int

    @property
    def kv_bytes(self) -> int:
        return self.batch * self.tokens * self.model.token_bytes


def fill_random(buffer: Tensor) -> None:
    """Overwrite a uint8 buffer with normally distributed bf16."""
    chunk = torch.randn(min(len(buffer), RANDOM_BYTES) // 2).bfloat16().view(torch.uint8)
    for piece in buffer.split(len(chunk)):
        piece.copy_(chunk[: len(piece)])


def as_pages(buffer: Tensor, case: Case) -> PagedKV:
    model = case.model
    half = buffer.view(torch.bfloat16).chunk(2)
    if case.layout == "head-major":
        shape = (-1, model.kv_heads, case.page_size, model.head_dim)
        return PagedKV([tuple(part.view(shape).permute(0, 2, 1, 3) for part in half)])
    shape = (-1, case.page_size, model.kv_heads, model.head_dim)
    return PagedKV([tuple(part.view(shape) for part in half)])


def page_table(case: Case) -> PageTable:
    pages = case.batch * case.tokens // case.page_size
    return PageTable(
        torch.zeros(pages, dtype=torch.int32),
        torch.arange(pages, dtype=torch.int32),
        torch.arange(0, pages + 1, pages // case.batch, dtype=torch.int32),
        torch.full((case.batch,), case.tokens, dtype=torch.int32),
    )


def measure_kernel(case: Case, buffers: list[Tensor], executor: Executor, runs: int) -> list[float]:
    """Return seconds of each run, after one warm-up a KV set."""
    model = case.model
    layers = [as_pages(buffer, case) for buffer in buffers]
    table = page_table(case)
    q = torch.randn(case.batch, model.q_heads, model.head_dim).bfloat16()
    out = torch.empty(q.shape)
    lse = torch.empty(q.shape[:2])

    def run(layer: int) -> Job:
        kv = layers[layer % len(layers)]
        scale = 1 / math.sqrt(model.head_dim)
        job = executor.submit_paged_decode(q, kv, table, scale, out=out, lse=lse)
        job.wait(WAIT_S)
        return job

    for layer in range(len(layers)):
        run(layer)
    return [run(layer).seconds for layer in range(runs)]


def measure_sdpa(case: Case, buffers: list[Tensor], runs: int) -> list[float]:
    """Return seconds of each SDPA run over the same bytes, contiguous [batch, kv_heads, tokens, d]."""
    model = case.model
    q = torch.randn(case.batch, model.kv_heads, model.group, model.head_dim).bfloat16()
    shape = (case.batch, model.kv_heads, case.tokens, model.head_dim)
    layers = [tuple(x.view(shape) for x in b.view(torch.bfloat16).chunk(2)) for b in buffers]

    def run(layer: int) -> float:
        k, v = layers[layer % len(layers)]
        start = time.perf_counter()
        torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return time.perf_counter() - start

    run(0)
    return [run(layer + 1) for layer in range(runs)]


def measure_rounds(measure: Callable[[], list[float]], floor_s: float = 0.5) -> list[float]:
    """Repeat `measure` until it has run for `floor_s` in all, at most 20 times."""
    seconds: list[float] = []
    for _ in range(20):
        seconds += measure()
        if sum(seconds) >= floor_s:
            break
    return seconds


def report(case: Case, probe_gbps: float, kernel_s: list[float], sdpa_s: list[float]) -> str:
    rate = case.kv_bytes / statistics.median(kernel_s) / 1e9
    slow, fast = (case.kv_bytes / f(kernel_s) / 1e9 for f in (max, min))
    group = case.model.group
    line = (
        f"{case.model.name:14} g{group} {case.batch} x {case.tokens:6} {case.layout:11}"
        f" {rate:6.2f} GB/s [{slow:5.2f} - {fast:5.2f}] {rate / probe_gbps:5.0%} of probe"
        f" (expected {EXPECTED_SHARE[group]:.0%})"
    )
    if sdpa_s:
        speedup = statistics.median(sdpa_s) / statistics.median(kernel_s)
        line += f" {speedup:5.1f} x SDPA (expected {EXPECTED_SPEEDUP[group]:g})"
    return line


def cases(arguments: argparse.Namespace) -> Iterator[Case]:
    for model in MODELS:
        for batch in BATCHES:
            for tokens in LENGTHS:
                if batch * tokens > arguments.max_tokens:
                    continue
                for layout in LAYOUTS:
                    yield Case(model, batch, tokens, layout, arguments.page_size)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-tokens", type=int, default=65536, help="batch x length at most")
    parser.add_argument("--page-size", type=int, default=256, help="tokens a page")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--cores", type=lambda s: [int(x) for x in s.split(",")], default=None)
    parser.add_argument("--runs", type=int, default=7, help="timed runs a case, at least 5")
    parser.add_argument("--probe-mib", type=int, default=1024)
    parser.add_argument("--no-sdpa", action="store_true")
    arguments = parser.parse_args()
    if arguments.runs < 5:
        parser.error("--runs must be at least 5")
    return arguments


def main() -> None:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    with Executor(arguments.threads, arguments.cores) as executor:
        print(f"{isa()}, {arguments.threads} threads, pages of {arguments.page_size} tokens")
        for case in cases(arguments):
            # Before each case: on a shared host the bandwidth drifts.
            probe = read_probe_gbps(arguments.probe_mib << 20, executor=executor)
            sets = max(1, math.ceil(COLD_BYTES / case.kv_bytes))
            buffers = [huge_buffer(case.kv_bytes, executor) for _ in range(sets)]
            for buffer in buffers:
                fill_random(buffer)
            kernel_s = measure_rounds(
                lambda: measure_kernel(case, buffers, executor, arguments.runs)  # noqa: B023
            )
            sdpa_s = [] if arguments.no_sdpa else measure_sdpa(case, buffers, arguments.runs)
            print(report(case, probe, kernel_s, sdpa_s), f"probe {probe:.1f} GB/s", flush=True)


if __name__ == "__main__":
    main()
