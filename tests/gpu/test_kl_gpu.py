"""Exactness by KL on a GPU in bf16: ours is as close to stock FlashInfer as stock Triton is, and a fault is far off.

Real widths, few layers; `python -m tests.gpu.kl` runs the same at full depth.
"""

from __future__ import annotations

import pytest
import torch

from sglang_inplacekv.models import write_config
from tests.gpu.configurations import FAULT_NAMES, OURS, SHARE_NAMES, Profile, recordings
from tests.gpu.kl import Report

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

LAYERS = 4


@pytest.fixture(scope="module", params=["qwen3_30b_a3b", "mixtral_8x7b"])
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Report:
    model = write_config(request.param, tmp_path_factory.mktemp("model") / request.param, layers=LAYERS)
    profile = Profile(model)
    recorded = {
        name: recording
        for config in ("flashinfer", "triton", OURS)
        for name, recording in recordings(profile, config)
    }
    report = Report.of(recorded, "flashinfer", "triton")
    print(f"{request.param}, {LAYERS} layers\n{report.table()}")
    return report


# The first test of a model starts three servers; the others read what it found.
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SHARE_NAMES)
def test_as_close_as_stock_is_to_itself(report: Report, name: str) -> None:
    assert report.comparisons[name].everywhere.positions >= 2000
    assert report.passes(name), report.table()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FAULT_NAMES)
def test_fault_is_noticed(report: Report, name: str) -> None:
    assert report.passes(name), report.table()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["triton", *SHARE_NAMES])
def test_differences_are_of_attention_alone(report: Report, name: str) -> None:
    """The same batches in the same order: no kernel rounds differently because its batch is another."""
    assert report.comparisons[name].same_batches
