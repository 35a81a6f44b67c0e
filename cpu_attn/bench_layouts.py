"""What each physical form of the KV is worth, as part of python -m cpu_attn.bench.

The same kernel over the same shapes in five forms: what a server keeps for the CPU, (a), what it keeps for
DMA, (d), the two between them, and (e), (a) without huge pages. Forms take turns, each round begun by another
one, and a ratio is of two decodes of one round. Every kind of memory is probed in the same rounds.
"""

import argparse
import contextlib
import ctypes
import errno
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from cpu_attn.bench_inputs import MODELS, WAIT_S, Model, fill_random, page_table, paged_kv_of, some, spread
from cpu_attn.bench_mla import LORA_RANK, ROW_BYTES, WIDTH
from cpu_attn.decode import DecodeArguments
from cpu_attn.executor import Executor
from cpu_attn.paged import PagedKV, PagedLatent
from cpu_attn.probe import huge_buffer, small_page_buffer

SIZES = ((1, 8192), (1, 32768), (4, 32768))  # batch x tokens
MLA_HEADS = 16
PORTABLE_MAPPED = 3  # flags of cudaHostRegister: of every context, and readable by kernels

HUGE, PINNED, SMALL = "huge pages", "huge pages, pinned", "4 KiB pages"


@dataclass(frozen=True)
class Form:
    letter: str
    token_major: bool
    memory: str

    @property
    def title(self) -> str:
        return f"({self.letter}) {'token' if self.token_major else 'head'}-major, {self.memory}"


FORMS = (
    Form("a", False, HUGE),
    Form("b", False, PINNED),
    Form("c", True, HUGE),
    Form("d", True, PINNED),
    Form("e", False, SMALL),
)


@dataclass(frozen=True)
class Case:
    model: Model | None  # None: latent rows, which have one head and so one layout
    batch: int
    tokens: int
    page_size: int

    @property
    def title(self) -> str:
        name = self.model.title if self.model else f"MLA {LORA_RANK}+{WIDTH - LORA_RANK}, {MLA_HEADS} heads"
        return f"{name} {self.batch} x {self.tokens}"

    @property
    def kv_bytes(self) -> int:
        return self.batch * self.tokens * (self.model.token_bytes if self.model else ROW_BYTES)

    @property
    def forms(self) -> tuple[Form, ...]:
        return FORMS if self.model else tuple(form for form in FORMS if not form.token_major)

    def queries(self) -> Tensor:
        heads, width = (self.model.q_heads, self.model.head_dim) if self.model else (MLA_HEADS, WIDTH)
        return torch.randn(self.batch, heads, width).bfloat16()

    def view(self, buffer: Tensor, form: Form) -> PagedKV | PagedLatent:
        if self.model is None:
            return PagedLatent([buffer.view(torch.bfloat16).view(-1, self.page_size, WIDTH)], LORA_RANK)
        kv_heads, head_dim = self.model.kv_heads, self.model.head_dim
        return paged_kv_of(buffer, torch.bfloat16, kv_heads, self.page_size, head_dim, form.token_major)


def pin_method() -> str:
    return "cudaHostRegister" if torch.cuda.is_available() else "mlock, as there is no CUDA"


@contextlib.contextmanager
def pinned(buffer: Tensor) -> Iterator[None]:
    """Register `buffer` with CUDA, or keep it in memory where there is none. Raises OSError if that is refused."""
    address = ctypes.c_void_p(buffer.data_ptr())
    size = ctypes.c_size_t(buffer.nbytes)
    if torch.cuda.is_available():
        cudart = torch.cuda.cudart()
        code = int(cudart.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, PORTABLE_MAPPED))
        if code:
            raise OSError(
                errno.ENOMEM, f"CUDA error {code} registering {buffer.nbytes} bytes: raise ulimit -l"
            )
        try:
            yield
        finally:
            cudart.cudaHostUnregister(buffer.data_ptr())
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlock(address, size):
        raise OSError(ctypes.get_errno(), f"mlock of {buffer.nbytes} bytes: raise ulimit -l")
    try:
        yield
    finally:
        libc.munlock(address, size)


def huge_share(buffer: Tensor, smaps: Path = Path("/proc/self/smaps")) -> float:
    """Share of the mapping around `buffer` that lies in huge pages."""
    size = huge = 0
    inside = False
    for line in smaps.read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= buffer.data_ptr() < int(bounds[2], 16)
        elif inside and line.startswith("Size:"):
            size = int(line.split()[1])
        elif inside and line.startswith("AnonHugePages:"):
            huge = int(line.split()[1])
    return huge / size if size else 0.0


@dataclass
class Samples:
    """Seconds of each round."""

    kernel_s: dict[Form, list[float]] = field(default_factory=dict)
    probe_s: dict[str, list[float]] = field(default_factory=dict)


def time_round(
    case: Case, executor: Executor, memories: dict[str, Tensor], turn: int, samples: Samples | None
) -> None:
    """Every form over its next KV set, begun by another form each time, then the probe of every memory."""
    forms = [form for form in case.forms if form.memory in memories]
    table, q = page_table(case.batch, case.tokens, case.page_size), case.queries()
    first = turn % len(forms)
    for form in forms[first:] + forms[:first]:
        sets = memories[form.memory].split(case.kv_bytes)
        # Two forms lie in one memory: far apart, or the second would find the caches warm.
        index = turn + (len(sets) // 2 if form.token_major else 0)
        kv = case.view(sets[index % len(sets)], form)
        job = executor.submit_arguments(DecodeArguments.check(q, kv, table, q.shape[-1] ** -0.5))
        job.wait(WAIT_S)
        if samples:
            samples.kernel_s.setdefault(form, []).append(job.seconds)
    for memory, buffer in memories.items():
        job = executor.submit_read(buffer)
        job.wait(WAIT_S)
        if samples:
            samples.probe_s.setdefault(memory, []).append(job.seconds)


def measure(case: Case, executor: Executor, layout_bytes: int, rounds: int) -> str:
    size_bytes = layout_bytes // case.kv_bytes * case.kv_bytes
    memories = {
        HUGE: huge_buffer(size_bytes, executor, case.kv_bytes),
        PINNED: huge_buffer(size_bytes, executor, case.kv_bytes),
        SMALL: small_page_buffer(size_bytes, executor, case.kv_bytes),
    }
    for buffer in memories.values():
        fill_random(buffer, executor)
    share = huge_share(memories[HUGE])
    notes = [f"  only {share:.0%} of (a) lies in huge pages"] if share < 0.95 else []
    samples = Samples()
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(pinned(memories[PINNED]))
        except OSError as error:
            notes.append(f"  pinned: not measured, {error.strerror}")
            del memories[PINNED]
        time_round(case, executor, memories, 0, None)  # a warm-up
        for turn in range(1, rounds + 1):
            time_round(case, executor, memories, turn, samples)
    return "\n".join([report(case, size_bytes, samples), *notes])


def report(case: Case, probe_bytes: int, samples: Samples) -> str:
    lines = [case.title]
    reference = samples.kernel_s[FORMS[0]]
    # In the order of FORMS: rounds begin with any.
    for form in sorted(samples.kernel_s, key=lambda form: form.letter):
        seconds = samples.kernel_s[form]
        rates = [case.kv_bytes / s / 1e9 for s in seconds]
        probes = [probe_bytes / s / 1e9 for s in samples.probe_s[form.memory]]
        ratios = [base / s for base, s in zip(reference, seconds)]
        line = f"  {form.title:35} {spread(rates)} GB/s, probe of that memory {spread(probes, 1)}"
        lines.append(line if form is FORMS[0] else f"{line}, {spread(ratios)} of (a)")
    return "\n".join(lines)


def cases(page_size: int, layout_bytes: int) -> Iterator[Case]:
    for model in (*MODELS, None):
        for batch, tokens in SIZES:
            case = Case(model, batch, tokens, page_size)
            if case.kv_bytes <= layout_bytes:
                yield case


def run(executor: Executor, probe: Tensor, arguments: argparse.Namespace) -> None:
    print(f"layouts, {arguments.layout_mib} MiB in each kind of memory, pinned by {pin_method()}")
    limit = f"--layout-mib {arguments.layout_mib}"
    for case in some(cases(arguments.page_size, arguments.layout_mib << 20), limit):
        print(measure(case, executor, arguments.layout_mib << 20, arguments.rounds), flush=True)
