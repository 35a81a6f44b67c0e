"""Probes beside a real GPU: its address, its link, and both sides at once; no GPU memory is kept."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch

from sglang_inplacekv import cores, probes
from sglang_inplacekv.host_rates import team_sizes
from sglang_inplacekv.layout import KVShape
from sglang_inplacekv.planning import ModelKV
from sglang_inplacekv.queued_copies import QueuedCopies
from sglang_inplacekv.roofline import balanced_share

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

_NOISE = 1.15  # between two measurements of one rate, of which the second may find the host less busy

MODEL = ModelKV(KVShape(48, 4, 128, torch.bfloat16, 256), 32)


def test_the_gpu_has_an_address() -> None:
    assert re.fullmatch(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.0", cores._gpu_address())
    found = cores.topology("cuda")
    assert len(cores.team_cores(None, "cuda")) == found.most_threads


@pytest.mark.parametrize("piece_bytes", [2**28, 2**19])
def test_the_link(piece_bytes: int) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    copies = QueuedCopies(piece_bytes)
    assert 1e9 < copies.rate_alone() < 1e12
    copies.close()
    assert torch.cuda.memory_reserved() == before


def test_both_sides_at_once() -> None:
    """Neither is faster than alone, but for noise."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    rates = probes.measure_rates([cores.topology("cuda").most_threads], MODEL, "cuda")
    assert torch.cuda.memory_reserved() == before
    assert rates.attention is not None and rates.attention.link_bytes_s is not None
    assert rates.team.token_s is not None and rates.link_bytes_s is not None
    assert 1e9 < rates.attention.link_bytes_s < _NOISE * rates.link_bytes_s < 1e12
    tokens = 2**26 // MODEL.layer_token_bytes
    beside_s = rates.attention.fixed_s + tokens * rates.attention.token_s
    assert beside_s * _NOISE > tokens * rates.team.token_s
    assert 1e9 < 2**26 / beside_s < 1e12


def test_probes_are_made_in_under_two_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    torch.cuda.synchronize()
    """The best of three, in time and in how many teams there was time for: others may use the host."""
    took_s, teams = [], []
    for _ in range(3):
        started = time.monotonic()
        found = probes.host_rates(MODEL, "cuda", redo=True)
        took_s.append(time.monotonic() - started)
        teams.append(len(found.teams))
    assert max(teams) > 1 or len(team_sizes(found.teams[0].threads)) == 1
    assert min(took_s) < 2.0, took_s


def test_rates_of_this_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = probes.host_rates(MODEL, "cuda")
    # Of a host so busy that one team took all the time, nothing is kept.
    keeps = len(found.teams) > 1 or len(team_sizes(found.teams[0].threads)) == 1
    assert not found.kept and probes.host_rates(MODEL, "cuda").kept == keeps
    lines = found.lines(MODEL)
    assert lines is not None and 0.0 < balanced_share(*lines, 10**6) < 1.0
