"""These tests are about the CPU executor: 1e-4 needs fp32, which the attention of the GPU executor does not offer."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def cpu_host() -> None:
    if torch.cuda.is_available():
        pytest.skip("compares in fp32, on hosts without a GPU")
