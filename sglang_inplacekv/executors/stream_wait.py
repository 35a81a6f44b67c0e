"""A stream that waits for a value in host memory: `cuStreamWaitValue32` of the driver, through ctypes."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

_UNTIL_GREATER_OR_EQUAL = 0  # CU_STREAM_WAIT_VALUE_GEQ: of the difference, so that values may wrap around


@functools.cache
def _driver() -> Any:
    driver = ctypes.CDLL("libcuda.so.1")
    if not hasattr(driver, "cuStreamWaitValue32_v2"):
        raise RuntimeError("the CUDA driver has no cuStreamWaitValue32: one for CUDA 12 or later is needed")
    driver.cuStreamWaitValue32_v2.argtypes = (
        ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint,
    )  # fmt: skip
    return driver


def wait_for_value(stream: torch.cuda.Stream, flag: torch.Tensor, value: int) -> None:
    """What is queued on `stream` from now on runs once flag ([1] int32, pinned) is `value` or has gone past it.

    value: int32; past means by less than 2**31 steps, around the end of the range too. No kernel waits: the stream does.
    Raises RuntimeError with the driver's error code.
    """
    code = _driver().cuStreamWaitValue32_v2(
        stream.cuda_stream, flag.data_ptr(), value % 2**32, _UNTIL_GREATER_OR_EQUAL
    )
    if code:
        raise RuntimeError(f"cuStreamWaitValue32 failed with CUDA driver error {code}")
