"""Pinned memory that is used again, one forward after the other."""

from __future__ import annotations

import torch


class PlanFence:
    """`with` it is queued what leaves through pinned memory that the next one overwrites: FlashInfer's plans, a decode's slots.

    So the host waits first until the copies of the last ones are done. Under the overlapped schedule the GPU is a step behind,
    and more where other processes use it.
    """

    def __init__(self) -> None:
        self._left = torch.cuda.Event()

    def __enter__(self) -> None:
        self._left.synchronize()

    def __exit__(self, *error: object) -> None:
        # After an error too: a part may have been queued.
        self._left.record()
