"""Every stream of the CUDA executor in turn runs late: the results stay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import pytest
import torch

from sglang_inplacekv.executors.cuda_tiles import CudaTileStream
from sglang_inplacekv.executors.hand_over import HandOver
from sglang_inplacekv.models import write_config
from tests.gpu.configurations import Profile
from tests.gpu.delays import COMPUTE, STREAMS, late, noted_plans
from tests.gpu.divergence import Divergence, kl
from tests.gpu.kl import FACTOR
from tests.gpu.recording import Recording, record
from tests.gpu.servers import ours
from tests.gpu.workload import WorkloadSize
from tests.harness import Runner

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

PAGE, LAYERS, SHARE = 64, 4, 0.4
# More decode steps than a page has tokens: every request fills a window and flushes it while it decodes.
SIZE = WorkloadSize(requests=8, shortest=300, longest=4000, steps=PAGE + 8, prefill_positions=64)
ENV = {"SGLANG_INPLACEKV_TILE_TOKENS": "512", "SGLANG_INPLACEKV_POISON": "1"}  # several tiles a layer


@dataclass(frozen=True)
class Undisturbed:
    """An open server, what it answers when nothing is late, and how far rounding alone takes it from there."""

    runner: Runner
    profile: Profile
    recording: Recording
    plans: list[bytes]
    rounding: Divergence  # between two shares: the same sums in another order
    repeatable: bool  # the same plans gave the same bits


def run(runner: Runner, profile: Profile, share: float = SHARE) -> tuple[Recording, list[bytes]]:
    runner.kv_pool.regions.scope.target_share = share
    with noted_plans(runner) as plans:
        return record(runner, profile.workload()), plans


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Undisturbed]:
    model = write_config("qwen3_30b_a3b", tmp_path_factory.mktemp("model") / "qwen3", layers=LAYERS)
    profile = Profile(model, SIZE, page_size=PAGE, chunk_tokens=1024, device_tokens=512, env=ENV)
    with ours(profile) as runner:
        (recording, plans), (again, plans_again) = run(runner, profile), run(runner, profile)
        rounding = kl(run(runner, profile, share=0.0)[0], recording).everywhere
        repeatable = plans == plans_again and torch.equal(again.hidden, recording.hidden)
        print(f"rounding {rounding}, same plans {plans == plans_again}, repeatable {repeatable}")
        yield Undisturbed(runner, profile, recording, plans, rounding, repeatable)


def clocks_unread_until_the_end():
    """Clocks of tiles are read within a forward on the strength of the waits that a test leaves out, and would raise there."""
    return mock.patch.object(CudaTileStream, "read_clocks")


@pytest.mark.parametrize("name", [COMPUTE, *STREAMS])
def test_late_stream_changes_nothing(plain: Undisturbed, name: str) -> None:
    """Bit by bit where the same plans repeat bits; else within what rounding does."""
    with late(plain.runner, name) as delays:
        recording, plans = run(plain.runner, plain.profile)
    assert delays.count, "the stream was not used"
    if plain.repeatable and plans == plain.plans:
        assert torch.equal(recording.hidden, plain.recording.hidden)
        return
    divergence = kl(recording, plain.recording).everywhere
    print(f"{name} late: same plans {plans == plain.plans}, {divergence}")
    assert divergence.within(plain.rounding, FACTOR), (divergence, plain.rounding)


def test_queries_that_are_not_awaited_show(plain: Undisturbed) -> None:
    """The CPU attends with what was in the buffer before."""
    with (
        late(plain.runner, COMPUTE),
        mock.patch.object(HandOver, "await_q", return_value=None),
        clocks_unread_until_the_end(),
    ):
        recording, _ = run(plain.runner, plain.profile)
    if recording.hidden.isfinite().all():
        assert kl(recording, plain.recording).decode.median > 10 * FACTOR * plain.rounding.median


def test_missing_wait_shows(plain: Undisturbed) -> None:
    """Attention that does not wait for its tiles reads what was there before."""
    with late(plain.runner, "copy", blind=COMPUTE) as delays, clocks_unread_until_the_end():
        recording, _ = run(plain.runner, plain.profile)
    assert delays.skipped and delays.count
    if recording.hidden.isfinite().all():
        assert kl(recording, plain.recording).decode.median > 10 * FACTOR * plain.rounding.median
