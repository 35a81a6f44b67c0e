"""Attention over listed rows: by Triton's interpreter here, compiled on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def test_interpreted() -> None:
    env = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tests.inplacekv.row_attention_checks"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "rows agree" in done.stdout, done.stderr[-2000:]


def test_what_does_not_fit_is_refused() -> None:
    pytest.importorskip("triton")
    from sglang_inplacekv.executors.row_attention import attend_listed

    slots = torch.zeros(1, 3, dtype=torch.int32)
    for q, pool, message in (
        (torch.ones(1, 2, 64), torch.ones(5, 32), "does not fit"),
        (torch.ones(1, 2, 48), torch.ones(5, 48), "does not fit"),
        (torch.ones(1, 2, 64), torch.ones(5, 64).bfloat16(), "does not fit"),
        (torch.ones(2, 2, 64).transpose(0, 1), torch.ones(5, 64), "contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            attend_listed(q, pool, slots, 1.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(
    "shape", [(1, 64, 512, 640), (8, 64, 512, 640), (2, 128, 512, 1153), (3, 20, 64, 150)]
)
def test_compiled(shape: tuple[int, int, int, int]) -> None:
    from tests.inplacekv.row_attention_checks import check

    # A weight's rounding to bf16 is 2**-9 of it at most, and outputs are means of rows of order one.
    check(*shape, torch.bfloat16, "cuda", 2**-8)
