"""The experiments on the share over a host that is only two lines: what they ask, count and conclude."""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import hogs
from benchmarks.cases import share_growing, share_hogs, share_sweep
from benchmarks.decoder import ScopeDecoder
from benchmarks.experiments import change, distinct, growing, rounds_ms, settle, sweep
from benchmarks.hogs import LinkHog, cpu_hog
from benchmarks.layers import PAGE_TOKENS as PAGE
from benchmarks.layers import qwen
from benchmarks.planned import Planned
from benchmarks.plot_share import hogs_svgs
from benchmarks.report import report
from benchmarks.results import Budget, Part
from benchmarks.scale import QUICK, SMOKE, Shape
from benchmarks.share_simulation import measure
from benchmarks.share_tables import Verdict, over_best
from benchmarks.stats import Spread
from sglang_inplacekv.feedback import HALF_LIFE_STEPS
from sglang_inplacekv.planning import STEP_START_S
from sglang_inplacekv.roofline import Line, balanced_share
from sglang_inplacekv.write_scope import PLACED_OF_TARGET

LAYERS = 24


class LinesDecoder(ScopeDecoder):
    """Takes the times of two lines."""

    def __init__(self) -> None:
        self.cpu, self.link = Line(30e-6, 25e-9), Line(0.0, 40e-9)
        super().__init__(LAYERS, self.cpu.fixed_s)

    def _sides_s(self, computed: int, streamed: int) -> tuple[float, float, float]:
        fixed_s = self.cpu.fixed_s if computed else 0.0
        return self.cpu.token_s * computed, fixed_s, self.link.seconds(streamed)

    def best(self) -> float:
        return balanced_share(self.cpu, self.link, self._host_tokens())

    @contextmanager
    def slower(self, **factors: float) -> Iterator[None]:
        before = self.cpu, self.link
        for side, factor in factors.items():
            line = getattr(self, side)
            setattr(self, side, replace(line, token_s=factor * line.token_s))
        try:
            yield
        finally:
            self.cpu, self.link = before


def test_a_sweep_takes_each_share_and_its_best_is_where_the_controller_arrives() -> None:
    decoder, shape = LinesDecoder(), Shape(4, 16384)
    decoder.place(shape)
    auto = settle(decoder, 40)
    shares = distinct([i / 50 for i in range(51)], shape.batch * shape.context // PAGE)
    control = decoder.control
    found, controlled = sweep(decoder, shares, control, rounds=2, steps=3)
    assert [list(map(len, rounds)) for rounds in (*found.values(), controlled)] == [[3, 3]] * 52
    assert {step.share for steps in controlled for step in steps} == {auto} and decoder.control is not control
    every = [(share, step) for share, rounds in found.items() for steps in rounds for step in steps]
    assert all(step.share == share and step.floor == 0 for share, step in every)
    verdict = Verdict.of(auto, {share: rounds_ms(rounds) for share, rounds in found.items()})
    assert verdict.is_good and abs(verdict.best_share - decoder.best()) < 0.02


def test_shares_in_whole_pages_are_distinct() -> None:
    assert distinct([-0.1, 0.0, 0.1, 0.2, 0.24, 0.26, 0.6, 1.0, 1.1], 4) == [0.0, 0.25, 0.5, 1.0]


def test_a_verdict_asks_for_time_and_place() -> None:
    rounds = {0.3: [12.0, 12.0], 0.4: [10.2, 10.2], 0.5: [10.0, 10.0], 0.6: [10.4, 10.4]}
    assert Verdict.of(0.4, rounds) == Verdict(0.5, 10.0, (0.4, 0.5), 0.4, 10.2, Spread(1.02, 1.02, 1.02, 2))
    assert Verdict.of(0.4, rounds).is_good
    assert not Verdict.of(0.6, rounds).is_good
    assert not Verdict.of(0.52, rounds).is_good, "nearest to a good one, but outside of the range"
    assert not Verdict.of(0.4, rounds, [10.5, 10.5]).is_good, "slower than that share is when it is given"


def test_the_best_share_is_picked_in_other_rounds_than_those_it_is_timed_in() -> None:
    """Thirty shares that take 10 ms, 3% more or less by chance: none is better than another."""
    draw = random.Random(0)
    over = []
    for _ in range(200):
        rounds = {share / 30: [draw.gauss(10, 0.3) for _ in range(5)] for share in range(30)}
        over.append(over_best([draw.gauss(10, 0.3) for _ in range(5)], rounds).median)
    assert statistics.mean(over) == pytest.approx(1.0, abs=0.005)


def test_controller_and_plan_count_what_a_layer_takes_besides(tmp_path: Path) -> None:
    decoder = LinesDecoder()
    hand_over = decoder.cpu
    decoder.cpu = replace(hand_over, fixed_s=10 * hand_over.fixed_s)
    rest_s = LAYERS * 9 * hand_over.fixed_s
    planned = Planned("qwen", qwen(LAYERS), hand_over, decoder.link, rest_s)
    part = Part(tmp_path / "parts" / "share_sweep.x.json", "share_sweep", "x", "none", Budget(60))
    share_sweep.compare(part, replace(SMOKE.share, settle_steps=40), decoder, planned, Shape(1, 32768))
    row = part.rows[-1]
    assert row["auto_fixed_us"] == pytest.approx(300) and row["plan_fixed_us"] == pytest.approx(300)
    assert row["auto_share"] == pytest.approx(row["predicted_share"], abs=0.02)
    at_plan = next(other for other in part.rows if other["share"] == row["predicted_share"])
    # By the simulated clock a step begins with its first layer.
    assert row["predicted_ms"] - 1e3 * STEP_START_S == pytest.approx(at_plan["step_ms"].median, rel=0.02)
    assert "| 300 / 300 " in report([tmp_path])


def test_a_growing_sequence_is_decoded_in_time_with_the_best_fixed_share() -> None:
    decoder, totals = LinesDecoder(), {}
    for share in ("auto", 0.4, 0.5, 0.6, 0.7):
        if share == "auto":
            decoder.auto()
        else:
            decoder.fixed(share, steals=False)
        steps = growing(decoder, 2048, PAGE, range(8, 257))
        totals[share] = sum(step.seconds for step in steps)
        assert [step.tokens for step in steps] == [pages * PAGE for pages in range(8, 257)]
    assert totals["auto"] <= 1.02 * min(totals.values())


def test_the_share_of_a_growing_sequence_is_told_over_its_length(tmp_path: Path) -> None:
    decoder = LinesDecoder()
    decoder.cpu = replace(decoder.cpu, fixed_s=300e-6)
    part = Part(tmp_path / "parts" / "share_growing.x.json", "share_growing", "x", "none", Budget(60))
    steps = share_growing.compare(part, QUICK.share, decoder)
    shares = part.rows[0]["shares"]
    assert list(shares) == ["2K", "8K", "32K", "64K"] and shares["64K"] == steps[-1].share
    assert shares["8K"] + 0.2 < shares["32K"] < shares["64K"], (
        "what a layer takes besides weighs less and less"
    )
    text = report([tmp_path])
    assert "| at 2K | at 8K | at 32K | at 64K |" in " ".join(text.split())


def test_a_slower_link_is_followed_by_stealing() -> None:
    decoder = LinesDecoder()
    decoder.auto(0.6)
    decoder.place(Shape(4, 32768))
    found = change(decoder, 40, 60, lambda: decoder.slower(link=2.0))
    fields = found.fields()
    assert fields["share_after"] > fields["share_before"] + 0.1
    assert 1 < fields["follow_steps"] <= 4 * HALF_LIFE_STEPS
    assert fields["after_ms"].median < 1.5 * fields["before_ms"].median, (
        "placed pages would take twice as long"
    )


def test_a_slower_cpu_is_followed_to_the_floor_and_below_by_growing() -> None:
    decoder = LinesDecoder()
    decoder.auto(0.6)
    decoder.place(Shape(4, 32768))
    found = change(decoder, 40, 60, lambda: decoder.slower(cpu=4.0), grow_steps=64)
    fields = found.fields()
    assert fields["floor"] == pytest.approx(PLACED_OF_TARGET * 0.6, abs=0.01)
    assert fields["share_after"] == fields["floor"] > fields["target_after"]
    assert fields["share_grown"] == fields["floor_grown"] < fields["floor"] - 0.03


def test_the_simulation_writes_what_the_tables_need(tmp_path: Path) -> None:
    measure(tmp_path, SMOKE.share, link_gbps=3.0)
    text = report([tmp_path])
    assert "no table" not in text and text.count("4 times slower") == 2


def test_hogs_work_and_end() -> None:
    link = LinkHog()
    with link.working():
        time.sleep(0.2)
    with pytest.raises(ZeroDivisionError), link.working(), cpu_hog(sorted(os.sched_getaffinity(0))[:1]):
        raise ZeroDivisionError
    assert link.gbps > 0


def test_a_link_hog_that_fails_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hogs, "_COPY_BYTES", -1)
    with pytest.raises(RuntimeError, match="a hog ended with 1"), LinkHog().working():
        pytest.fail("it works")
    monkeypatch.setattr(hogs, "_COPIER", "print('works', flush=True); raise SystemExit(3)")
    with pytest.raises(RuntimeError, match="the link hog ended with 3"), LinkHog().working():
        pass


def test_a_cpu_hog_that_ends_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured meanwhile was measured without it."""
    cores = sorted(os.sched_getaffinity(0))[:1]
    monkeypatch.setattr(hogs, "_READER", "print('works', flush=True); raise SystemExit(3)")
    with pytest.raises(RuntimeError, match=r"1 of 1 CPU hogs ended with \[3\]"), cpu_hog(cores):
        time.sleep(1.0)


def test_a_link_hog_that_does_not_end_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hogs, "_COPIER", "import time; print('works', flush=True); time.sleep(60)")
    monkeypatch.setattr(hogs, "_END_S", 1.0)
    with pytest.raises(subprocess.TimeoutExpired), LinkHog().working():
        pass


def test_a_hog_has_one_colour_in_both_pictures() -> None:
    steps = [{"target": 0.5, "share": 0.5, "floor": 0.4, "ms": 10.0}]
    names = [f"{hog}, {how}" for hog in (share_hogs.LINK, share_hogs.CPU) for how in ("stealing", "placed")]
    pictures = hogs_svgs({name: {"before": steps, "after": steps, "grown": []} for name in names})
    shares, times = (_legend(pictures[name]) for name in ("share_hogs.svg", "share_hogs_ms.svg"))
    assert list(shares) == names[::2] and list(times) == names
    assert shares.items() <= times.items() and len(set(times.values())) == 4


def _legend(svg: str) -> dict[str, str]:
    """Colours by name."""
    marks = pairwise(ElementTree.fromstring(svg).iter())
    return {text.text: line.get("stroke") for line, text in marks if text.text and " hog, " in text.text}
