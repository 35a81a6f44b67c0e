"""The CPU's side of a split: in torch, and by cpu_attn's kernels where that package is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparse_attn.attend import EntrySource, State, attend_rows, empty_state
from sparse_attn.base import Space

if TYPE_CHECKING:
    from cpu_attn import Executor, Job, PagedLatent

_WAIT_S = 600.0  # far above any step; a wait without an end would hide a dead worker


class Done:
    """A Pending whose state is there."""

    def __init__(self, state: State) -> None:
        self._state = state

    def wait(self) -> State:
        return self._state


class TorchCpuSide:
    """Attends entries of `home` in torch, at once."""

    def __init__(self, home: EntrySource) -> None:
        self._home = home

    def submit(self, q: Tensor, space: Space, ids: Tensor, scale: float) -> Done:
        rows, slots = self._home.slots(space.name, ids)
        return Done(attend_rows(q, space, rows, slots, scale))


class LatentCpuSide:
    """Attends entries of `home` in place by cpu_attn.paged_mla_decode, each entry a page of one token.

    For spaces of one KV head whose value is the key's beginning (V4, DSA), of widths that cpu_attn supports: ValueError else.
    """

    def __init__(self, home: EntrySource, executor: Executor | None = None) -> None:
        self._home, self._executor = home, executor
        self._latents: dict[str, tuple[Tensor, PagedLatent]] = {}

    def submit(self, q: Tensor, space: Space, ids: Tensor, scale: float) -> Done | _Submitted:
        from cpu_attn import PageTable, paged_mla_decode

        rows, slots = self._home.slots(space.name, ids)
        slots = slots[:, 0]
        listed = slots >= 0
        if not listed.any():
            return Done(empty_state(len(q), q.shape[1], space.dv))
        lengths = listed.sum(-1, dtype=torch.int32)
        indptr = torch.zeros(len(q) + 1, dtype=torch.int32)
        torch.cumsum(lengths, 0, out=indptr[1:])
        pages = slots[listed].int()
        table = PageTable(torch.zeros_like(pages), pages, indptr, lengths)
        arguments = (q.contiguous(), self._latent(space, rows), table, scale)
        if self._executor is not None:
            return _Submitted(self._executor.submit_paged_mla_decode(*arguments))
        return Done(paged_mla_decode(*arguments))

    def _latent(self, space: Space, rows: Tensor) -> PagedLatent:
        """Of rows [n, 1, width]; made again when a growing store has moved them."""
        from cpu_attn import PagedLatent

        if space.kv_heads != 1 or not space.v_in_k:
            raise ValueError(f"cpu_attn reads latent rows of one KV head, {space.name} has {space.kv_heads}")
        known = self._latents.get(space.name)
        if known is None or known[0].data_ptr() != rows.data_ptr() or known[0].shape != rows.shape:
            known = (rows, PagedLatent([rows[:, None]], space.dv))
            self._latents[space.name] = known
        return known[1]


class _Submitted:
    """A Pending on cpu_attn's threads."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def wait(self) -> State:
        return self._job.wait(_WAIT_S)
