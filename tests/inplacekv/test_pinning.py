"""Which host chunks are registered with CUDA and when, with fakes for the registration itself."""

from __future__ import annotations

import gc
import re

import pytest

import cpu_attn
from sglang_inplacekv.arena import HostArena
from sglang_inplacekv.homes import HomeTable
from sglang_inplacekv.layout import ROLE_COMPUTE, ROLE_NONE, ROLE_TRANSFER
from sglang_inplacekv.pinning import ChunkPins
from sglang_inplacekv.write_scope import WriteScope
from tests.inplacekv.fake_cuda import FakeRegistrations
from tests.inplacekv.test_arena import SHAPE, SIZES


@pytest.fixture(scope="module")
def team() -> cpu_attn.Executor:
    return cpu_attn.Executor(threads=1)


@pytest.fixture
def registrations(monkeypatch: pytest.MonkeyPatch) -> FakeRegistrations:
    monkeypatch.setattr(HostArena, "_cuda_layer", lambda self, layer: (None, None))
    return FakeRegistrations(monkeypatch)


def settled(pins: ChunkPins) -> None:
    pins._queue.submit(lambda: None, "nothing").wait(5, "the test")


def test_one_spare_chunk_is_pinned_ahead(team: cpu_attn.Executor, registrations: FakeRegistrations) -> None:
    arena = HostArena(SHAPE, SIZES, team)
    pins = arena.start_pinning(5)
    chunks = [arena._chunks[chunk] for chunk in range(3)]
    assert [registrations.covers(chunk) for chunk in chunks] == [True, False, False]
    assert sum(registrations.ranges.values()) == chunks[0].nbytes, (
        "pinned before it is needed, and nothing else"
    )
    homes = HomeTable(SIZES, WriteScope(0.0), 5, pins)
    homes.allocate(4 + 1)
    settled(pins)
    assert [registrations.covers(chunk) for chunk in chunks] == [True, True, False]
    homes.scope.target_share = 1.0
    homes.allocate(1)
    assert homes.role == [ROLE_TRANSFER, ROLE_NONE, ROLE_COMPUTE]
    homes.scope.target_share = 0.0
    homes.allocate(320)
    assert homes.role == [ROLE_TRANSFER, ROLE_TRANSFER, ROLE_COMPUTE]
    assert [registrations.covers(chunk) for chunk in chunks] == [True, True, False], "C stays pageable"


def test_compute_unpins_a_chunk_when_no_other_is_empty(
    team: cpu_attn.Executor, registrations: FakeRegistrations
) -> None:
    arena = HostArena(SHAPE, SIZES, team)
    homes = HomeTable(SIZES, WriteScope(1.0), 5, arena.start_pinning(5))
    homes.allocate(804)
    assert homes.role == [ROLE_COMPUTE] * 3 and not registrations.ranges


def test_pins_of_a_short_chunk_leave_its_gaps_alone(
    team: cpu_attn.Executor, registrations: FakeRegistrations
) -> None:
    arena = HostArena(SHAPE, SIZES, team)
    pins = arena.start_pinning(5)
    pins.prepare(2, ROLE_TRANSFER)
    assert registrations.covers(arena._chunks[2])
    assert sum(registrations.ranges.values()) == arena._chunks[0].nbytes + arena._chunks[2].nbytes


def test_registrations_end_with_the_arena(team: cpu_attn.Executor, registrations: FakeRegistrations) -> None:
    arena = HostArena(SHAPE, SIZES, team)
    pins = arena.start_pinning(5)
    pins.prepare(1, ROLE_TRANSFER)
    assert registrations.ranges
    del arena
    gc.collect()
    assert not registrations.ranges and not pins._queue._thread.is_alive()


def test_what_cannot_be_pinned_says_so_at_the_start(
    team: cpu_attn.Executor, registrations: FakeRegistrations
) -> None:
    registrations.fail_after = 1
    nbytes = 320 * SHAPE.page_bytes
    message = (
        f"pinning {nbytes} bytes of system RAM (not VRAM) failed with CUDA error 2: lower --inplacekv-host-memory or raise "
        "the locked-memory limit (ulimit -l)"
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        HostArena(SHAPE, SIZES, team).start_pinning(5)
    assert not registrations.ranges, "layers registered before the failure stay registered"


def test_a_spare_that_cannot_be_pinned_fails_only_who_needs_it(
    team: cpu_attn.Executor, registrations: FakeRegistrations, caplog: pytest.LogCaptureFixture
) -> None:
    arena = HostArena(SHAPE, SIZES, team)
    pins = arena.start_pinning(5)
    homes = HomeTable(SIZES, WriteScope(0.0), 5, pins)
    registrations.fail_after = len(registrations.ranges)
    homes.allocate(4 + 320)
    settled(pins)
    assert "no spare chunk for region T" in caplog.text
    with pytest.raises(RuntimeError, match="system RAM"):
        homes.allocate(1)
