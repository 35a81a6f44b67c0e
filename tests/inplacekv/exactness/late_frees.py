"""Freed pages as a GPU gives them back, without one."""

from __future__ import annotations

import random

import torch

from sglang_inplacekv.freed_pages import FreedPages


class LateEvent:
    def __init__(self, frees: LateFrees, polls: int) -> None:
        self._frees, self._polls = frees, polls

    def query(self) -> bool:
        self._polls -= 1
        return self._polls < 0

    def synchronize(self) -> None:
        self._frees.waits += self._polls >= 0


class LateFrees(FreedPages):
    """Ids arrive when they have been asked for `polls` times, or are waited for."""

    polls = range(12)

    def __init__(self, take_back, device) -> None:
        super().__init__(take_back, device)
        self.travel, self.waits, self._draw = True, 0, random.Random(0)

    def _send(self, ids: torch.Tensor):
        return ids.clone(), LateEvent(self, self._draw.choice(self.polls))
