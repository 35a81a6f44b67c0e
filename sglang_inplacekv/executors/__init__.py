"""Executors: what runs a StepPlan on a given kind of host."""

from __future__ import annotations

from sglang_inplacekv.config import ConfigError
from sglang_inplacekv.executors.base import Executor
from sglang_inplacekv.regions import Regions


def make_executor(regions: Regions, device: str) -> Executor:
    """The executor for a torch device type. FlashInfer and Triton are imported only where there is a GPU."""
    if device == "cuda":
        from sglang_inplacekv.executors.cuda import CudaExecutor

        return CudaExecutor(regions)
    if device == "cpu":
        from sglang_inplacekv.executors.cpu import CpuExecutor

        return CpuExecutor(regions)
    raise ConfigError(f"--device: asked {device}, possible are cuda and cpu")
