"""The CPU's part of a sparse layer on a GPU: listed rows attended where they lie, while the GPU goes on and then waits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import cpu_attn
from sglang_inplacekv.executors.hand_over import HandOver
from sglang_inplacekv.executors.merge_kernel import State


class HomeRows:
    """Entries of a layer as cpu_attn reads them: rows [n, width] of CPU memory, and the pages of each request.

    pages: int32 [batch, pages], host; entry e of request b is row pages[b, e // page_rows] * page_rows + e % page_rows,
    and there are `entries` of each. Raises ValueError for packed rows, which only a GPU attends.
    """

    def __init__(self, rows: torch.Tensor, pages: torch.Tensor, page_rows: int, entries: int) -> None:
        if rows.dtype == torch.uint8:
            raise ValueError(
                f"rows on the CPU: asked packed ones of {rows.shape[1]} bytes, possible are bf16, fp16 and fp32; with packed "
                "rows fetch all of what is missed (a CPU share of 0)"
            )
        batch, count = pages.shape
        self.latent = cpu_attn.PagedLatent([rows.view(-1, page_rows, rows.shape[1])], rows.shape[1])
        self.table = cpu_attn.PageTable(
            torch.zeros(batch * count, dtype=torch.int32),
            pages.flatten().contiguous(),
            torch.arange(batch + 1, dtype=torch.int32) * count,
            torch.full((batch,), entries, dtype=torch.int32),
        )


class ListedCpu:
    """Attends the entries that each request of a batch leaves to the CPU in a step; between `send` and `state` the GPU is free.

    send(q, entries)   queues their way to the host
    begin()            starts the team once they have arrived, then makes the current stream wait for the answer
    state              [batch, heads, width] and [batch, heads] fp32: the answer, for what the stream does from then on
    finish()           raises what the team raised

    Neither begin nor send may be captured in a graph; what comes before, between and after may.
    """

    def __init__(
        self,
        homes: HomeRows,
        team: cpu_attn.Executor,
        heads: int,
        listed: int,
        scale: float,
        dtype: torch.dtype,
        timeout_s: float,
    ) -> None:
        """dtype: of q. listed: the most entries of a request in a step."""
        batch, width = homes.table.batch, homes.latent.head_dim
        self._homes, self._team, self._scale, self._timeout_s = homes, team, scale, timeout_s
        self._hand = HandOver(batch, heads, (width, width), dtype)
        self._lists = torch.full((batch, 1, listed), -1, dtype=torch.int32, pin_memory=True)
        self._blocks = cpu_attn.BlockTable(homes.table, self._lists, 1)
        self._arguments: cpu_attn.DecodeArguments | None = None  # the same buffers in every step
        self._job: cpu_attn.Job | None = None
        self.state: State = self._hand.computed(batch)
        self.seconds: list[float] = []  # of the team, by step

    def send(self, q: torch.Tensor, entries: torch.Tensor) -> None:
        """q [batch, heads, width]; entries int32 [batch, listed], none twice, -1 for none."""
        self._lists.view(entries.shape).copy_(entries, non_blocking=True)
        target = self._hand.send(q, torch.cuda.current_stream())
        if self._arguments is None:
            into: Sequence[torch.Tensor] = self._hand.to_compute(len(q))
            self._arguments = cpu_attn.DecodeArguments.check(
                target, self._homes.latent, self._blocks, self._scale, *into
            )

    def begin(self) -> None:
        assert self._arguments is not None, "nothing was sent"
        # The answer before is as good as there; whether it failed is still to be asked.
        self.finish()
        self._hand.await_q()
        signal = self._hand.next_answer()
        self._job = self._team.submit_arguments(self._arguments, signal)
        self._hand.queue_wait(signal, torch.cuda.current_stream())

    def finish(self) -> None:
        """Collect the step before, if it was not. RuntimeError or ValueError of the team, TimeoutError."""
        if self._job is not None:
            job, self._job = self._job, None
            try:
                job.wait(self._timeout_s)
            except BaseException:  # an interrupt too
                self._hand.give_up()
                raise
            self.seconds.append(job.seconds)
