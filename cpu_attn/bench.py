"""Decode attention against what this host reads, multiplies and SDPA does: python -m cpu_attn.bench.

Prints GB/s of KV read (median [min - max] of the rounds, by the worker's clock), its share of a read
probe by the same threads, and the speed-up over scaled_dot_product_attention with the query group
folded into the query axis. Data is random; KV sets are rotated so that none is found in the caches.
MLA shapes are in bench_mla.py.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cpu_attn.bench_inputs import WAIT_S, page_table, random_sets
from cpu_attn.bench_mla import run as run_mla
from cpu_attn.executor import Executor
from cpu_attn.library import default_threads, isa
from cpu_attn.paged import PagedKV
from cpu_attn.probe import hand_over_seconds, huge_buffer


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
    """Seconds of each round; the three are measured in turn, so that drift of a shared host hits all."""

    kernel_s: list[float] = field(default_factory=list)
    probe_s: list[float] = field(default_factory=list)
    sdpa_s: list[float] = field(default_factory=list)


def measure(case: Case, executor: Executor, probe: Tensor, arguments: argparse.Namespace) -> Samples:
    """Time `rounds` decodes, each over the next KV set, each beside a probe and an SDPA call."""
    model = case.model
    buffers = random_sets(case.kv_bytes, executor)
    sets = len(buffers)
    layers = [as_pages(buffer, case) for buffer in buffers]
    table = page_table(case.batch, case.tokens, case.page_size)
    q = torch.randn(case.batch, model.q_heads, model.head_dim).bfloat16()
    out, lse = torch.empty(q.shape), torch.empty(q.shape[:2])
    samples = Samples()
    for turn in range(-1, arguments.rounds):
        kv = layers[turn % sets]
        job = executor.submit_paged_decode(q, kv, table, model.head_dim**-0.5, out=out, lse=lse)
        job.wait(WAIT_S)
        read = executor.submit_read(probe)
        read.wait(WAIT_S)
        sdpa_s = [] if arguments.no_sdpa else [time_sdpa(case, buffers[turn % sets], q)]
        if turn >= 0:  # the first is a warm-up
            samples.kernel_s.append(job.seconds)
            samples.probe_s.append(read.seconds)
            samples.sdpa_s += sdpa_s
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


def report(case: Case, probe_bytes: int, samples: Samples) -> str:
    median = statistics.median(samples.kernel_s)
    rate, slowest, fastest = (
        case.kv_bytes / seconds / 1e9 for seconds in (median, max(samples.kernel_s), min(samples.kernel_s))
    )
    probe_gbps = probe_bytes / statistics.median(samples.probe_s) / 1e9
    group = case.model.group
    line = (
        f"{case.model.name:14} group {group} {case.batch} x {case.tokens:6} {case.layout:11}"
        f" {rate:6.2f} GB/s [{slowest:5.2f} - {fastest:5.2f}], {rate / probe_gbps:4.0%} of the"
        f" probe's {probe_gbps:.1f} (expected {EXPECTED_SHARE[group]:.0%})"
    )
    if samples.sdpa_s:
        speedup = statistics.median(samples.sdpa_s) / median
        line += f", {speedup:.1f} x SDPA (expected {EXPECTED_SPEEDUP[group]:g})"
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
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds a case, at least 5")
    parser.add_argument("--probe-mib", type=int, default=1024, help="well above the caches")
    parser.add_argument("--no-sdpa", action="store_true")
    parser.add_argument("--only", choices=("gqa", "mla"), help="one kind of attention")
    parser.add_argument("--max-mla-tokens", type=int, default=262144, help="batch x length at most, of MLA")
    parser.add_argument("--mla-heads", type=int, default=16, help="query heads: 16 V2-Lite, 128 V3")
    arguments = parser.parse_args()
    if arguments.rounds < 5:
        parser.error("--rounds must be at least 5")
    return arguments


def report_hand_over(threads: int, cores: list[int] | None) -> None:
    """What a job costs that has nothing to do, by whether those who wait for it sleep or spin. Torch's own threads would
    spin on the team's cores.
    """
    torch.set_num_threads(1)
    for name, spin_s in (("sleeping", 0.0), ("spinning", 2e-3)):
        with Executor(threads, cores, spin_s=spin_s) as executor:
            hand_over_seconds(executor)
            print(
                f"an empty job, {name} between jobs: {hand_over_seconds(executor) * 1e6:.1f} us", flush=True
            )


def main() -> None:
    arguments = parse()
    report_hand_over(arguments.threads, arguments.cores)
    # SDPA wants all threads. Where nothing else does, torch's own would only spin on the team's cores.
    torch.set_num_threads(1 if arguments.no_sdpa or arguments.only == "mla" else arguments.threads)
    torch.manual_seed(0)
    with Executor(arguments.threads, arguments.cores) as executor:
        print(f"{isa()}, {arguments.threads} threads, pages of {arguments.page_size} tokens")
        probe = huge_buffer(arguments.probe_mib << 20, executor)
        probe.fill_(1)
        for case in cases(arguments) if arguments.only != "mla" else ():
            samples = measure(case, executor, probe, arguments)
            print(report(case, len(probe), samples), flush=True)
        if arguments.only != "gqa":
            run_mla(executor, probe, arguments)


if __name__ == "__main__":
    main()
