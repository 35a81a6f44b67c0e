"""python -m cpu_attn.bench over small sizes: every section runs, and its lines can be read. No time is checked."""

import os
import re
import sys
from pathlib import Path

import pytest
import torch

from cpu_attn import Executor, bench, bench_inputs, bench_layouts, bench_threads
from cpu_attn.bench_ggml import GgmlAttention
from cpu_attn.bench_layouts import FORMS, HUGE, PINNED, SMALL, Case, Samples, huge_share, pinned
from cpu_attn.probe import huge_buffer, small_page_buffer
from tests.cpu_attn.reference import attend

SPREAD = r" *\d+\.\d+ \[\d+\.\d+ - \d+\.\d+\]"
SMALL_SIZES = ["--threads", "2", "--rounds", "5", "--probe-mib", "16"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.setattr(bench_inputs, "COLD_BYTES", 32 << 20)
    monkeypatch.setattr(bench_threads, "TOKENS", 4096)
    threads = torch.get_num_threads()

    def run_section(section: str, *options: str) -> list[str]:
        bench.main(["--only", section, *SMALL_SIZES, *options])
        return capsys.readouterr().out.splitlines()

    yield run_section
    torch.set_num_threads(threads)


def count(lines: list[str], pattern: str) -> int:
    return sum(re.search(pattern, line) is not None for line in lines)


def test_gqa(run) -> None:
    lines = run("gqa", "--max-tokens", "2048")
    shares = (
        rf"{SPREAD} GB/s, +\d+% of the probe's \d+\.\d \(expected \d+%\),{SPREAD} x SDPA \(expected [\d.]+\)$"
    )
    assert count(lines, shares) == 4  # two models, two layouts
    assert count(lines, "an empty job") == 2


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("--threads 0", "--threads must be 1 to 1024, is 0"),
        ("--threads 2 --cores 0", "--threads 2 need as many --cores, got 1"),
        ("--cores 0,0", "argument --cores: 0,0 has a core twice"),
        ("--cores 0,x", "argument --cores: '0,x' is no list such as 0,2,4"),
        ("--cores 99999", "argument --cores: [99999] are outside the affinity of this process"),
        ("--page-size 48", "argument --page-size: 48 is no power of two up to 2048"),
        ("--page-size 4096", "argument --page-size: 4096 is no power of two up to 2048"),
        ("--probe-mib 0", "argument --probe-mib: 0 is not positive"),
        ("--pool-mib -1", "argument --pool-mib: -1 is not positive"),
        ("--mla-heads 0", "argument --mla-heads: 0 is not positive"),
        ("--rounds 4", "--rounds must be at least 5"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, options: str, line: str
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    with pytest.raises(SystemExit):
        bench.parse(options.split())
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"error: {line}")


def test_as_many_threads_as_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert bench.parse(["--cores", "2,0,1"]).threads == 3
    assert bench.parse([]).threads == bench.team_size()


@pytest.mark.parametrize(
    ("section", "limit"),
    [("gqa", "--max-tokens 2047"), ("mla", "--max-mla-tokens 0"), ("layouts", "--layout-mib 1")],
)
def test_a_section_without_a_case_says_so(run, section: str, limit: str) -> None:
    assert run(section, *limit.split())[-1] == f"no case within {limit}"


def test_a_pool_smaller_than_a_page(run) -> None:
    """Mixtral's, of 8 MiB; entries' pages are smaller."""
    lines = run("sparse", "--pool-mib", "7", "--page-size", "2048")
    assert "no case within a pool of 0 bytes, Mixtral-8x7B" in lines
    assert count(lines, "entries") == 3


def test_ggml_attends_as_we_do() -> None:
    pytest.importorskip("ggml")
    q, k, v = torch.randn(2, 8, 64), torch.randn(2, 2, 100, 64).half(), torch.randn(2, 2, 100, 64).half()
    out, seconds = GgmlAttention(2).decode(q, k, v, 0.1)
    for got, queries, keys, values in zip(out, q, k, v):
        want, _ = attend(queries, keys.transpose(0, 1), values.transpose(0, 1), 0.1)
        # ggml rounds queries and sums to fp16.
        torch.testing.assert_close(got.double(), want, rtol=0, atol=5e-3)
    assert seconds > 0


def test_ggml_is_asked_for_by_name_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ggml", None)
    with pytest.raises(RuntimeError, match="pip install ggml-python"):
        GgmlAttention(1)


def test_mla(run) -> None:
    lines = run("mla", "--max-mla-tokens", "2048")
    assert (
        count(lines, rf"^MLA 512\+64, 16 heads +1 x +2048{SPREAD} GB/s.* of the roof .*\(expected 50%\)$")
        == 1
    )


def test_threads(run) -> None:
    lines = run("threads")
    row = rf"^ +[12] threads{SPREAD} GB/s, .*{SPREAD} of what the probe gains \(expected 0\.85\)$"
    assert count(lines, row) == 4
    assert count(lines, "best share of the probe: ") == 2


@pytest.mark.parametrize(
    ("threads", "counts"), [(1, [1]), (2, [1, 2]), (7, [1, 2, 4, 6, 7]), (16, [1, 2, 4, 6, 8, 12, 16])]
)
def test_thread_counts(threads: int, counts: list[int]) -> None:
    assert bench_threads.thread_counts(threads) == counts


def test_sparse(run) -> None:
    lines = run("sparse", "--pool-mib", "64")
    blocks = (
        rf"blocks of 32 .*{SPREAD} GB/s, .*\(expected 50%\), .* pieces of 8192 bytes,{SPREAD} of consecutive$"
    )
    assert count(lines, blocks) >= 6
    entries = rf"^rows of 512, 64 heads, entries .*{SPREAD} GB/s.* of the roof .* pieces of 1024 bytes"
    assert count(lines, entries) == 3


@pytest.mark.parametrize("refused", [False, True])
def test_layouts(run, monkeypatch: pytest.MonkeyPatch, refused: bool) -> None:
    if refused:

        def refuse(buffer: torch.Tensor) -> None:
            raise OSError(1, "no more locked memory")

        monkeypatch.setattr(bench_layouts, "pinned", refuse)
    lines = run("layouts", "--layout-mib", "16")
    cases = count(lines, "1 x 8192$")
    assert cases == 2  # Qwen3 and MLA; Mixtral needs 32 MiB
    assert (
        count(lines, rf"^  \(a\) head-major, huge pages {SPREAD} GB/s, probe of that memory{SPREAD}$")
        == cases
    )
    assert count(lines, rf"^  \(e\) head-major, 4 KiB pages .*,{SPREAD} of \(a\)$") == cases
    assert count(lines, r"^  \(c\) token-major, huge pages ") == 1  # latent rows have one layout
    if refused:
        assert count(lines, "^  pinned: not measured, no more locked memory$") == cases
    if count(lines, "^  pinned: not measured"):  # the host may refuse as well
        assert count(lines, r"^  \([bd]\)") == 0
    else:
        assert count(lines, r"^  \(b\) head-major, huge pages, pinned") == cases


def test_ratios_are_of_one_round() -> None:
    """A round in which everything is slow moves no ratio."""
    case = Case(bench_inputs.MODELS[0], 1, 8192, 256)
    slow = [1.0, 1.0, 4.0]
    samples = Samples(
        {form: [s * (2 if form.token_major else 1) for s in slow] for form in reversed(FORMS)},
        {memory: [1.0] * 3 for memory in (HUGE, PINNED, SMALL)},
    )
    lines = bench_layouts.report(case, 1 << 30, samples).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["(a)", "(b)", "(c)", "(d)", "(e)"]
    assert [line.split(",")[-1].strip() for line in lines[3:5]] == ["0.50 [0.50 - 0.50] of (a)"] * 2


def test_pages_are_of_the_size_that_was_asked_for(executor: Executor) -> None:
    granted = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    if "[never]" in granted:
        pytest.skip("this host grants no huge pages")
    assert huge_share(huge_buffer(64 << 20, executor)) > 0.5
    assert huge_share(small_page_buffer(64 << 20, executor)) == 0


def test_pinned_memory_is_locked_while_it_lasts() -> None:
    if torch.cuda.is_available():
        pytest.skip("registered with CUDA instead")

    def locked_kib() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmLck:"))

    buffer, before = torch.zeros(1 << 20, dtype=torch.uint8), locked_kib()
    with pinned(buffer):
        assert locked_kib() >= before + 1024
    assert locked_kib() == before
