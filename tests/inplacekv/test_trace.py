"""The trace of a server's decode steps: what is written, what is read back, and the picture of it."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from unittest import mock
from xml.etree import ElementTree

import pytest

from sglang_inplacekv import build, cli
from sglang_inplacekv.config import ConfigError
from sglang_inplacekv.feedback import Costs
from sglang_inplacekv.metrics import StepMetrics
from sglang_inplacekv.models import checkpoint_path, make_tiny
from sglang_inplacekv.trace import _BUFFERED_STEPS, TracedStep, TraceWriter, check_path, read_trace
from sglang_inplacekv.trace_plot import _MOST_POINTS, summary, trace_svg
from tests.harness import Runner
from tests.inplacekv.simulation import Simulation
from tests.inplacekv.startup import refusal, restored_environment, write_config

STEP = TracedStep(
    step=1, requests=2, tokens=120, host_tokens=100, target=0.5, effective=0.4, stolen=20, D=20, C=20, T=80, window=4
)  # fmt: skip


def written(path: Path, steps: int = 3) -> Path:
    writer = TraceWriter(path)
    for number in range(1, steps + 1):
        write(writer, number, Costs(cpu_s=0.25, transfer_s=0.5, exposed_s=0.125))
    writer.flush()
    return path


def write(writer: TraceWriter, number: int, costs: Costs) -> None:
    """A step of a second, right after the one before."""
    began_s = writer._began_s + number
    writer.begin(replace(STEP, step=number), began_s)
    writer.end(costs, began_s + 1)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    steps, note = read_trace(written(tmp_path / "trace", steps=2 * _BUFFERED_STEPS + 1))
    assert note is None and len(steps) == 2 * _BUFFERED_STEPS + 1
    for number, step in enumerate(steps, start=1):
        assert step == replace(
            STEP, step=number, at_s=number, wall_s=1.0, cpu_s=0.25, transfer_s=0.5, exposed_s=0.125
        )


def test_costs_between_two_steps_are_those_of_the_next(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "trace")
    write(writer, 1, Costs(cpu_s=1.0))
    writer.end(Costs(cpu_s=1.0), time.perf_counter())  # no step is open: a prefill begins
    write(writer, 2, Costs(cpu_s=1.0, transfer_s=0.5))
    writer.flush()
    assert [(step.cpu_s, step.transfer_s) for step in read_trace(tmp_path / "trace")[0]] == [
        (1.0, 0.0),
        (2.0, 0.5),
    ]


def test_steps_are_written_by_the_dozen(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    writer = TraceWriter(path)
    sizes = []
    for number in range(1, _BUFFERED_STEPS + 1):
        write(writer, number, Costs())
        sizes.append(path.stat().st_size)
    assert not any(sizes[:-1]) and sizes[-1]


def test_a_full_disk_ends_the_trace_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = full(tmp_path / "trace")
    for number in range(1, 3 * _BUFFERED_STEPS):
        write(writer, number, Costs())
    writer.flush()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert (
        record.message
        == f"--inplacekv-trace: the trace ends here: {tmp_path / 'trace'}: No space left on device"
    )


def full(path: Path) -> TraceWriter:
    """A writer whose disk is full."""
    writer, device = TraceWriter(path), os.open("/dev/full", os.O_WRONLY)
    os.dup2(device, writer._file)
    os.close(device)
    return writer


def test_nothing_is_collected_for_a_trace_that_has_ended(tmp_path: Path) -> None:
    sim = Simulation(share=0.0, device_pages=4, host_pages=4, seed=1)
    metrics = StepMetrics(sim.regions, None, mock.Mock(), full(tmp_path / "trace"))
    with mock.patch.object(TraceWriter, "begin", autospec=True, side_effect=TraceWriter.begin) as begun:
        for _ in range(_BUFFERED_STEPS + 9):
            metrics.observe_device_decode([], time.perf_counter())
            metrics.end_step(Costs(), time.perf_counter())
        metrics.idle()
    assert begun.call_count == _BUFFERED_STEPS
    sim.close()


def test_one_server_writes_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    first, error = TraceWriter(path), "an earlier trace: another server writes it$"
    for number in (1, 2):  # an empty file, and one that holds something
        for second in (TraceWriter, check_path):
            with pytest.raises(ConfigError, match=f"^--inplacekv-trace: asked '{path}', .* {error}"):
                second(path)
        write(first, number, Costs())
        first.flush()
    assert len(read_trace(path)[0]) == 2
    del first
    TraceWriter(path)
    assert not path.stat().st_size


def test_a_server_that_does_not_start_leaves_the_earlier_trace(tmp_path: Path) -> None:
    path = written(tmp_path / "trace")
    before = path.read_bytes()
    with mock.patch.object(build, "make_executor", side_effect=RuntimeError("no memory")):
        with pytest.raises(RuntimeError, match="no memory"):
            with traced_server(path):
                pass
    assert path.read_bytes() == before


def test_an_earlier_trace_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    path = written(tmp_path / "trace", steps=9)
    written(path, steps=2)
    assert len(read_trace(path)[0]) == 2
    for text in ("dear diary", '{"step": 1, "loss": 2.31}\n', '{"step":1,"loss":2.31}\n'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="it exists and is no trace"):
            TraceWriter(path)
        assert path.read_text() == text


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (".", "it is no regular file"),
        ("none/trace", "its folder does not exist"),
        ("x" * 300, "File name too long"),
    ],
)
def test_a_place_where_no_trace_can_go_is_refused_at_start_up(name: str, why: str, tmp_path: Path) -> None:
    model, path = write_config(tmp_path / "model"), tmp_path / name
    with restored_environment():
        os.environ["SGLANG_INPLACEKV_TRACE"] = str(path)
        assert refusal(model) == (
            f"--inplacekv-trace: asked {str(path)!r}, possible are off, a new file and an earlier trace: {why}"
        )


# inplacekv trace


def line(**values) -> str:
    return json.dumps(vars(STEP) | values) + "\n"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (None, " cannot be read: No such file or directory"),
        ("", " holds no decode step"),
        ('{"step":1', ", line 1: no whole line"),
        ("\n", ", line 1: no JSON"),
        ("\0\xff\n", ", line 1: no JSON"),
        ("[" * 100_000 + "\n", ", line 1: no JSON"),
        ("[]\n", ", line 1: a list, possible is an object"),
        (line() + '{"step"\n' + line(step=2), ", line 2: no JSON"),
        ("{}\n", ", line 1: no step"),
        (line(C=1.5), ", line 1: C is '1.5', possible is a whole number"),
        (line(C=True), ", line 1: C is 'True', possible is a whole number"),
        (line(target="x"), ", line 1: target is 'x', possible is a number"),
        (line(target=float("nan")), ", line 1: target is nan, possible is a number from 0 to 2**63"),
        (line(wall_s=-1), ", line 1: wall_s is -1, possible is a number from 0 to 2**63"),
        (line(step=10**400), f", line 1: step is 1{'0' * 39}, possible is a number from 0 to 2**63"),
        (line() + line(), ", line 2: step 1 after step 1"),
        (line(at_s=2.5) + line(step=2, at_s=2.4), ", line 2: it begins before step 1"),
        (line(effective=1.5), ", line 1: effective is 1.5, possible is a share from 0 to 1"),
    ],
)
def test_a_file_that_is_no_trace_gets_one_line(
    text: str | None, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace"
    if text is not None:
        path.write_text(text, encoding="latin-1")
    assert cli.main(["trace", str(path), "--out", str(tmp_path / "out.svg")]) == 2
    assert capsys.readouterr().err == f"error: {path}{error}\n"
    assert not (tmp_path / "out.svg").exists()


def test_a_last_line_that_was_cut_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = written(tmp_path / "trace", steps=3), tmp_path / "out.svg"
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    assert cli.main(["trace", str(path), "--out", str(out)]) == 0
    captured = capsys.readouterr()
    assert captured.err == f"note: {path} ends in the middle of line 3, which is left out\n"
    assert captured.out.startswith("2 decode steps in ") and out.exists()


def test_out_must_be_another_file_that_can_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "trace")
    before = path.read_bytes()
    assert cli.main(["trace", str(path), "--out", str(path)]) == 2
    assert "which is the trace itself" in capsys.readouterr().err and path.read_bytes() == before
    other = written(tmp_path / "other")
    assert cli.main(["trace", str(path), "--out", str(other)]) == 2
    assert "which is a trace\n" in capsys.readouterr().err and other.read_bytes() == before
    assert cli.main(["trace", str(path), "--out", str(tmp_path / "none/out.svg")]) == 2
    assert re.search(r"^error: --out: .*out.svg cannot be written: No such file", capsys.readouterr().err)


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_name_that_cannot_be_printed(
    encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = written(tmp_path / "trace"), tmp_path / os.fsdecode(b"\xc3\xa9\xff.svg")
    with open(tmp_path / "printed", "w", encoding=encoding) as printed:
        monkeypatch.setattr(sys, "stdout", printed)
        assert cli.main(["trace", str(path), "--out", str(out)]) == 0
    assert out.exists() and (tmp_path / "printed").read_bytes().endswith(b"\\udcff.svg\n")


def test_the_end_of_a_long_trace_has_numbers() -> None:
    steps = [replace(STEP, step=n) for n in range(1_000_001, 1_000_100)]
    texts = [element.text for element in ElementTree.fromstring(trace_svg(steps)).iter() if element.text]
    assert {"1000020", "1000040", "1000080"} <= set(texts)


@pytest.mark.parametrize("count", [1, 2, _MOST_POINTS + 1, 5 * _MOST_POINTS])
def test_every_length_is_plotted_to_the_end(count: int) -> None:
    steps = [replace(STEP, step=n, wall_s=n * 1e-3, effective=n / count) for n in range(1, count + 1)]
    picture = ElementTree.fromstring(trace_svg(steps))
    curves = [element.get("points").split() for element in picture.iter() if element.get("points")]
    assert len(curves) == 2 + 3 + 1 + 4
    for curve in curves:
        places = [[float(value) for value in point.split(",")] for point in curve]
        assert all(70 <= x <= 730 and 58 <= y <= 248 for x, y in places)
        assert 2 <= len(curve) <= 2 * _MOST_POINTS
        assert min(x for x, _ in places) <= 71.5 and max(x for x, _ in places) >= 728.5
    words = " ".join(element.text or "" for element in picture.iter())
    for word in ("target", "effective", "D", "C", "T", "step", "CPU", "transfer", "exposed", "decode step"):
        assert word in words


def test_a_trace_without_host_tokens_or_time() -> None:
    steps = [replace(STEP, step=n, host_tokens=0, D=0, C=0, T=0, window=0) for n in (1, 2)]
    assert ElementTree.fromstring(trace_svg(steps)) is not None
    assert "share target          -          -          -" in summary(steps)
    assert "0 of them with host tokens; of transfers hidden: -; " in summary(steps)


def test_summary() -> None:
    costs = {"cpu_s": 0.002, "transfer_s": 0.004, "exposed_s": 0.001}
    steps = [replace(STEP, step=n, at_s=n, wall_s=n / 1e3, effective=n / 10, **costs) for n in (1, 2, 3, 4)]
    first, _, *rows = summary(steps).splitlines()
    assert (
        first
        == "4 decode steps in 3.0 s, 4 of them with host tokens; of transfers hidden: 0.75; stolen tokens: 80"
    )
    table = {row[:18].strip(): row[18:].split() for row in rows}
    assert table["share effective"] == ["0.25", "0.10", "0.40"]
    assert table["step ms"] == ["2.50", "1.00", "4.00"]
    assert table["exposed ms"] == ["1.00", "1.00", "1.00"]
    assert table["T tokens"] == ["80", "80", "80"]


def traced_server(path: Path) -> Runner:
    settings = {
        "HOST_MEMORY": "16MB",
        "GPU_MEMORY": "64tok",
        "TILE_TOKENS": "64",
        "THREADS": "1",
        "ADMISSION": "spill",
        "TRACE": str(path),
    }
    model = make_tiny("qwen3_moe", checkpoint_path("tiny-qwen3_moe"))
    env = {f"SGLANG_INPLACEKV_{name}": value for name, value in settings.items()}
    return Runner(model, chunked_prefill_size=64, backend="inplacekv", env=env, max_total_tokens=None)


def test_a_server_traces_every_decode_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Requests that stay in D, then some that spill, with a prefill in between."""
    path, out = tmp_path / "trace.jsonl", tmp_path / "trace.svg"
    with traced_server(path) as runner:
        runner.generate([list(range(5, 25))], max_new_tokens=5)
        runner.generate([list(range(100, 400)), list(range(400, 440))], max_new_tokens=20)
        runner.idle_check()
        totals = runner.kv_pool.metrics.totals
    steps, note = read_trace(path)
    assert note is None
    assert [step.step for step in steps] == list(range(1, len(steps) + 1))
    in_device = [step for step in steps if not step.host_tokens]
    assert 4 <= len(in_device) < len(steps)
    assert all(step.effective == 0 and step.requests == 1 and step.D > 0 for step in in_device)
    spilled = [step for step in steps if step.host_tokens]
    assert max(step.requests for step in spilled) == 2
    assert all(step.host_tokens <= step.C + step.T for step in spilled)
    assert all(step.wall_s > 0 for step in steps) and any(step.cpu_s > 0 for step in spilled)
    assert sum(step.stolen for step in spilled) > 0
    # The times are rounded. Between two decodes lie planning and nothing else, except where a prefill or idling did.
    apart = [after.at_s - before.at_s - before.wall_s for before, after in pairwise(steps)]
    assert min(apart) > -2e-6 and sum(gap > 2e-6 for gap in apart) <= 3, apart
    for name, total in (("cpu_s", "cpu_attention_seconds"), ("exposed_s", "exposed_transfer_seconds")):
        assert sum(getattr(step, name) for step in steps) == pytest.approx(
            totals[total], abs=1e-6 * len(steps)
        )
    assert cli.main(["trace", str(path), "--out", str(out)]) == 0
    assert capsys.readouterr().out.startswith(f"{len(steps)} decode steps in ")
    assert ElementTree.parse(out).getroot().tag.endswith("svg")
