"""Exactness by KL on a GPU in bf16: ours is as close to stock FlashInfer as stock Triton is, and a fault is far off.

Real widths, few layers; `python -m tests.gpu.kl` runs the same at full depth.
"""

from __future__ import annotations

import pytest
import torch

from sglang_inplacekv.models import write_config
from tests.gpu.configurations import FAULT_NAMES, FAULTS, OURS, RIGHT_NAMES, Profile
from tests.gpu.kl import P99_POSITIONS, Report
from tests.gpu.servers import record_here

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

LAYERS = 4


@pytest.fixture(scope="module", params=["qwen3_30b_a3b", "mixtral_8x7b"])
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    model = write_config(request.param, tmp_path_factory.mktemp("model") / request.param, layers=LAYERS)
    parts = Profile(model).parts((OURS, FAULTS))
    recorded = record_here(parts, ("flashinfer", "triton", *parts))
    reports = {part: Report.of(own, "flashinfer", "triton") for part, own in recorded.items()}
    for part, report in reports.items():
        print(f"{request.param}, {LAYERS} layers, {part}\n{report.table()}")
    return reports


# The first test of a model starts four servers; the others read what it found.
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("part", "name"), RIGHT_NAMES)
def test_as_close_as_stock_is_to_itself(reports: dict[str, Report], part: str, name: str) -> None:
    report = reports[part]
    assert part == FAULTS or report.comparisons[name].everywhere.positions >= P99_POSITIONS
    assert report.passes(name), report.table()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FAULT_NAMES)
def test_fault_is_noticed(reports: dict[str, Report], name: str) -> None:
    assert reports[FAULTS].passes(name), reports[FAULTS].table()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("part", "name"), [(OURS, "triton"), (FAULTS, "triton"), *RIGHT_NAMES])
def test_differences_are_of_attention_alone(reports: dict[str, Report], part: str, name: str) -> None:
    """The same batches in the same order: no kernel rounds differently because its batch is another."""
    assert reports[part].comparisons[name].same_batches
