"""The executor contract: everything a forward does to the regions, in the order SGLang's layers call it."""

from __future__ import annotations

import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

import cpu_attn
from sglang_inplacekv.feedback import Costs
from sglang_inplacekv.queues import WorkQueue
from sglang_inplacekv.regions import Regions
from sglang_inplacekv.step_plan import StepPlan
from sglang_inplacekv.tickets import Ticket


class Executor(ABC):
    """Runs one forward at a time: begin_forward, then per layer write_layer and extend, or the parts of a decode, then
    end_forward.

    Layers are counted from 0 on this rank. Tensors are over the forward's new tokens, request after request.
    """

    def __init__(self, regions: Regions, queues: Sequence[str]) -> None:
        config = regions.config
        self.regions = regions
        self._timeout_s = config.wait_timeout_s
        self._current: Any = None  # the plan in the form that this executor's layers use
        self._queues = {name: WorkQueue(name, config.wait_timeout_s, config.jitter_seed) for name in queues}
        self._costs = Costs()
        self._answered_s = 0.0  # when the CPU's last answer came
        self._kv = [regions.arena.attention_regions(layer) for layer in range(regions.shape.layers)]
        # Threads would otherwise outlive a server that was shut down inside a living process.
        self._finalizer = weakref.finalize(self, _close_queues, list(self._queues.values()))

    def acknowledge(self) -> None:
        """Between forwards: take back what finished flushes have released."""
        self.regions.windows.acknowledge()

    @abstractmethod
    def begin_forward(self, plan: StepPlan, graph_rows: int | None = None) -> None:
        """Adopt `plan` and start the transfers that do not depend on the first layer.

        graph_rows: of the captured decode that is about to be replayed.
        """

    @abstractmethod
    def write_layer(self, layer: int, *parts: torch.Tensor) -> None:
        """Put `parts` (k and v, or a latent), each [tokens, kv_heads, head_dim] in the KV dtype, where the plan says.

        They may be reused on return.
        """

    def decode(self, layer: int, q: torch.Tensor, scale: float, out: torch.Tensor) -> None:
        """Attend q [requests, q_heads, head_dim] over all planned tokens, into out [requests, q_heads, out_dim]."""
        state = self.decode_device(layer, q, scale)
        self.decode_host(layer, q, scale)
        self.decode_merge(state, out)

    # The same in three parts, of which a CUDA graph may capture the first and the last, and the write before them. In a
    # captured decode, q and out may have more rows than the plan has requests; what those come to is of no interest.

    def reserve_rows(self, rows: int) -> None:
        """Captured decodes will have up to `rows` rows."""
        raise NotImplementedError(f"{type(self).__name__} has no CUDA graphs")

    def begin_capture(self, rows: int) -> None:
        """The decode that follows, of `rows` rows, is warmed up and captured: there is no plan."""
        raise NotImplementedError(f"{type(self).__name__} has no CUDA graphs")

    def write_decoded(self, layer: int, *parts: torch.Tensor) -> None:
        """write_layer of a decode."""
        self.write_layer(layer, *parts)

    @abstractmethod
    def decode_device(self, layer: int, q: torch.Tensor, scale: float) -> Any:
        """Attend D and windows; the result is for decode_merge."""

    @abstractmethod
    def decode_host(self, layer: int, q: torch.Tensor, scale: float) -> None:
        """Attend C and T. Never captured: transfers and the CPU's part differ from step to step."""

    @abstractmethod
    def decode_merge(self, state: Any, out: torch.Tensor) -> None:
        """Merge what the two before came to into out."""

    @abstractmethod
    def extend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """Attend q [tokens, q_heads, head_dim] over the planned prefix and causally over k, v, into out of q's shape."""

    def read_prefix(self, layer: int) -> torch.Tensor:
        """The latent rows that an extend attends beside its own, [tokens, head_dim]. Instead of `extend`, once a layer."""
        raise NotImplementedError(f"{type(self).__name__} attends latent rows as they are")

    def end_forward(self) -> None:
        """After the last layer: start the flushes of the windows that this forward filled."""
        for page in self._plan.flush_pages:
            ticket = self._submit_flush(page)
            self.regions.homes.set_ticket([page], ticket)
            self.regions.windows.begin_flush(page, ticket)

    @property
    def _forward(self) -> Any:
        """The forward that has begun. Raises RuntimeError before the first."""
        if self._current is None:
            raise RuntimeError("no forward has begun")
        return self._current

    @property
    def _plan(self) -> StepPlan:
        return self._forward.plan

    @abstractmethod
    def _submit_flush(self, page: int) -> Ticket:
        """Queue the copy of `page`'s window to its home."""

    def submit_write(self, copy: Callable[[], None], what: str, after: Sequence[Ticket] = ()) -> Ticket:
        """Queue `copy`, in order with the writes of prefills; its ticket fails with any of `after`.

        It holds the device tensors that it reads, as they are at this call, and returns with its bytes in pageable memory.
        """
        return self._queues["write"].submit(copy, what, after)

    def _computed_arguments(
        self,
        layer: int,
        q: torch.Tensor,
        table: cpu_attn.PageTable,
        scale: float,
        *into: torch.Tensor,
    ) -> cpu_attn.DecodeArguments:
        """What the CPU team is to attend of C."""
        return cpu_attn.DecodeArguments.check(q, self._computed_kv(layer), table, scale, *into)

    def _computed_kv(self, layer: int) -> cpu_attn.PagedKV | cpu_attn.PagedLatent:
        kv = self._kv[layer]
        if kv is None:
            raise RuntimeError(f"{self._plan.who}, layer {layer}: pages in region C, which has no memory")
        return kv

    def _collect(self, job: cpu_attn.Job, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        try:
            state = job.wait(self._timeout_s)
            self._count_job(job, layer)
            return state
        except (TimeoutError, RuntimeError, ValueError) as error:
            raise RuntimeError(f"{self._plan.who}, layer {layer}, region C: {error}") from error

    def _count_job(self, job: cpu_attn.Job, layer: int) -> None:
        now_s = time.perf_counter()
        self._costs.cpu_s += job.seconds
        self._costs.cpu_tokens += self._plan.cpu_tokens
        self._costs.answers += 1
        if layer:  # the layer before was this forward's
            self._costs.between_s += now_s - self._answered_s - job.seconds
            self._costs.betweens += 1
        self._answered_s = now_s

    def note_costs(self, costs: Costs) -> None:
        """Add what a decode has cost outside this executor."""
        self._costs.add(costs)

    def take_costs(self) -> Costs:
        """What the decodes since this was last asked have cost, as far as it is known by now. Waits for nothing."""
        taken, self._costs = self._costs, Costs()
        return taken

    def drain(self) -> None:
        """Wait for everything in flight."""
        for queue in self._queues.values():
            queue.submit(lambda: None, f"drain of the {queue.name} queue").wait(self._timeout_s, "drain")
        self.acknowledge()

    def close(self) -> None:
        self._finalizer()


def _close_queues(queues: Sequence[WorkQueue]) -> None:
    for queue in queues:
        queue.close()
