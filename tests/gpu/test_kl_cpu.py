"""The comparison by KL itself, on a CPU in fp32: blind to rounding, and not to a page lost or read twice."""

from __future__ import annotations

import math
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sglang_inplacekv.models import checkpoint_path, make_tiny
from tests.gpu.configurations import (
    FAULT_NAMES,
    FAULTS,
    OURS,
    PLANTED,
    RIGHT_NAMES,
    Fault,
    Profile,
    share_name,
)
from tests.gpu.divergence import Divergence, position_kl
from tests.gpu.kl import P99_POSITIONS, Report
from tests.gpu.recording import Recording
from tests.gpu.servers import at_share, misread_page, ours, record_here
from tests.gpu.workload import WorkloadSize

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="compares in fp32, on hosts without a GPU")

PAGE, STEPS = 16, 12
SIZE = WorkloadSize(requests=8, shortest=40, longest=230, steps=STEPS, prefill_positions=20, granule=PAGE)
CONTROL = WorkloadSize(requests=6, shortest=2 * PAGE, longest=3 * PAGE - 1, steps=STEPS, prefill_positions=8)
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
        control_size=CONTROL,
        control_page_size=PAGE,
        dummy_std=None,
        env={"SGLANG_INPLACEKV_TILE_TOKENS": str(3 * PAGE), "SGLANG_INPLACEKV_POISON": "1"},
    )


@pytest.fixture(scope="module")
def recorded(profile: Profile) -> dict[str, dict[str, Recording]]:
    parts = profile.parts((OURS, FAULTS))
    return record_here(parts, ("torch_native", *parts))


@pytest.fixture(scope="module")
def reports(recorded: dict[str, dict[str, Recording]]) -> dict[str, Report]:
    return {part: Report.of(own, "torch_native", None) for part, own in recorded.items()}


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


def test_parts(profile: Profile) -> None:
    """The fault's workload alone is recorded if nothing else is asked for."""
    assert list(profile.parts(("flashinfer", "triton", FAULTS))) == [FAULTS]
    assert profile.parts((OURS,)) == {OURS: profile}
    assert not profile.parts(("flashinfer",))


def test_all_positions_of_all_configurations(
    profile: Profile, recorded: dict[str, dict[str, Recording]]
) -> None:
    for part, own in profile.parts((OURS, FAULTS)).items():
        assert list(recorded[part]) == ["torch_native", *own.names()]
        reference = recorded[part]["torch_native"]
        places = sorted((r.index, position) for r in own.workload().requests for position in r.positions)
        assert reference.places.tolist() == [list(place) for place in places]
        assert int(reference.is_decode.sum()) == STEPS * own.size.requests
        assert max(map(len, reference.forwards)) == own.size.requests, (
            "never were all requests decoded at once"
        )
    forwards = recorded[OURS]["torch_native"].forwards
    assert any(len(batch) == 1 and batch[0][1] for batch in forwards), "no prompt was chunked"
    assert recorded[OURS]["torch_native"].cached_tokens > 0, "no prefix was shared"
    assert recorded[FAULTS]["torch_native"].cached_tokens == 0


def test_shares_were_run(recorded: dict[str, dict[str, Recording]]) -> None:
    for part, name in RIGHT_NAMES:
        reads, share = recorded[part][name].decode_reads, float(name.removeprefix(f"{OURS}-"))
        assert reads["C"] / (reads["C"] + reads["T"]) == pytest.approx(share, abs=0.2)
        assert 0 < reads["D"] < reads["C"] + reads["T"]


@pytest.mark.parametrize("fault", PLANTED)
def test_every_decoded_token_misreads_a_page(recorded: dict[str, dict[str, Recording]], fault: Fault) -> None:
    right, faulty = (recorded[FAULTS][name].decode_reads for name in (share_name(fault.share), fault.name))
    misread = STEPS * CONTROL.requests * PAGE
    assert sum(faulty.values()) - sum(right.values()) == (-misread if fault.kind == "lost" else misread)


@pytest.mark.parametrize(("part", "name"), RIGHT_NAMES)
def test_only_rounding_between_ours_and_stock(reports: dict[str, Report], part: str, name: str) -> None:
    comparison = reports[part].comparisons[name]
    assert comparison.same_batches
    for phase, divergence in comparison.phases().items():
        assert 0 <= divergence.p99 < ROUNDING, (phase, divergence)


@pytest.mark.parametrize("name", FAULT_NAMES)
def test_fault_is_noticed(reports: dict[str, Report], name: str) -> None:
    """In decode steps only: the KV of the prompts is right."""
    comparison = reports[FAULTS].comparisons[name]
    assert comparison.decode.median > 100 * ROUNDING, comparison
    assert comparison.prefill.p99 < ROUNDING, comparison


def test_criterion(reports: dict[str, Report]) -> None:
    """With one of the faults as the yardstick, so that both outcomes are seen."""
    (lost, repeated), right, report = FAULT_NAMES, share_name(0), reports[FAULTS]
    judged = Report(report.reference, lost, report.comparisons)
    assert judged.passes(right) and not judged.passes(repeated)
    strict = Report(report.reference, right, report.comparisons)
    assert strict.passes(share_name(1)) and strict.passes(lost) and strict.passes(repeated)
    for text in (report.reference, right, f"pass {lost}"):
        assert text in strict.table()
    assert strict.as_dict()["passes"] == dict.fromkeys(strict.judged(), True)


def test_p99_is_judged_of_many_positions_alone(reports: dict[str, Report]) -> None:
    report, name = reports[FAULTS], share_name(1)
    few = report.comparisons[name]
    many = replace(few, everywhere=replace(few.everywhere, positions=P99_POSITIONS))
    for comparison in (few, many):
        judged = Report(report.reference, share_name(0), report.comparisons | {name: comparison})
        assert ("all p99" in judged.excess(name)) == (comparison is many)


def test_saved_and_loaded(recorded: dict[str, dict[str, Recording]], tmp_path: Path) -> None:
    saved, name = recorded[OURS], share_name(0)
    for each in ("torch_native", name):
        saved[each].save(tmp_path, each)
    loaded = Recording.load(tmp_path, name)
    for field, value in vars(saved[name]).items():
        again = getattr(loaded, field)
        assert torch.equal(again, value) if isinstance(value, torch.Tensor) else again == value
    other = Recording(**vars(loaded) | {"head": loaded.head + 1})
    with pytest.raises(RuntimeError, match="LM head is not that of"):
        other.save(tmp_path, "other")
    with pytest.raises(RuntimeError, match="different LM heads"):
        position_kl(other, loaded)


def test_recording_leaves_nothing_behind(profile: Profile) -> None:
    """The next server on a GPU needs the memory of this one."""
    control = profile.control()
    with ours(control) as runner:
        for fault in PLANTED:
            with misread_page(runner, fault):
                at_share(runner, control.workload(), fault.share)
            with pytest.raises(RuntimeError, match=f"{fault.name}: only 0 of"), misread_page(runner, fault):
                at_share(runner, control.workload(), 1 - fault.share)
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
