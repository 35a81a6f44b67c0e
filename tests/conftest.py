"""Set-up shared by every test: no network, no probes, and tests marked ``gpu`` only where there is one."""

from __future__ import annotations

import os

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
# Servers of tests neither spend time on probes nor touch the user's cache of them.
os.environ["SGLANG_INPLACEKV_PROBE"] = "off"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
