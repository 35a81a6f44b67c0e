"""Which chunks of the host arena are registered with CUDA, and when."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from sglang_inplacekv.layout import ROLE_TRANSFER
from sglang_inplacekv.queues import WorkQueue
from sglang_inplacekv.tickets import Ticket

logger = logging.getLogger(__name__)

_PORTABLE_MAPPED = 3  # of every context, and readable by kernels at the host's own address


def _register(address: int, nbytes: int) -> int:
    return int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE_MAPPED))


def _unregister(address: int) -> int:
    return int(torch.cuda.cudart().cudaHostUnregister(address))


@contextmanager
def pinned(buffer: torch.Tensor) -> Iterator[None]:
    """Host memory that is pinned for a while; nothing may be copying it when the while ends. RuntimeError if CUDA refuses."""
    code = _register(buffer.data_ptr(), buffer.nbytes)
    if code:
        raise RuntimeError(
            f"pinning {buffer.nbytes} bytes of system RAM for a while failed with CUDA error {code}: raise the "
            "locked-memory limit (ulimit -l)"
        )
    try:
        yield
    finally:
        _unregister(buffer.data_ptr())


class ChunkPins:
    """T chunks are pinned, so that DMA and kernels read them; C chunks are not.

    Pinning takes some 60 ms per GiB, so a thread keeps one empty chunk pinned ahead of need, and a chunk that becomes empty
    stays as it is. The methods are called by the scheduler's thread alone.
    """

    def __init__(self, ranges: Sequence[Sequence[tuple[int, int]]], wait_timeout_s: float) -> None:
        """ranges[chunk]: (address, bytes) of what is registered, aligned to system pages. Nothing is pinned yet."""
        self._ranges, self._timeout_s = ranges, wait_timeout_s
        self._device = torch.cuda.current_device()
        self._pinned: dict[int, list[int]] = {}  # chunk -> registered addresses
        self._pending: dict[int, Ticket] = {}
        self._queue = WorkQueue("pin", wait_timeout_s)

    def pin_first(self, chunk: int) -> None:
        """Pin the first spare, at once: a host that cannot pin says so before the server is healthy."""
        self._pin(chunk)

    def is_pinned(self, chunk: int) -> bool:
        """Whether `chunk` is pinned or about to be."""
        ticket = self._pending.get(chunk)
        return chunk in self._pinned or (ticket is not None and not ticket.done)

    def prepare(self, chunk: int, role: int) -> None:
        """Pin a chunk that becomes T, unpin one that becomes C; a chunk chosen well needs neither."""
        wanted = role == ROLE_TRANSFER
        ticket = self._pending.pop(chunk, None)
        if ticket is not None:
            ticket.wait(self._timeout_s, f"giving chunk {chunk} to region {'T' if wanted else 'C'}")
        if wanted and chunk not in self._pinned:
            self._pin(chunk)
        elif not wanted and chunk in self._pinned:
            self._unpin(chunk)

    def keep_spare(self, empty: Sequence[int]) -> None:
        """Of the empty chunks, see to it that one is pinned before T needs it."""
        if empty and not any(self.is_pinned(chunk) for chunk in empty):
            job = functools.partial(self._pin_ahead, empty[0])
            self._pending[empty[0]] = self._queue.submit(job, f"pinning of chunk {empty[0]}")

    def _pin_ahead(self, chunk: int) -> None:
        torch.cuda.set_device(self._device)
        try:
            self._pin(chunk)
        except RuntimeError as error:
            # T may never need it. When it does, the scheduler's thread tries again and raises.
            logger.warning(f"no spare chunk for region T: {error}")

    def _pin(self, chunk: int) -> None:
        done: list[int] = []
        for address, nbytes in self._ranges[chunk]:
            code = _register(address, nbytes)
            if code:
                for registered in done:
                    _unregister(registered)
                raise self._failure("pinning", chunk, code)
            done.append(address)
        self._pinned[chunk] = done

    def _unpin(self, chunk: int) -> None:
        # Its pages are free, but a copy of the last forward may still be reading one.
        torch.cuda.synchronize(self._device)
        codes = [_unregister(address) for address in self._pinned.pop(chunk)]
        if any(codes):
            raise self._failure("unpinning", chunk, max(codes))

    def _failure(self, what: str, chunk: int, code: int) -> RuntimeError:
        nbytes = sum(nbytes for _, nbytes in self._ranges[chunk])
        return RuntimeError(
            f"{what} {nbytes} bytes of system RAM (not VRAM) failed with CUDA error {code}: "
            "lower --inplacekv-host-memory or raise the locked-memory limit (ulimit -l)"
        )

    def close(self) -> None:
        """Unregister everything. To be called before the memory goes, or its addresses could not be pinned again."""
        self._queue.close()
        while self._pinned:
            for address in self._pinned.popitem()[1]:
                _unregister(address)
