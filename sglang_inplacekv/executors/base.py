"""The executor contract: everything a forward does to the regions, in the order SGLang's layers call it."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from sglang_inplacekv.step_plan import StepPlan


class Executor(ABC):
    """Runs one forward at a time: begin_forward, then per layer write_layer and decode or extend, then end_forward.

    Layers are counted from 0 on this rank. Tensors are over the forward's new tokens, request after request.
    """

    @abstractmethod
    def acknowledge(self) -> None:
        """Between forwards: take back what finished flushes have released."""

    @abstractmethod
    def begin_forward(self, plan: StepPlan) -> None:
        """Adopt `plan` and start the transfers that do not depend on the first layer."""

    @abstractmethod
    def write_layer(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put k and v, [tokens, kv_heads, head_dim] in the KV dtype, where the plan says. They may be reused on return."""

    @abstractmethod
    def decode(self, layer: int, q: torch.Tensor, scale: float) -> torch.Tensor:
        """Attend q [requests, q_heads, head_dim] over all planned tokens; fp32 result of the same shape."""

    @abstractmethod
    def extend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attend q [tokens, q_heads, head_dim] over the planned prefix and causally over k, v; fp32 result of q's shape."""

    @abstractmethod
    def end_forward(self) -> None:
        """After the last layer: start the flushes of the windows that this forward filled."""

    @abstractmethod
    def drain(self) -> None:
        """Wait for everything in flight."""

    @abstractmethod
    def close(self) -> None: ...
