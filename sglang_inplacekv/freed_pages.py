"""Pages on their way back. SGLang frees ids that lie on the device, and the free lists are on the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch


class FreedPages:
    """Ids that were freed, until they have reached the host; then `take_back` gets them, in the order of the frees.

    On a GPU nobody waits for them as long as D has enough others: what frees and allocates is queued behind the running
    forward, and the next one would be launched only after that had ended. Used by the scheduler's thread only.
    """

    def __init__(self, take_back: Callable[[list[int]], None], device: str) -> None:
        self._take_back = take_back
        self.travel = torch.device(device).type == "cuda"  # else ids are on the host already
        self._under_way: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()
        self.count = 0  # pages that are free, and not yet known to be

    def add(self, ids: torch.Tensor) -> None:
        """Pages `ids` [pages] int64, on their device, are free from here on."""
        if not self.travel:
            self._take_back(ids.tolist())
            return
        self._under_way.append(self._send(ids))
        self.count += len(ids)

    def _send(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        host = torch.empty(len(ids), dtype=ids.dtype, pin_memory=True)
        host.copy_(ids, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return host, arrived

    def collect(self) -> None:
        """Take back those that have arrived."""
        while self._under_way and self._under_way[0][1].query():
            self._take_first()

    def wait(self) -> None:
        """Take all of them back. Waits for the GPU if any is under way."""
        while self._under_way:
            self._under_way[0][1].synchronize()
            self._take_first()

    def _take_first(self) -> None:
        ids, _ = self._under_way.popleft()
        self.count -= len(ids)
        self._take_back(ids.tolist())

    def forget(self) -> None:
        """All pages are about to be free at once."""
        self._under_way.clear()
        self.count = 0
