"""What of the GPU benchmarks runs on a CPU: every case on a tiny model, statistics, tables and pictures."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from benchmarks import cases, gpu, plots, report
from benchmarks.cases import plan_served
from benchmarks.model import PAGE_TOKENS
from benchmarks.plot_timeline import middle
from benchmarks.prompts import Streams
from benchmarks.results import Budget, Part, read_parts, rows_of
from benchmarks.scale import SMOKE, Shape
from benchmarks.server import Server
from benchmarks.servers import BENCHMARKS, NONE, OURS, SERVERS, STOCK, ServerSetting
from benchmarks.stats import Spread, number, step_windows, tokens_for
from benchmarks.trace import CPU, TRACE_FILE, Interval, common, lane_of, total
from benchmarks.worker import Context, opened, run_benchmark
from sglang_inplacekv.host_rates import AttentionRates, TeamRates
from sglang_inplacekv.models import checkpoint_path, make_tiny
from sglang_inplacekv.planning import STEP_START_S
from sglang_inplacekv.probes import HostRates
from sglang_inplacekv.roofline import Line, balanced_share, layer_seconds
from sglang_inplacekv.svg import ticks
from tests.harness import Runner
from tests.harness.lifecycle import torch_threads

from .samples import HEAD_US, LAYER_US, LAYERS, timeline, write_parts

LONGEST_TOKENS = 512


@contextmanager
def tiny_server(side: str, extra_env: Mapping[str, str] = {}, **settings) -> Iterator[Server]:
    model = make_tiny("qwen3_moe", checkpoint_path("tiny-qwen3_moe"))
    env = {
        "SGLANG_INPLACEKV_HOST_MEMORY": "16MB",
        "SGLANG_INPLACEKV_GPU_MEMORY": "0tok",
        "SGLANG_INPLACEKV_THREADS": "1",
        "SGLANG_INPLACEKV_CPU_SHARE": "0.5",
        **extra_env,
    }
    own = {"backend": "inplacekv", "env": env} if side == OURS else {"page_size": 1}
    with Runner(model, chunked_prefill_size=64, **own | settings) as runner:
        server = Server(runner, LONGEST_TOKENS)
        server.warm_up(32)
        yield server


def measured(name: str, server: Server | None, side: str, out: Path, scale=SMOKE) -> Part:
    part = Part(out / "parts" / f"{name}.{side}.json", name, side, side, Budget(120))
    run_benchmark(Context(ServerSetting(side, side, (name,)), server, scale, part, out))
    assert not part.problems, part.problems
    return part


def test_a_server_s_steps_are_foretold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `plan` would from the same rates: a layer of 1 ms and 1 us a token, a link of 1 MB/s, that is 1 us a byte."""
    team = TeamRates(1, 1e10, 0.0, 1e-6)
    rates = HostRates((team,), 1e6, AttentionRates(1, 1e-3, 1e-6, 1e6), kept=True)
    monkeypatch.setattr(plan_served, "host_rates", lambda model, device: rates)
    own = {"SGLANG_INPLACEKV_GPU_MEMORY": "128tok", "SGLANG_INPLACEKV_CPU_SHARE": "auto"}
    with tiny_server(OURS, max_total_tokens=None, extra_env=own) as server:
        part = measured("plan_served", server, OURS, tmp_path)
        shape, sizes = server.ours.regions.shape, server.ours.regions.sizes
    assert len(part.rows) == len(SMOKE.share.served_shapes)
    for row, served in zip(part.rows, SMOKE.share.served_shapes, strict=True):
        pages = served.batch * -(-served.context // sizes.page_size) - sizes.device_pages
        assert row["predicted_host_bytes"] == pages * shape.page_bytes > 0
        tokens, rest_s = pages * sizes.page_size, row["resident_ms"] / 1e3
        cpu = Line(1e-3 + rest_s / shape.layers, 1e-6)
        link = Line(0.0, shape.token_bytes / shape.layers / 1e6)
        share = balanced_share(cpu, link, tokens)
        step_s = max(rest_s, shape.layers * layer_seconds(share, cpu, link, tokens)) + STEP_START_S
        assert row["predicted_share"] == pytest.approx(share) and share > 0.5
        assert row["predicted_ms"] == pytest.approx(1e3 * step_s)
        assert row["step_ms"].count == SMOKE.share.plan_steps and row["step_ms"].least > 0
        # It is as long as it was when it was foretold, and what has been generated.
        assert 0 <= row["host_bytes"] - row["predicted_host_bytes"] <= shape.page_bytes
        assert 0 < row["controlled_share"] <= 1 and row["rates_kept"]
    assert "plan / measured" in report.report([tmp_path])


def test_our_server_runs_every_case(tmp_path: Path) -> None:
    with tiny_server(OURS, max_total_tokens=None) as server:
        parts = {
            name: measured(name, server, OURS, tmp_path)
            for name in ("fits", "prefill", "decode_sweep", "long", "million", "queueing", "timeline")
        }
    for row in parts["decode_sweep"].rows:
        assert row["step_ms"].count == SMOKE.sweep_steps
        assert abs(row["effective_share"] - row["share"]) < 0.1
        shape = next(shape for shape in SMOKE.sweep if str(shape) == row["case"])
        assert sum(row["attended_tokens"].values()) > shape.batch * shape.context
    assert len(parts["prefill"].rows) == len(SMOKE.prefill_shares) * len(SMOKE.prefill_tokens)
    for row in parts["prefill"].rows:
        assert row["first_token_ms"].count == SMOKE.prefill_repeats[row["tokens"]]
    assert parts["long"].rows[0]["outcome"] == "runs"
    assert parts["million"].rows[0]["first_token_max_s"] < parts["million"].rows[0]["end_to_end_s"]
    assert parts["queueing"].rows[0]["output_tokens_per_s"] > 0
    assert parts["timeline"].rows[0]["CPU attention, us"] > 0
    traced = json.loads((tmp_path / TRACE_FILE).read_text())
    assert sum(interval["lane"] == CPU for interval in traced["intervals"]) == traced["layers"]
    assert set(report.report([tmp_path]).split()) >= {"decode_sweep", "million", "queueing"}
    assert json.loads((tmp_path / TRACE_FILE).read_text()) == traced


def test_stock_server_refuses_what_is_too_long(tmp_path: Path) -> None:
    with tiny_server(STOCK, max_total_tokens=256) as server:
        fits = measured("fits", server, STOCK, tmp_path)
        long = measured("long", server, STOCK, tmp_path)
    assert [row["case"] for row in fits.rows] == [str(shape) for shape in SMOKE.fits]
    assert fits.rows[0]["step_ms"].count == SMOKE.windows
    assert "exceeds" in long.rows[0]["outcome"]
    assert type(long.rows[0]["gpu_kv_bytes"]) is int  # a NumPy integer is none in JSON


def test_cases_without_a_model(tmp_path: Path) -> None:
    scale = replace(SMOKE, sweep=(Shape(2, 512),))
    stream = measured("transfer", None, "none", tmp_path, scale)
    assert {row["what"] for row in stream.rows} >= {
        "DRAM read alone",
        "T stream under attention, scattered pages",
    }
    attention = measured("attention", None, "none", tmp_path, scale)
    assert [row["effective_share"] for row in attention.rows] == [0.5, 0.0]


def test_share_cases(tmp_path: Path) -> None:
    sweep = measured("share_sweep", None, "none", tmp_path)
    controlled = [row for row in sweep.rows if row["what"] == "controlled"]
    assert len(controlled) == len(SMOKE.share.models) * len(SMOKE.share.shapes)
    for row in controlled:
        own = [other for other in sweep.rows if other["what"] == "sweep" and other["case"] == row["case"]]
        # The controller may have moved on since the shares were chosen.
        assert {row["predicted_share"], 0.0, 1.0} <= {other["share"] for other in own}
        assert row["placed_floor"] <= row["auto_share"]
        assert row["auto_fixed_us"] > 0 and 0 < row["resident_ms"] <= row["predicted_ms"]
    plan = measured("plan_step", None, "none", tmp_path)
    assert len(plan.rows) == len(SMOKE.share.models) * len(SMOKE.share.plan_shapes)
    assert all(
        0 < row["resident_ms"] <= row["predicted_ms"] and row["step_ms"].least > 0 for row in plan.rows
    )
    growing = measured("share_growing", None, "none", tmp_path)
    assert [row["share"] for row in growing.rows] == ["auto", *SMOKE.share.growing_shares]
    assert [row["shares"] for row in growing.rows[1:]] == [
        {"2K": share} for share in SMOKE.share.growing_shares
    ]
    hogs = measured("share_hogs", None, "none", tmp_path)
    assert [row["what"] for row in hogs.rows] == [
        f"{hog}, {how}" for hog in ("link hog", "CPU hog") for how in ("stealing", "placed")
    ]
    assert all(row["difference"] < 1e-5 for row in hogs.rows), "fp32, whatever the share"
    text = report.report([tmp_path])
    assert "no table" not in text and "of the best fixed one" in text and "plan / measured" in text
    drawn = {path.name: path for path in plots.draw([tmp_path], tmp_path)}
    assert drawn.keys() == {
        "share_growing.svg",
        "share_hogs.svg",
        "share_hogs_ms.svg",
        *(f"share_sweep_{model}.svg" for model in SMOKE.share.models),
    }
    for path in drawn.values():
        assert len(ElementTree.fromstring(path.read_text())) > 20


def test_without_a_model_torch_keeps_to_one_thread(tmp_path: Path) -> None:
    with torch_threads(2), opened(ServerSetting("no_model", NONE, ()), tmp_path, None, SMOKE):
        assert torch.get_num_threads() == 1


def test_streams_share_beginnings_only_with_themselves() -> None:
    streams = Streams(512, 64)
    assert streams.prompt(3, 64)[:10] == streams.prompt(3, 10)
    assert streams.prompt(3, 64) != streams.prompt(4, 64)
    assert streams.fresh(8) != streams.fresh(8)
    assert min(streams.prompt(0, 64)) >= 5 and max(streams.prompt(0, 64)) < 512


def test_step_windows_drop_the_warm_up_and_the_end() -> None:
    stamps = [0.0, 9.0, *(10.0 + step for step in range(8)), 17.01, 17.02]
    assert step_windows(stamps, warmup_steps=2, window_steps=3) == [1.0, 1.0]
    with pytest.raises(ValueError, match="no repetition"):
        Spread.of(step_windows(stamps[:3], warmup_steps=2, window_steps=3))


@pytest.mark.parametrize("first_together", [True, False])
def test_tokens_suffice_for_the_steps(first_together: bool) -> None:
    stamps = [float(step) for step in range(tokens_for(10) - (not first_together))]
    assert len(step_windows(stamps, warmup_steps=4, window_steps=3)) == 2


def test_no_step_is_timed_where_requests_are_never_together() -> None:
    assert step_windows([], warmup_steps=2, window_steps=1) == []


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.0123, "0.0123"), (1.005, "1.00"), (43.21, "43.2"), (760429.0, "760429")],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize("top", [0.3, 1.0, 7.2, 499.0, 1234.0])
def test_ticks_cover_the_data(top: float) -> None:
    found = ticks(top)
    assert found[0] == 0 and found[-1] >= top and 3 <= len(found) <= 7


def test_failures_and_an_empty_budget_are_recorded(tmp_path: Path) -> None:
    part = Part(tmp_path / "parts" / "x.json", "fits", "stock", STOCK, Budget(60))
    assert not part.attempt("division", lambda: 1 / 0)
    assert not part.attempt("too late", lambda: None, needs_s=1e6)
    assert part.attempt("fine", lambda: part.row(case="1 x 8K", step_ms=Spread.of([1.0, 3.0, 2.0])))
    (stored,) = read_parts([tmp_path])["fits"]
    assert [problem["what"] for problem in stored["problems"]] == ["division", "too late"]
    assert rows_of([stored], side=STOCK)[0]["step_ms"] == Spread(2.0, 1.0, 3.0, 3)


def test_what_json_has_no_form_for_is_refused_and_harms_no_other_row(tmp_path: Path) -> None:
    part = Part(tmp_path / "parts" / "x.json", "fits", "stock", STOCK, Budget(60))
    assert not part.attempt("bytes", lambda: part.row(case="1 x 8K", gpu_kv_bytes=np.int64(3)))
    assert part.attempt("fine", lambda: part.row(case="1 x 32K", gpu_kv_bytes=3))
    (stored,) = read_parts([tmp_path])["fits"]
    assert [row["case"] for row in stored["rows"]] == ["1 x 32K"]
    assert "int64" in stored["problems"][0]["error"]


def test_a_server_that_dies_leaves_its_last_words(tmp_path: Path) -> None:
    arguments = Namespace(out=tmp_path, layers=None, quick=True)
    setting = ServerSetting("no_such_server", STOCK, ("fits",), needs_s=1.0)
    earlier = Part(tmp_path / "parts" / "fits.no_such_server.json", "fits", setting.name, STOCK, Budget(60))
    earlier.save()
    error = gpu.run_server(setting, ["fits"], arguments, Budget(60))
    assert error.splitlines()[0] == "ended with 1: StopIteration"
    assert not earlier.path.exists()
    assert "skipped" in gpu.run_server(setting, ["fits"], arguments, Budget(0.0))


def test_an_end_is_noted_where_something_was_not_finished(tmp_path: Path) -> None:
    setting, budget, parts = ServerSetting("stock", STOCK, ()), Budget(60), tmp_path / "parts"
    for name, finished in (("fits", True), ("prefill", False)):
        part = Part(parts / f"{name}.stock.json", name, "stock", STOCK, budget, finished=finished)
        part.save()
    gpu.note_end(setting, ["fits", "prefill", "long"], parts, "stopped\nand its log", budget)
    assert {path.name for path in parts.glob("*.ended.json")} == {
        "prefill.stock.ended.json",
        "long.stock.ended.json",
    }
    text = report.report([tmp_path])
    assert text.count("- stock: server: stopped") == 2 and "and its log" not in text


def test_what_was_measured_again_counts_from_the_last_folder(tmp_path: Path) -> None:
    def part(folder: str, name: str) -> Part:
        return Part(tmp_path / folder / "parts" / f"{name}.json", "prefill", "spilled", OURS, Budget(60))

    first, ended, again = part("1", "prefill"), part("1", "prefill.ended"), part("2", "prefill")
    for tokens in (8192, 65536):
        first.row(tokens=tokens, homes="host, share 0", tokens_per_s=Spread.of([1.0]))
    for what in ("8192, host, share 0", "131072, host, share 0"):
        ended.attempt(what, lambda: 1 / 0)
    measured_again = partial(again.row, tokens=8192, homes="host, share 0", tokens_per_s=Spread.of([2.0]))
    again.attempt("8192, host, share 0", measured_again)
    parts = read_parts([tmp_path / "1", tmp_path / "2"])["prefill"]
    found = {row["tokens"]: row["tokens_per_s"].median for row in rows_of(parts)}
    assert found == {8192: 2.0, 65536: 1.0} and len(rows_of(parts)) == 2
    left = [problem["what"] for part in parts for problem in part["problems"]]
    assert left == ["131072, host, share 0"], "what was not attempted again still failed"


def test_report_tells_ratio_bound_and_winner(tmp_path: Path) -> None:
    write_parts(tmp_path)
    text = report.report([tmp_path])
    best = next(line for line in text.splitlines() if line.startswith("| 32 x 8K         | 0.600      |"))
    assert best.split("|")[4:6] == [" 2.37              ", " 1.50              "]
    assert "1.02 [0.881-1.18]" in text  # fits: ours over stock
    assert "at once 52 + 84 (measured); best share 0.62" in text
    assert "ZeroDivisionError" in text and "no table" not in text
    stored = json.loads((tmp_path / "million.json").read_text())
    assert {part["side"] for part in stored["parts"]} == {OURS, STOCK}


def test_pictures_are_drawn(tmp_path: Path) -> None:
    write_parts(tmp_path)
    (tmp_path / TRACE_FILE).write_text(json.dumps(timeline()))
    drawn = plots.draw([tmp_path], tmp_path)
    assert [path.name for path in drawn] == ["timeline.svg", "decode_sweep.svg"]
    for path in drawn:
        root = ElementTree.fromstring(path.read_text())
        assert root.tag.endswith("svg") and len(root) > 20


def test_the_timeline_shows_whole_layers_from_the_middle() -> None:
    intervals = [Interval(**fields) for fields in timeline()["intervals"]]
    start_us, end_us = middle(intervals)
    assert end_us - start_us == 4 * LAYER_US
    assert start_us == HEAD_US + LAYERS / 2 * LAYER_US - 2 * LAYER_US + 50  # where CPU attention begins


def test_trace_helpers() -> None:
    assert lane_of({"name": "Memcpy HtoD (Pinned -> Device)"}) == "copy to GPU"
    assert lane_of({"name": "void flashinfer::BatchPrefillWithPagedKVCacheKernel<...>"}) == "GPU attention"
    assert lane_of({"name": "fused_moe_kernel"}) == "other GPU work"
    assert total(common([(0, 10), (20, 30)], [(5, 25)])) == 10


def test_every_benchmark_has_a_case_a_table_and_a_server() -> None:
    folder = Path(cases.__file__).parent
    assert {path.stem for path in folder.glob("*.py")} - {"__init__"} == set(BENCHMARKS) == set(report.TABLES)
    assert {name for setting in SERVERS for name in setting.benchmarks} == set(BENCHMARKS)


def test_budgets_of_ours_are_whole_pages() -> None:
    """What else the start refuses."""
    budgets = [setting.env["SGLANG_INPLACEKV_GPU_MEMORY"] for setting in SERVERS if setting.side == OURS]
    tokens = [int(budget.removesuffix("tok")) for budget in budgets if budget != "auto"]
    assert tokens and all(count % PAGE_TOKENS == 0 for count in tokens)
