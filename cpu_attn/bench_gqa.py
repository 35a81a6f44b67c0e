"""Decode attention against the read probe and SDPA, as part of python -m cpu_attn.bench.

Prints GB/s of KV read (median [least - most] of the rounds, by the worker's clock), its share of a read
probe by the same threads, and the speed-up over scaled_dot_product_attention with the query group
folded into the query axis.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cpu_attn.bench_ggml import GgmlAttention
from cpu_attn.bench_inputs import (
    MODELS,
    WAIT_S,
    Model,
    decodes,
    in_a_row,
    page_table,
    random_sets,
    some,
    spread,
)
from cpu_attn.executor import Executor
from cpu_attn.paged import PagedKV

LENGTHS = (2048, 8192, 32768, 65536)
BATCHES = (1, 4)
LAYOUTS = ("head-major", "token-major")
ALL_ASLEEP_S = (
    0.02  # threads of ours, torch's and ggml's spin for a while when they are done, on the same cores
)

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


def as_pages(buffer: Tensor, case: Case) -> PagedKV:
    model = case.model
    k, v = buffer.view(torch.bfloat16).chunk(2)
    if case.layout == "head-major":
        shape = (-1, model.kv_heads, case.page_size, model.head_dim)
        return PagedKV([(k.view(shape).permute(0, 2, 1, 3), v.view(shape).permute(0, 2, 1, 3))])
    shape = (-1, case.page_size, model.kv_heads, model.head_dim)
    return PagedKV([(k.view(shape), v.view(shape))])


@dataclass
class Samples:
    """Seconds of each round; all are measured in turn, so that drift of a shared host hits all."""

    kernel_s: list[float] = field(default_factory=list)
    probe_s: list[float] = field(default_factory=list)
    sdpa_s: list[float] = field(default_factory=list)
    ggml_s: list[float] = field(default_factory=list)


def measure(
    case: Case, executor: Executor, probe: Tensor, arguments: argparse.Namespace, ggml: GgmlAttention | None
) -> Samples:
    """Time `rounds` rounds of decodes, each over the next KV set, beside a probe and SDPA calls over the same sets."""
    model = case.model
    buffers = random_sets(case.kv_bytes, executor)
    sets = len(buffers)
    layers = [as_pages(buffer, case) for buffer in buffers]
    table = page_table(case.batch, case.tokens, case.page_size)
    q = torch.randn(case.batch, model.q_heads, model.head_dim).bfloat16()
    decode = decodes(executor, q, layers, table)
    samples = Samples()
    for turn in range(-1, arguments.rounds):
        sdpa_s, ggml_s = [], []
        if not arguments.no_sdpa:
            time.sleep(ALL_ASLEEP_S)
            sdpa_s.append(in_a_row(lambda i: time_sdpa(case, buffers[i % sets], q), turn))
        if ggml is not None:
            time.sleep(ALL_ASLEEP_S)
            ggml_s.append(in_a_row(lambda i: time_ggml(case, buffers[i % sets], q, ggml), turn))
        time.sleep(ALL_ASLEEP_S)
        read = executor.submit_read(probe)
        read.wait(WAIT_S)
        kernel_s = in_a_row(decode, turn)
        if turn >= 0:  # the first is a warm-up
            samples.kernel_s.append(kernel_s)
            samples.probe_s.append(read.seconds)
            samples.sdpa_s += sdpa_s
            samples.ggml_s += ggml_s
    return samples


def time_sdpa(case: Case, buffer: Tensor, q: Tensor) -> float:
    """Return seconds of SDPA over the same bytes, taken as [batch, kv_heads, tokens, d]."""
    model = case.model
    shape = (case.batch, model.kv_heads, case.tokens, model.head_dim)
    k, v = (half.view(shape) for half in buffer.view(torch.bfloat16).chunk(2))
    folded = q.view(case.batch, model.kv_heads, model.group, model.head_dim)
    start = time.perf_counter()
    torch.nn.functional.scaled_dot_product_attention(folded, k, v)
    return time.perf_counter() - start


def time_ggml(case: Case, buffer: Tensor, q: Tensor, ggml: GgmlAttention) -> float:
    """Return seconds of ggml over the same bytes, taken as fp16, its usual format: still random, and of order one."""
    shape = (case.batch, case.model.kv_heads, case.tokens, case.model.head_dim)
    k, v = (half.view(shape) for half in buffer.view(torch.float16).chunk(2))
    return ggml.decode(q.float(), k, v, case.model.head_dim**-0.5)[1]


def report(case: Case, probe_bytes: int, samples: Samples) -> str:
    rates = [case.kv_bytes / seconds / 1e9 for seconds in samples.kernel_s]
    probe_gbps = probe_bytes / statistics.median(samples.probe_s) / 1e9
    group = case.model.group
    line = (
        f"{case.model.title} {case.batch} x {case.tokens:6} {case.layout:11} {spread(rates)} GB/s,"
        f" {statistics.median(rates) / probe_gbps:4.0%} of the probe's {probe_gbps:.1f}"
        f" (expected {EXPECTED_SHARE[group]:.0%})"
    )
    if samples.sdpa_s:
        speedups = [sdpa / kernel for sdpa, kernel in zip(samples.sdpa_s, samples.kernel_s)]
        line += f", {spread(speedups, 1)} x SDPA (expected {EXPECTED_SPEEDUP[group]:g})"
    if samples.ggml_s:
        speedups = [ggml / kernel for ggml, kernel in zip(samples.ggml_s, samples.kernel_s)]
        line += f", {spread(speedups, 1)} x ggml"
    return line


def cases(arguments: argparse.Namespace) -> Iterator[Case]:
    for model in MODELS:
        for batch in BATCHES:
            for tokens in LENGTHS:
                if batch * tokens > arguments.max_tokens:
                    continue
                for layout in LAYOUTS:
                    yield Case(model, batch, tokens, layout, arguments.page_size)


def run(executor: Executor, probe: Tensor, arguments: argparse.Namespace) -> None:
    # SDPA wants all threads. Where nothing else does, torch's own would only spin on the team's cores.
    if not arguments.no_sdpa:
        torch.set_num_threads(arguments.threads)
    ggml = GgmlAttention(arguments.threads) if arguments.ggml else None
    for case in some(cases(arguments), f"--max-tokens {arguments.max_tokens}"):
        print(report(case, len(probe), measure(case, executor, probe, arguments, ggml)), flush=True)
    if ggml is not None:
        ggml.close()
    torch.set_num_threads(1)
