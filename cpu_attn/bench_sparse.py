"""Decodes over lists of blocks and of entries, as part of python -m cpu_attn.bench.

Every round draws its lists anew from a pool far larger than the caches, as a selector does every step. Beside
the read probe stands a probe that reads as many pieces of the same size from anywhere in the pool, which is
what memory gives, and the same kernel over consecutive blocks, which shows what scattering costs.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cpu_attn.bench_inputs import MODELS, WAIT_S, Model, fill_random, page_table, paged_kv_of, some, spread
from cpu_attn.decode import DecodeArguments
from cpu_attn.executor import Executor, Job
from cpu_attn.paged import BlockTable, PagedKV, PagedLatent, PageTable
from cpu_attn.probe import Multiplier, huge_buffer

BLOCK_TOKENS = 32
LENGTHS = (512, 2048, 8192, 32768)  # tokens attended
BATCHES = (1, 4, 32)
MOST_OF_POOL = 0.5

# DeepSeek-V4: a row of 512 is key and value of 64 query heads, a query selects 512 of the rows of 2^20 tokens.
ROW, ENTRY_HEADS, SELECTED, CONTEXT = 512, 64, 512, 262144
ENTRY_PAGE = 64
ROW_BYTES = 2 * ROW
FLOPS_PER_BYTE = 2 * ENTRY_HEADS * 2 * ROW / ROW_BYTES

EXPECTED_SHARE = 0.50  # of the read probe, of entries of the roof; written before measuring


@dataclass(frozen=True)
class Case:
    """Requests of `context` tokens each, of which `selected` are attended in blocks."""

    title: str
    batch: int
    context: int
    selected: int
    block_size: int
    token_bytes: int
    piece_bytes: int  # contiguous

    @property
    def kv_bytes(self) -> int:
        return self.batch * self.selected * self.token_bytes

    def lists(self, scattered: bool) -> Tensor:
        """[batch, 1, blocks] int32, in random order or from a random one on."""
        blocks, count = self.context // self.block_size, self.selected // self.block_size
        rows = [
            torch.randperm(blocks)[:count]
            if scattered
            else int(torch.randint(blocks - count + 1, ())) + torch.arange(count)
            for _ in range(self.batch)
        ]
        return torch.stack(rows).int().unsqueeze(1)


@dataclass
class Samples:
    """Seconds of each round."""

    scattered_s: list[float] = field(default_factory=list)
    consecutive_s: list[float] = field(default_factory=list)
    pieces_s: list[float] = field(default_factory=list)
    probe_s: list[float] = field(default_factory=list)
    gflops: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Host:
    executor: Executor
    pool: Tensor  # random KV
    probe: Tensor
    rounds: int

    def measure(self, case: Case, kv: PagedKV | PagedLatent, table: PageTable, q: Tensor) -> Samples:
        """Time every kind of job in each round, in an order that turns."""
        multiplier, samples = Multiplier(self.executor), Samples()
        # Drawn beforehand: a pause before a job has its price.
        rounds = [self._jobs(case, kv, table, q) for _ in range(self.rounds + 1)]
        for turn, jobs in enumerate(rounds):
            first = turn % len(jobs)
            seconds = {}
            for name in [*jobs][first:] + [*jobs][:first]:
                job = jobs[name]()
                job.wait(WAIT_S)
                seconds[name] = job.seconds
            if turn > 0:  # the first is a warm-up
                for name, value in seconds.items():
                    getattr(samples, name).append(value)
                samples.gflops.append(multiplier.gflops())
        return samples

    def _jobs(
        self, case: Case, kv: PagedKV | PagedLatent, table: PageTable, q: Tensor
    ) -> dict[str, Callable[[], Job]]:
        scattered, consecutive = (
            DecodeArguments.check(
                q, kv, BlockTable(table, case.lists(scatter), case.block_size), q.shape[-1] ** -0.5
            )
            for scatter in (True, False)
        )
        pieces = torch.randperm(len(self.pool) // case.piece_bytes)[: case.kv_bytes // case.piece_bytes]
        starts = pieces * case.piece_bytes
        executor = self.executor
        return {
            "scattered_s": lambda: executor.submit_arguments(scattered),
            "pieces_s": lambda: executor.submit_read_pieces(self.pool, starts, case.piece_bytes),
            "consecutive_s": lambda: executor.submit_arguments(consecutive),
            "probe_s": lambda: executor.submit_read(self.probe),
        }


def report(case: Case, probe_bytes: int, samples: Samples, flops_per_byte: float | None = None) -> str:
    rates = [case.kv_bytes / s / 1e9 for s in samples.scattered_s]
    rate = statistics.median(rates)
    probe_gbps = probe_bytes / statistics.median(samples.probe_s) / 1e9
    pieces_gbps = case.kv_bytes / statistics.median(samples.pieces_s) / 1e9
    of_consecutive = [s / own for own, s in zip(samples.scattered_s, samples.consecutive_s)]
    expected = f"(expected {EXPECTED_SHARE:.0%})"
    line = (
        f"{case.title} {case.batch:2} x {case.selected:5} of {case.context:7} {spread(rates)} GB/s,"
        f" {rate / probe_gbps:4.0%} of the probe's {probe_gbps:.1f}"
    )
    if flops_per_byte is None:
        line += f" {expected}"
    else:
        roof = min(probe_gbps, statistics.median(samples.gflops) / flops_per_byte)
        line += f", {rate / roof:4.0%} of the roof {roof:.1f} {expected}"
    return (
        f"{line}, {rate / pieces_gbps:4.0%} of {pieces_gbps:.1f} in pieces of {case.piece_bytes} bytes,"
        f" {spread(of_consecutive)} of consecutive"
    )


def block_cases(model: Model, pool_bytes: int, page_size: int) -> Iterator[Case]:
    for batch in BATCHES:
        context = pool_bytes // model.token_bytes // batch // page_size * page_size
        for selected in LENGTHS:
            if selected <= MOST_OF_POOL * context:
                yield Case(
                    f"{model.title}, blocks of {BLOCK_TOKENS}", batch, context, selected, BLOCK_TOKENS,
                    model.token_bytes, BLOCK_TOKENS * model.head_dim * 2,
                )  # fmt: skip


def run_blocks(host: Host, page_size: int) -> None:
    for model in MODELS:
        page_bytes = page_size * model.token_bytes
        whole = host.pool[: len(host.pool) // page_bytes * page_bytes]
        cases = some(block_cases(model, len(whole), page_size), f"a pool of {len(whole)} bytes, {model.name}")
        if not cases:
            continue
        kv = paged_kv_of(whole, torch.bfloat16, model.kv_heads, page_size, model.head_dim)
        for case in cases:
            table = page_table(case.batch, case.context, page_size)
            q = torch.randn(case.batch, model.q_heads, model.head_dim).bfloat16()
            print(report(case, len(host.probe), host.measure(case, kv, table, q)), flush=True)


def run_entries(host: Host) -> None:
    rows = host.pool.view(torch.bfloat16).view(-1, ENTRY_PAGE, ROW)
    kv = PagedLatent([rows], lora_rank=ROW)
    context = min(CONTEXT, len(rows) * ENTRY_PAGE)
    pages = context // ENTRY_PAGE
    for batch in BATCHES:
        # Requests share the pool's contexts where there are more of them.
        page = torch.cat(
            [torch.arange(pages) + b * pages % (len(rows) // pages * pages) for b in range(batch)]
        )
        table = PageTable(
            torch.zeros(batch * pages, dtype=torch.int32),
            page.int(),
            torch.arange(0, batch * pages + 1, pages, dtype=torch.int32),
            torch.full((batch,), context, dtype=torch.int32),
        )
        title = f"rows of {ROW}, {ENTRY_HEADS} heads, entries"
        case = Case(title, batch, context, min(SELECTED, context // 2), 1, ROW_BYTES, ROW_BYTES)
        q = torch.randn(batch, ENTRY_HEADS, ROW).bfloat16()
        print(report(case, len(host.probe), host.measure(case, kv, table, q), FLOPS_PER_BYTE), flush=True)


def run(executor: Executor, probe: Tensor, arguments: argparse.Namespace) -> None:
    pool = huge_buffer(arguments.pool_mib << 20, executor)
    fill_random(pool, executor)
    host = Host(executor, pool, probe, arguments.rounds)
    run_blocks(host, arguments.page_size)
    run_entries(host)
