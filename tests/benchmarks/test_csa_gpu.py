"""The benchmark of a CSA layer on a GPU, small: every policy in both row formats, under graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.cases.csa_layer import TOLERANCE
from benchmarks.results import Budget, Part
from benchmarks.scale import SMOKE
from benchmarks.servers import NONE, ServerSetting
from benchmarks.worker import Context, run_benchmark
from sparse_attn import V4Config

CSA = replace(
    SMOKE.csa,
    geometry=V4Config("csa", index_topk=64),
    tokens=(8192, 16384),
    batches=(1, 3),
    hot_rows=256,
    warm_up_steps=8,
    steps=8,
    circle=32,
)


@pytest.mark.gpu
def test_every_policy(tmp_path: Path) -> None:
    part = Part(tmp_path / "parts" / "csa_layer.none.json", "csa_layer", "none", NONE, Budget(120))
    run_benchmark(
        Context(ServerSetting("none", NONE, ("csa_layer",)), None, replace(SMOKE, csa=CSA), part, tmp_path)
    )
    assert not part.problems, part.problems
    layers = [row for row in part.rows if "hit_rate" in row]
    assert len({(row["what"], row["case"], row["tokens"], row["share"]) for row in layers}) == len(layers)
    assert {row["what"] for row in layers} == {
        "all on the GPU", "fetch", "compute", "split", "all on the GPU, packed", "fetch, packed",
    }  # fmt: skip
    for row in layers:
        assert row["error"] <= TOLERANCE
        assert row["row_bytes"] == (584 if row["what"].endswith("packed") else 1024)
        assert min(row["stage_us"].values()) > -5 and sum(row["stage_us"].values()) > 0
        if row["share"] is not None:
            assert 0 < row["hit_rate"] < 1
            assert abs(row["computed"] - row["share"] * row["missed"]) <= row["batch"] / 2
    text = report.report([tmp_path])
    assert "no table" not in text and "GPU memory, GiB" in text
