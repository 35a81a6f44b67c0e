"""MLA decode against this host's roof, as part of python -m cpu_attn.bench.

The roof of a shape is the lesser of the read probe and of the FLOP/s probe over the shape's FLOPs a
byte: each query head multiplies a row of 512 + 64 bf16 twice, 576 elements for its score and 512 for
its sum. Both probes run between the decodes, by the same threads.
"""

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cpu_attn.bench_inputs import WAIT_S, decodes, in_a_row, page_table, random_sets, some, spread
from cpu_attn.executor import Executor
from cpu_attn.paged import PagedLatent
from cpu_attn.probe import Multiplier

LORA_RANK, ROPE_DIM = 512, 64
WIDTH = LORA_RANK + ROPE_DIM
ROW_BYTES = 2 * WIDTH
BATCHES = (1, 4, 32)
LENGTHS = (2048, 8192, 32768, 131072)

EXPECTED_SHARE = 0.50  # of the roof; written before measuring


@dataclass(frozen=True)
class Case:
    heads: int
    batch: int
    tokens: int

    @property
    def kv_bytes(self) -> int:
        return self.batch * self.tokens * ROW_BYTES

    @property
    def flops_per_byte(self) -> float:
        return 2 * self.heads * (WIDTH + LORA_RANK) / ROW_BYTES


@dataclass
class Samples:
    kernel_s: list[float] = field(default_factory=list)
    probe_s: list[float] = field(default_factory=list)
    gflops: list[float] = field(default_factory=list)


def measure(case: Case, executor: Executor, probe: Tensor, arguments: argparse.Namespace) -> Samples:
    """Time `rounds` rounds of decodes, each over the next KV set, beside a read and a FLOP/s probe."""
    layers = [
        PagedLatent([buffer.view(torch.bfloat16).view(-1, arguments.page_size, WIDTH)], LORA_RANK)
        for buffer in random_sets(case.kv_bytes, executor)
    ]
    table = page_table(case.batch, case.tokens, arguments.page_size)
    q = torch.randn(case.batch, case.heads, WIDTH).bfloat16()
    decode = decodes(executor, q, layers, table)
    multiplier = Multiplier(executor)
    samples = Samples()
    for turn in range(-1, arguments.rounds):
        kernel_s = in_a_row(decode, turn)
        read = executor.submit_read(probe)
        read.wait(WAIT_S)
        gflops = multiplier.gflops()
        if turn >= 0:  # the first is a warm-up
            samples.kernel_s.append(kernel_s)
            samples.probe_s.append(read.seconds)
            samples.gflops.append(gflops)
    return samples


def report(case: Case, probe_bytes: int, samples: Samples) -> str:
    rates = [case.kv_bytes / seconds / 1e9 for seconds in samples.kernel_s]
    rate = statistics.median(rates)
    read_gbps = probe_bytes / statistics.median(samples.probe_s) / 1e9
    gflops = statistics.median(samples.gflops)
    roof = min(read_gbps, gflops / case.flops_per_byte)
    return (
        f"MLA {LORA_RANK}+{ROPE_DIM}, {case.heads} heads {case.batch:2} x {case.tokens:6}"
        f" {spread(rates)} GB/s,"
        f" {rate * case.flops_per_byte:.0f} of the probe's {gflops:.0f} GFLOP/s,"
        f" {rate / read_gbps:4.0%} of its {read_gbps:.1f} GB/s,"
        f" {rate / roof:4.0%} of the roof {roof:.1f} GB/s (expected {EXPECTED_SHARE:.0%})"
    )


def cases(arguments: argparse.Namespace) -> Iterator[Case]:
    for batch in BATCHES:
        for tokens in LENGTHS:
            if batch * tokens <= arguments.max_mla_tokens:
                yield Case(arguments.mla_heads, batch, tokens)


def run(executor: Executor, probe: Tensor, arguments: argparse.Namespace) -> None:
    for case in some(cases(arguments), f"--max-mla-tokens {arguments.max_mla_tokens}"):
        print(report(case, len(probe), measure(case, executor, probe, arguments)), flush=True)
