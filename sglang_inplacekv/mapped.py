"""Host memory as the GPU reads it, at the host's own address."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class _CudaArray:
    """The CUDA array interface, which has no bf16: integers of the same size."""

    def __init__(self, address: int, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": tuple(shape),
            "strides": tuple(strides),
            "typestr": f"<i{itemsize}" if itemsize > 1 else "|i1",
            "version": 2,
        }


def mapped_tensor(
    address: int, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """A CUDA tensor over the host's own bytes at `address`; strides in bytes. Nothing keeps the memory alive.

    What of it kernels touch has to be pinned. Raises RuntimeError where the driver does not map it at that address.
    """
    array = _CudaArray(address, shape, strides, dtype.itemsize)
    tensor = torch.as_tensor(array, device=f"cuda:{torch.cuda.current_device()}")
    if tensor.data_ptr() != address:
        raise RuntimeError(f"host memory at {address:#x} was copied to the GPU instead of mapped there")
    return tensor.view(dtype)
