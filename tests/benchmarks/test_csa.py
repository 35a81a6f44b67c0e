"""The benchmark of a CSA layer: small on a CPU, where torch stands in for the GPU, and on a GPU; and what its tables say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cpu_attn
from benchmarks import report
from benchmarks.cases import csa_layer
from benchmarks.csa import PAGE_ROWS, Walk, content
from benchmarks.csa_stand_in import StandIn
from benchmarks.results import Budget, Part
from benchmarks.scale import SMOKE, CsaScale
from benchmarks.servers import NONE, ServerSetting
from benchmarks.stats import Spread
from benchmarks.worker import Context, run_benchmark
from sparse_attn import V4Config
from sparse_attn.traffic import Policy

TINY = SMOKE.csa
# V4-Flash's rows and heads, few entries selected.
ON_GPU = replace(
    TINY,
    geometry=V4Config("csa", index_topk=64),
    tokens=(8192, 16384),
    batches=(1, 3),
    hot_rows=256,
    warm_up_steps=8,
    steps=8,
    circle=32,
)


@pytest.fixture
def team() -> Iterator[cpu_attn.Executor]:
    with cpu_attn.Executor(1) as own:
        yield own


def new_part(out: Path) -> Part:
    return Part(out / "parts" / "csa_layer.none.json", "csa_layer", "none", NONE, Budget(120))


def measured(csa: CsaScale, out: Path) -> Part:
    part = new_part(out)
    setting = ServerSetting("none", NONE, ("csa_layer",))
    run_benchmark(Context(setting, None, replace(SMOKE, csa=csa), part, out))
    assert not part.problems, part.problems
    return part


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch stands in where there is no GPU")
def test_every_policy_on_a_cpu(tmp_path: Path) -> None:
    part = measured(TINY, tmp_path)
    wanted = [("all on the GPU", None), ("fetch", 0.0), ("compute", 1.0), ("split", 0.5)]
    cases = [(tokens, batch) for tokens in TINY.tokens for batch in TINY.batches]
    assert [(row["tokens"], row["batch"], row["what"], row["share"]) for row in part.rows] == [
        (*case, *policy) for case in cases for policy in wanted
    ]
    for row in part.rows:
        assert row["error"] < 1e-5, "fp32, whatever the policy"
        assert row["step_us"].count == TINY.runs
        if row["share"] is not None:
            listed = row["batch"] * TINY.geometry.index_topk
            assert 0 < row["missed"] < listed
            assert row["missed"] == pytest.approx((1 - row["hit_rate"]) * listed)
            assert abs(row["computed"] - row["share"] * row["missed"]) <= row["batch"] / 2
    # All walk the same way and hold what they missed.
    by_case = [[row["missed"] for row in part.rows[i + 1 : i + 4]] for i in range(0, len(part.rows), 4)]
    assert all(len(set(missed)) == 1 for missed in by_case)
    text = report.report([tmp_path])
    assert "no table" not in text and "KiB to the host" in text and "GPU memory" not in text


@pytest.mark.gpu
def test_every_policy_on_a_gpu(tmp_path: Path) -> None:
    part = measured(ON_GPU, tmp_path)
    layers = [row for row in part.rows if "hit_rate" in row]
    assert len({(row["what"], row["case"], row["tokens"], row["share"]) for row in layers}) == len(layers)
    assert {row["what"] for row in layers} == {
        "all on the GPU", "fetch", "compute", "split", "all on the GPU, packed", "fetch, packed",
    }  # fmt: skip
    for row in layers:
        assert row["error"] <= csa_layer.TOLERANCE
        assert row["row_bytes"] == (584 if row["what"].endswith("packed") else 1024)
        assert sum(row["stage_us"].values()) > 0
        if row["share"] is not None:
            assert 0 < row["hit_rate"] < 1
            assert abs(row["computed"] - row["share"] * row["missed"]) <= row["batch"] / 2
    text = report.report([tmp_path])
    assert "no table" not in text and "GPU memory, GiB" in text


def test_a_wrong_row_is_noticed(team: cpu_attn.Executor) -> None:
    with content(TINY.geometry, 1, 256, team, "cpu", packed=False) as own:
        layer = StandIn(own, Walk.of(own, TINY.circle, 0.9), Policy.fetch(), TINY.hot_rows)
        layer.run(3)
        assert csa_layer._error(layer) < 1e-5
        own.home[:] = own.home.roll(1, 0)
        layer.run(8)
        with pytest.raises(RuntimeError, match="from that of everything on the device"):
            csa_layer._error(layer)


def test_homes_have_the_entries_by_pages(team: cpu_attn.Executor) -> None:
    with content(TINY.geometry, 2, 256, team, "cpu", packed=False) as own:
        assert own.pages.flatten().sort().values.tolist() == list(range(8))
        for request in range(2):
            entries = torch.arange(256)
            rows = own.pages[request].long()[entries // PAGE_ROWS] * PAGE_ROWS + entries % PAGE_ROWS
            first = own.first_entry + request * 256
            assert torch.equal(own.home[rows], own.pool[first : first + 256])


def test_a_walk_is_a_circle_of_even_steps(team: cpu_attn.Executor) -> None:
    a, steps = 0.8, 64
    with content(TINY.geometry, 4, 256, team, "cpu", packed=False) as own:
        walk = Walk.of(own, steps, a).index_queries.flatten(1)
    following = walk.roll(-1, 0)
    # Over 1,024 values: a correlation's deviation is (1 - a^2) / 32, a variance's 0.044; walks of 64 steps correlate.
    correlation = torch.nn.functional.cosine_similarity(walk, following, -1)
    assert ((correlation - a).abs() < 5 * (1 - a * a) / 32).all(), "also from the last step to the first"
    assert abs(float(walk.var()) - 1) < 0.1


def test_the_predicted_share_balances_both_sides() -> None:
    def side(step_us: float, computed: float, cpu_us: float, fetch_us: float) -> csa_layer.Measured:
        stages = {"draw": 10.0, "select": 50.0, "place": 5.0, "fetch": fetch_us, "attend": 10.0, "merge": 3.0}
        return csa_layer.Measured(Spread.of([step_us]), stages, 200.0, computed, cpu_us)

    # The CPU's side takes 148 - 65 - 3 = 80 us, 60 of them fixed; the link's 10 and what crosses.
    assert csa_layer.predicted_share(side(78, 0, 0, 8), side(148, 200, 20, 0)) == 0
    # 60 + 20 r = 10 + 90 (1 - r)
    assert csa_layer.predicted_share(side(168, 0, 0, 90), side(148, 200, 20, 0)) == 0.36
    without = csa_layer.Measured(Spread.of([1.0]), {}, 200.0, 0.0, 0.0)
    assert csa_layer.predicted_share(without, side(148, 200, 20, 0)) is None


def test_the_whole_model_is_its_layers(tmp_path: Path) -> None:
    part, mib = new_part(tmp_path), 2**20

    def layer(what: str, share: float | None, us: float, device_mib: int, tokens: int = 1048576) -> None:
        part.row(
            what=what, case="batch 1, a 0.97", tokens=tokens, share=share, batch=1, step_us=Spread(us, 0.9 * us, 1.1 * us, 7),
            stage_us={"select": us / 2}, cpu_us=0.0, hit_rate=None if share is None else 0.7, missed=154.0, computed=0.0,
            to_device_bytes=157696.0, to_host_bytes=0.0, device_bytes=device_mib * mib, error=1e-4,
        )  # fmt: skip

    for what, us, device_mib in (("HCA layer", 20.0, 8), ("window layer", 5.0, 1)):
        part.row(
            what=what, case="batch 1", tokens=1048576, step_us=Spread(us, us, us, 7), device_bytes=device_mib * mib
        )  # fmt: skip
    layer("all on the GPU", None, 10.0, 3, tokens=65536)
    text = report.report([tmp_path])
    assert "no table" not in text and "GPU memory" not in text, "of that context no CSA layer was measured"
    layer("all on the GPU", None, 100.0, 320)
    layer("fetch", 0.0, 120.0, 64)
    part.row(what="predicted share", case="batch 1, a 0.97", tokens=1048576, predicted=0.0)
    text = report.report([tmp_path])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line]
    fetch = next(row for row in rows if row[0] == "fetch")
    # 21 x 120 us, 20 x 20 + 2 x 5; 21 x 64 + 20 x 8 + 2 x 1 MiB.
    assert fetch[2].startswith("2.52") and fetch[3] == "0.410" and fetch[4].startswith("2.93")
    assert fetch[5].startswith("1.17") and fetch[6] == "1.47"
    assert next(row for row in rows if row[0] == "all on the GPU")[6] == "6.72"
    assert "Predicted share: 1048576 tokens, batch 1, a 0.97: 0.0." in text
    assert [row[5].split()[0] for row in rows if row[2] == "fetch"] == ["1.20"]
