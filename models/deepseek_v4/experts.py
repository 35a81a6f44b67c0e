"""DeepSeek-V4's feed-forward: routed experts, chosen by scores or by a table of token ids, and one that all tokens share."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from .geometry import V4Geometry

_WEIGHT_SUM_EPS = 1e-20


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """silu(gate) * up, both clamped first: the gate from above, up from both sides."""
    return functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


class Router(nn.Module):
    """Which experts serve a token, and with what weights: the scores of those chosen, made to sum to the scaling factor."""

    def __init__(self, geometry: V4Geometry, layer: int) -> None:
        super().__init__()
        self._chosen, self._scaling = geometry.num_experts_per_tok, geometry.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(geometry.n_routed_experts, geometry.hidden_size))
        self.by_table = geometry.hash_layers[layer]
        if self.by_table:
            table = torch.zeros(geometry.vocab_size, self._chosen, dtype=torch.int64)
            self.register_buffer("tid2eid", table)
        else:
            bias = torch.zeros(geometry.n_routed_experts, dtype=torch.float32)
            self.register_buffer("e_score_correction_bias", bias)

    def forward(self, x: torch.Tensor, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [tokens, hidden], input_ids [tokens] -> experts [tokens, chosen] int64, weights likewise fp32."""
        scores = functional.softplus(functional.linear(x.float(), self.weight.float())).sqrt()
        if self.by_table:
            experts = self.tid2eid[input_ids]
        else:
            experts = (scores + self.e_score_correction_bias).topk(self._chosen, dim=-1).indices
        weights = scores.gather(1, experts)
        return experts, weights * (self._scaling / (weights.sum(-1, keepdim=True) + _WEIGHT_SUM_EPS))


class Experts(nn.Module):
    """All routed experts: gate_up_proj [experts, 2 * inner, hidden], down_proj [experts, hidden, inner]."""

    def __init__(self, geometry: V4Geometry) -> None:
        super().__init__()
        count, inner = geometry.n_routed_experts, geometry.moe_intermediate_size
        self._limit = geometry.swiglu_limit
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, geometry.hidden_size))
        self.down_proj = nn.Parameter(torch.empty(count, geometry.hidden_size, inner))

    def forward(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Each expert once over its own tokens, which lie together once sorted. Returns fp32."""
        flat, order = experts.flatten().sort(stable=True)
        tokens = order // experts.shape[1]
        ends = torch.searchsorted(flat, torch.arange(len(self.down_proj), device=x.device), right=True)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        scale = weights.flatten()[order].unsqueeze(-1)
        first = 0
        for expert, last in enumerate(ends.tolist()):
            if last > first:
                own = tokens[first:last]
                gate, up = functional.linear(x[own], self.gate_up_proj[expert]).chunk(2, dim=-1)
                part = functional.linear(swiglu(gate, up, self._limit), self.down_proj[expert])
                out.index_add_(0, own, part.float() * scale[first:last])
            first = last
        return out


class SharedExpert(nn.Module):
    def __init__(self, geometry: V4Geometry) -> None:
        super().__init__()
        hidden, inner = geometry.hidden_size, geometry.moe_intermediate_size
        self._limit = geometry.swiglu_limit
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x), self._limit))


class FeedForward(nn.Module):
    def __init__(self, geometry: V4Geometry, layer: int) -> None:
        super().__init__()
        self.gate = Router(geometry, layer)
        self.experts = Experts(geometry)
        self.shared_experts = SharedExpert(geometry)

    def forward(self, x: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden] -> the same shape and dtype."""
        routed = self.experts(x, *self.gate(x, input_ids))
        return (routed + self.shared_experts(x).float()).to(x.dtype)
