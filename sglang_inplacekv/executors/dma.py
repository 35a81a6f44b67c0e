"""Many copies in one call: `cudaMemcpyBatchAsync` of the CUDA runtime that torch has loaded, through ctypes."""

from __future__ import annotations

import ctypes
import functools
import logging
from typing import Any

import numpy as np
import torch

logger = logging.getLogger(__name__)

_BATCH_SINCE = 13000  # CUDA 12.8 has the name already, with one more argument
_SOURCE_IN_STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream
_KIND_DEFAULT = 4  # cudaMemcpyDefault: the runtime knows both ends


class _Location(ctypes.Structure):
    """cudaMemLocation: hints for managed and pageable memory only, so left at zero."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """cudaMemcpyAttributes."""

    _fields_ = (
        ("srcAccessOrder", ctypes.c_int),
        ("srcLocHint", _Location),
        ("dstLocHint", _Location),
        ("flags", ctypes.c_uint),
    )


class Runtime:
    """The few calls of libcudart that torch does not offer. ctypes releases the GIL during each."""

    def __init__(self, library: Any) -> None:
        self._library = library
        library.cudaGetErrorString.restype = ctypes.c_char_p
        version = ctypes.c_int()
        self._check("cudaRuntimeGetVersion", library.cudaRuntimeGetVersion(ctypes.byref(version)))
        self._attributes, self._first = (
            _Attributes(srcAccessOrder=_SOURCE_IN_STREAM_ORDER),
            ctypes.c_size_t(0),
        )
        self.batched = version.value >= _BATCH_SINCE and hasattr(library, "cudaMemcpyBatchAsync")
        if self.batched:
            arrays, size = [ctypes.c_void_p] * 3, ctypes.c_size_t
            library.cudaMemcpyBatchAsync.argtypes = (
                *arrays, size, ctypes.POINTER(_Attributes), ctypes.POINTER(size), size, ctypes.c_void_p,
            )  # fmt: skip
        else:
            logger.warning(
                f"CUDA runtime {version.value} has no batched copies (13000 has): every run of pages is a copy of its own"
            )
            library.cudaMemcpyAsync.argtypes = (
                *[ctypes.c_void_p] * 2, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p,
            )  # fmt: skip

    def copy(self, targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray, stream: int) -> None:
        """Queue all copies on `stream`; uint64 arrays of one length, which must not be 0."""
        if self.batched:
            code = self._library.cudaMemcpyBatchAsync(
                targets.ctypes.data,
                sources.ctypes.data,
                sizes.ctypes.data,
                len(sizes),
                ctypes.byref(self._attributes),
                ctypes.byref(self._first),
                1,
                stream,
            )
            self._check(f"cudaMemcpyBatchAsync of {len(sizes)} copies, {sizes.sum()} bytes", code)
            return
        for target, source, nbytes in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            code = self._library.cudaMemcpyAsync(target, source, nbytes, _KIND_DEFAULT, stream)
            self._check(f"cudaMemcpyAsync of {nbytes} bytes", code)

    def _check(self, what: str, code: int) -> None:
        if code:
            text = self._library.cudaGetErrorString(code).decode()
            raise RuntimeError(f"{what} failed with CUDA error {code} ({text})")


@functools.cache
def runtime() -> Runtime:
    """Loaded on first use, so that importing this needs no CUDA. The soname finds the library that torch runs on."""
    if torch.version.cuda is None:
        raise RuntimeError("this build of torch has no CUDA")
    return Runtime(ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}"))


class CopyBatch:
    """Copies that are issued together, again and again, each time shifted by whole layers or to another buffer.

    targets, sources and sizes are addresses and bytes, one entry a copy, in any order and of any alignment; targets overlap
    neither each other nor a source. Addresses may be offsets, to be completed by the shifts of `issue`. The object owns
    neither end: the caller keeps the memory mapped (host memory pinned) until `stream` has run the copies. A batch starts
    and ends in stream order, its copies run in no particular order.

    On a CUDA runtime older than 13 each copy is a `cudaMemcpyAsync`, as tensor.copy_(non_blocking=True) would issue; a
    warning says so once.
    """

    def __init__(self, targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray) -> None:
        arrays = [np.ascontiguousarray(array, dtype=np.uint64) for array in (targets, sources, sizes)]
        if len({array.shape for array in arrays}) != 1 or arrays[0].ndim != 1:
            raise ValueError(
                f"copies need as many targets as sources and sizes, got {[a.shape for a in arrays]}"
            )
        self._targets, self._sources, self._sizes = arrays
        self.nbytes = int(self._sizes.sum())

    def __len__(self) -> int:
        return len(self._sizes)

    def issue(
        self,
        stream: torch.cuda.Stream,
        source_shift: np.ndarray | int = 0,
        target_shift: np.ndarray | int = 0,
    ) -> None:
        """Queue the copies on `stream`, which is not the default stream. The shifts, in bytes, are added to the addresses.

        The calling thread's device must be the stream's. Raises RuntimeError with CUDA's text.
        """
        if not len(self):
            return
        if not stream.cuda_stream:
            raise ValueError("batched copies need a stream of their own, not the default stream")
        targets, sources = self._targets + np.uint64(target_shift), self._sources + np.uint64(source_shift)
        runtime().copy(targets, sources, self._sizes, stream.cuda_stream)


def to_gpu(values: np.ndarray) -> torch.Tensor:
    """A copy on the GPU, in order with the current stream and without waiting for it."""
    return torch.from_numpy(values).pin_memory().cuda(non_blocking=True)
