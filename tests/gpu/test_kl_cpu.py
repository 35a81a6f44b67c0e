"""The comparison by KL itself, on a CPU in fp32: blind to rounding, and not to a page lost or read twice."""

from __future__ import annotations

import math
import weakref
from pathlib import Path

import pytest
import torch

from sglang_inplacekv.models import checkpoint_path, make_tiny
from tests.gpu.configurations import (
    FAULT_NAMES,
    FAULT_SHARE,
    FAULTS,
    OURS,
    SHARE_NAMES,
    Profile,
    misread_page,
    recordings,
)
from tests.gpu.divergence import Divergence, position_kl
from tests.gpu.kl import Report
from tests.gpu.recording import Recording, record
from tests.gpu.workload import WorkloadSize

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="compares in fp32, on hosts without a GPU")

PAGE, STEPS = 16, 12
SIZE = WorkloadSize(requests=8, shortest=40, longest=230, steps=STEPS, prefill_positions=20, granule=PAGE)
ROUNDING = 1e-9  # ten thousand times less than a fault, a hundred times more than measured


@pytest.fixture(scope="module")
def profile() -> Profile:
    return Profile(
        make_tiny("qwen3_moe", checkpoint_path("tiny-qwen3_moe")),
        SIZE,
        dtype="float32",
        page_size=PAGE,
        chunk_tokens=4 * PAGE,
        device_tokens=2 * PAGE,
        faulty_requests=1.0,
        dummy_std=None,
        env={"SGLANG_INPLACEKV_TILE_TOKENS": str(3 * PAGE), "SGLANG_INPLACEKV_POISON": "1"},
    )


@pytest.fixture(scope="module")
def recorded(profile: Profile) -> dict[str, Recording]:
    return {
        name: recording
        for config in ("torch_native", OURS)
        for name, recording in recordings(profile, config)
    }


@pytest.fixture(scope="module")
def report(recorded: dict[str, Recording]) -> Report:
    return Report.of(recorded, "torch_native", None)


def test_workload(profile: Profile) -> None:
    workload = profile.workload()
    assert workload == profile.workload()
    lengths = sorted(request.prompt_tokens for request in workload.requests)
    assert (lengths[0], lengths[-1], len(lengths)) == (SIZE.shortest, SIZE.longest, SIZE.requests)
    shared = [tuple(r.tokens[: r.shared_tokens]) for r in workload.requests if r.shared_tokens]
    assert len(shared) == 4 and len(set(shared)) == 1
    for request in workload.requests:
        assert len(request.tokens) == request.prompt_tokens + STEPS + 1
        assert request.shared_tokens <= request.positions[0]
        assert request.positions[-STEPS:] == tuple(range(request.prompt_tokens, len(request.tokens) - 1))


def test_all_positions_of_all_configurations(profile: Profile, recorded: dict[str, Recording]) -> None:
    assert list(recorded) == ["torch_native", *SHARE_NAMES, *FAULT_NAMES]
    workload, reference = profile.workload(), recorded["torch_native"]
    places = sorted((r.index, position) for r in workload.requests for position in r.positions)
    assert reference.places.tolist() == [list(place) for place in places]
    assert int(reference.is_decode.sum()) == STEPS * SIZE.requests
    assert reference.cached_tokens > 0, "no prefix was shared"
    assert any(len(batch) == 1 and batch[0][1] for batch in reference.forwards), "no prompt was chunked"
    assert max(map(len, reference.forwards)) == SIZE.requests, "never were all requests decoded at once"


def test_shares_were_run(recorded: dict[str, Recording]) -> None:
    for name, share in zip(SHARE_NAMES, (0, 0.4, 1)):
        reads = recorded[name].decode_reads
        assert reads["C"] / (reads["C"] + reads["T"]) == pytest.approx(share, abs=0.2)
        assert reads["D"] < reads["C"] + reads["T"]


@pytest.mark.parametrize("name", SHARE_NAMES)
def test_only_rounding_between_ours_and_stock(report: Report, name: str) -> None:
    comparison = report.comparisons[name]
    assert comparison.same_batches
    for phase, divergence in comparison.phases().items():
        assert 0 <= divergence.p99 < ROUNDING, (phase, divergence)
    assert comparison.everywhere.positions == SIZE.requests * STEPS + comparison.prefill.positions


@pytest.mark.parametrize("name", FAULT_NAMES)
def test_fault_is_noticed(report: Report, name: str) -> None:
    """In decode steps only: the KV of the prompts is right."""
    comparison = report.comparisons[name]
    assert comparison.decode.median > 100 * ROUNDING, comparison
    assert comparison.prefill.p99 < ROUNDING, comparison


def test_criterion(report: Report) -> None:
    """With one of the faults as the yardstick, so that both outcomes are seen."""
    lost, repeated = FAULT_NAMES
    judged = Report(report.reference, lost, report.comparisons)
    assert judged.passes(SHARE_NAMES[0]) and not judged.passes(lost)
    strict = Report(report.reference, SHARE_NAMES[0], report.comparisons)
    assert strict.passes(SHARE_NAMES[0]) and strict.passes(lost) and strict.passes(repeated)
    for text in (report.reference, *SHARE_NAMES, f"pass {lost}"):
        assert text in strict.table()
    assert strict.as_dict()["passes"][repeated]


def test_saved_and_loaded(recorded: dict[str, Recording], tmp_path: Path) -> None:
    for name in ("torch_native", SHARE_NAMES[0]):
        recorded[name].save(tmp_path, name)
    loaded = Recording.load(tmp_path, SHARE_NAMES[0])
    for field, value in vars(recorded[SHARE_NAMES[0]]).items():
        again = getattr(loaded, field)
        assert torch.equal(again, value) if isinstance(value, torch.Tensor) else again == value
    other = Recording(**vars(loaded) | {"head": loaded.head + 1})
    with pytest.raises(RuntimeError, match="LM head is not that of"):
        other.save(tmp_path, "other")
    with pytest.raises(RuntimeError, match="different LM heads"):
        position_kl(other, loaded)


def test_recording_leaves_nothing_behind(profile: Profile) -> None:
    """The next server on a GPU needs the memory of this one."""
    with profile.ours() as runner:
        runner.kv_pool.regions.scope.target_share = FAULT_SHARE
        for fault, region in FAULTS:
            with misread_page(runner, fault, region):
                record(runner, profile.workload().shortest(profile.faulty_requests))
        model = weakref.ref(runner.model_runner.model)
        assert "sample" not in vars(runner.model_runner)
        assert "build" not in vars(runner.kv_pool.planner)
        assert not runner.model_runner.model.logits_processor._forward_pre_hooks
    assert model() is None


def test_kl_of_known_distributions() -> None:
    """Two tokens: p = (1/2, 1/2), q = (3/4, 1/4), whose KL is log(2 / sqrt(3))."""

    def of(*logits: float) -> Recording:
        place, hidden = torch.tensor([[0, 0]]), torch.tensor([logits])
        return Recording(place, hidden, torch.tensor([False]), torch.eye(2), [], 0)

    (value,), _ = position_kl(of(0.0, 0.0), of(math.log(3), 0.0))
    assert value.item() == pytest.approx(math.log(2 / math.sqrt(3)), rel=1e-6)
    with pytest.raises(RuntimeError, match="1 not finite"):
        Divergence.of(torch.tensor([0.0, math.nan], dtype=torch.float64))
