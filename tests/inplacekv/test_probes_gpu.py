"""Probes beside a real GPU: its address and its link, and that no GPU memory is kept."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from sglang_inplacekv import cores, probes
from sglang_inplacekv.host_rates import measure_link
from sglang_inplacekv.layout import KVShape
from sglang_inplacekv.planning import ModelKV
from sglang_inplacekv.roofline import balanced_share

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

MODEL = ModelKV(KVShape(48, 4, 128, torch.bfloat16, 256), 32)


def test_the_gpu_has_an_address() -> None:
    assert re.fullmatch(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.0", cores._gpu_address())
    found = cores.topology("cuda")
    assert len(cores.team_cores(None, "cuda")) == found.most_threads


@pytest.mark.parametrize("piece_bytes", [2**28, 2**19])
def test_the_link(piece_bytes: int) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    assert 1e9 < measure_link(piece_bytes) < 1e12
    assert torch.cuda.memory_reserved() == before


def test_rates_of_this_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = probes.host_rates(MODEL, "cuda")
    assert not found.kept and probes.host_rates(MODEL, "cuda").kept
    lines = found.lines(MODEL)
    assert lines is not None and 0.0 < balanced_share(*lines, 10**6) < 1.0
