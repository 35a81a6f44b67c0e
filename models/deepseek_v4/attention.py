"""DeepSeek-V4's attention but for what it attends: projections in, the backend's selection and attention, projections out."""

from __future__ import annotations

import torch
from sglang.srt.model_executor.forward_context import get_attn_backend
from torch import nn

from sparse_attn.rope import frequencies, rotate_tail, yarn_frequencies

from .geometry import CSA_RATIO, V4Geometry
from .hyper import unit_rms


class RmsNorm(nn.Module):
    """Computed in fp32, weight included; the weight is fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self._eps = eps
        self.weight = nn.Parameter(torch.ones(width, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (unit_rms(x, self._eps) * self.weight).to(x.dtype)


def layer_frequencies(geometry: V4Geometry, layer: int) -> torch.Tensor:
    """fp32 [rope_dim / 2], radians a token: of everything that a layer rotates."""
    if not geometry.ratios[layer]:
        return frequencies(geometry.rope_dim, geometry.rope_theta)
    theta, yarn = geometry.compress_rope_theta, geometry.yarn
    if yarn is None:
        return frequencies(geometry.rope_dim, theta)
    scaling = (yarn.factor, yarn.original_tokens, yarn.beta_fast, yarn.beta_slow)
    return yarn_frequencies(geometry.rope_dim, theta, *scaling)


class CompressorWeights(nn.Module):
    """What makes entries of `width` of blocks of `ratio` tokens. Blocks of CSA overlap, so that each token has two parts."""

    def __init__(self, geometry: V4Geometry, ratio: int, width: int) -> None:
        super().__init__()
        both = (2 if ratio == CSA_RATIO else 1) * width
        self.kv_proj = nn.Linear(geometry.hidden_size, both, bias=False)
        self.gate_proj = nn.Linear(geometry.hidden_size, both, bias=False)
        self.position_bias = nn.Parameter(torch.empty(ratio, both, dtype=torch.float32))
        self.kv_norm = RmsNorm(width, geometry.rms_norm_eps)


class IndexerWeights(CompressorWeights):
    def __init__(self, geometry: V4Geometry) -> None:
        super().__init__(geometry, CSA_RATIO, geometry.index_head_dim)
        heads = geometry.index_n_heads
        self.q_b_proj = nn.Linear(geometry.q_lora_rank, heads * geometry.index_head_dim, bias=False)
        self.weights_proj = nn.Linear(geometry.hidden_size, heads, bias=False)


class Attention(nn.Module):
    """One layer. `compressor` (CSA and HCA) and its `indexer` (CSA) are weights that the backend's selector reads."""

    def __init__(self, geometry: V4Geometry, layer: int) -> None:
        super().__init__()
        self.layer_id, self.geometry = layer, geometry
        heads, width, eps = geometry.num_attention_heads, geometry.head_dim, geometry.rms_norm_eps
        hidden, rank = geometry.hidden_size, geometry.q_lora_rank
        groups, inner = geometry.o_groups, geometry.o_groups * geometry.o_lora_rank
        self.q_a_proj = nn.Linear(hidden, rank, bias=False)
        self.q_a_norm = RmsNorm(rank, eps)
        self.q_b_proj = nn.Linear(rank, heads * width, bias=False)
        self.kv_proj = nn.Linear(hidden, width, bias=False)
        self.kv_norm = RmsNorm(width, eps)
        self.o_a_proj = nn.Linear(heads * width // groups, inner, bias=False)
        self.o_b_proj = nn.Linear(inner, hidden, bias=False)
        self.sinks = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        # Made on the CPU in full precision whatever the model's device and dtype.
        self.register_buffer("inv_freq", layer_frequencies(geometry, layer), persistent=False)
        ratio = geometry.ratios[layer]
        self.compressor = CompressorWeights(geometry, ratio, width) if ratio else None
        if self.compressor is not None and ratio == CSA_RATIO:
            self.compressor.indexer = IndexerWeights(geometry)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden], normalised, and positions [tokens] -> [tokens, hidden]."""
        geometry = self.geometry
        q_resid = self.q_a_norm(self.q_a_proj(x))
        q = self.q_b_proj(q_resid).unflatten(-1, (geometry.num_attention_heads, geometry.head_dim))
        q = rotate_tail(unit_rms(q, geometry.rms_norm_eps).to(x.dtype), positions, self.inv_freq)
        kv = rotate_tail(self.kv_norm(self.kv_proj(x)), positions, self.inv_freq)
        out = get_attn_backend().attend(self.layer_id, h=x, q_resid=q_resid, q=q, kv=kv)
        return self._project(out.to(x.dtype))

    def _project(self, out: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, head_dim] -> [tokens, hidden]: adjacent heads form a group, whose rows of o_a_proj are its own."""
        groups = self.geometry.o_groups
        weight = self.o_a_proj.weight.unflatten(0, (groups, -1))
        inner = torch.einsum("tgi,goi->tgo", out.reshape(len(out), groups, -1), weight)
        return self.o_b_proj(inner.flatten(1))
