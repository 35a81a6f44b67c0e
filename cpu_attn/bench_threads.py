"""Decodes with fewer KV heads than threads, as part of python -m cpu_attn.bench.

Work is split along the sequence, so a team gains as much from more threads as a team that only reads: the
time at each number of threads over the time of all of them, beside the same ratio of the read probe.
"""

import argparse
import statistics

import torch
from torch import Tensor

from cpu_attn.bench_inputs import (
    WAIT_S,
    Model,
    decodes,
    in_a_row,
    page_table,
    paged_kv_of,
    random_sets,
    spread,
)
from cpu_attn.executor import Executor
from cpu_attn.library import isa

# One KV head, by its query heads.
MODELS = (Model("one KV head", 4, 1, 128), Model("one KV head", 8, 1, 128))
TOKENS = 131072

EXPECTED_SCALING = 0.85  # of what the read probe gains; written before measuring
EXPECTED_BEST_SHARE = 0.75  # of the read probe, with AVX512-BF16 and at the best number of threads


def thread_counts(threads: int) -> list[int]:
    """1, 2, 4 and so on, and all; from four on the steps between as well: 1, 2, 4, 6, 8, 12, 16."""
    counts = {1, threads}
    power = 2
    while power < threads:
        counts.add(power)
        if power >= 4 and power * 3 // 2 < threads:
            counts.add(power * 3 // 2)
        power *= 2
    return sorted(counts)


def measure(
    model: Model, teams: list[Executor], probe: Tensor, arguments: argparse.Namespace
) -> tuple[list[list[float]], list[list[float]]]:
    """Return seconds of the kernel and of the probe, by team and round; teams take turns."""
    sets = random_sets(TOKENS * model.token_bytes, teams[-1])
    layers = [
        paged_kv_of(buffer, torch.bfloat16, model.kv_heads, arguments.page_size, model.head_dim)
        for buffer in sets
    ]
    table = page_table(1, TOKENS, arguments.page_size)
    q = torch.randn(1, model.q_heads, model.head_dim).bfloat16()
    calls = [decodes(team, q, layers, table) for team in teams]
    kernel_s: list[list[float]] = [[] for _ in teams]
    probe_s: list[list[float]] = [[] for _ in teams]
    for turn in range(-1, arguments.rounds):  # the first is a warm-up
        for i, team in enumerate(teams):
            seconds = in_a_row(calls[i], turn)
            read = team.submit_read(probe)
            read.wait(WAIT_S)
            if turn >= 0:
                kernel_s[i].append(seconds)
                probe_s[i].append(read.seconds)
    return kernel_s, probe_s


def report(
    model: Model, counts: list[int], probe_bytes: int, kernel_s: list[list[float]], probe_s: list[list[float]]
) -> str:
    lines = [f"{model.title}, 1 x {TOKENS}"]
    kv_bytes = TOKENS * model.token_bytes
    shares = {}
    for threads, kernel, probe in zip(counts, kernel_s, probe_s):
        rates = [kv_bytes / s / 1e9 for s in kernel]
        probes = [probe_bytes / s / 1e9 for s in probe]
        shares[threads] = statistics.median(rates) / statistics.median(probes)
        # Of one round, so that both ends of a ratio saw the same neighbours.
        gains = [one / s for one, s in zip(kernel_s[0], kernel)]
        probe_gains = [one / s for one, s in zip(probe_s[0], probe)]
        scaling = [gain / reading for gain, reading in zip(gains, probe_gains)]
        lines.append(
            f"  {threads:3} threads {spread(rates)} GB/s, {shares[threads]:4.0%} of the probe's {spread(probes, 1)};"
            f" {spread(gains)} x one thread, {spread(scaling)} of what the probe gains (expected {EXPECTED_SCALING:g})"
        )
    best = max(shares, key=lambda threads: shares[threads])
    expected = f" (expected {EXPECTED_BEST_SHARE:.0%})" if isa() in ("avx512bf16", "amx") else ""
    lines.append(f"  best share of the probe: {shares[best]:.0%} with {best} threads{expected}")
    return "\n".join(lines)


def run(_: Executor, probe: Tensor, arguments: argparse.Namespace) -> None:
    counts = thread_counts(arguments.threads)
    cores = arguments.cores
    # None of them spins when its turn is over.
    teams = [Executor(count, cores and cores[:count]) for count in counts]
    try:
        for model in MODELS:
            print(report(model, counts, len(probe), *measure(model, teams, probe, arguments)), flush=True)
    finally:
        for team in teams:
            team.close()
