"""Manifold-constrained hyper-connections (mHC): a residual of several streams, mixed by weights that each token gives."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from .geometry import V4Geometry


def unit_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) over the last dimension, fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def doubly_stochastic(weights: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """Softmax of [..., n, n] over rows, then Sinkhorn: columns, and `iterations` - 1 times rows and columns, sum to one."""
    weights = weights.softmax(-1) + eps
    weights = weights / (weights.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
        weights = weights / (weights.sum(-2, keepdim=True) + eps)
    return weights


class HyperConnection(nn.Module):
    """Around one sublayer: `collapse` makes its input of the streams, `expand` the streams of its output."""

    def __init__(self, geometry: V4Geometry) -> None:
        super().__init__()
        self.streams, self._iterations = geometry.hc_mult, geometry.hc_sinkhorn_iters
        self._eps, self._norm_eps = geometry.hc_eps, geometry.rms_norm_eps
        rows = (2 + self.streams) * self.streams
        self.fn = nn.Parameter(torch.empty(rows, self.streams * geometry.hidden_size, dtype=torch.float32))
        self.base = nn.Parameter(torch.empty(rows, dtype=torch.float32))
        self.scale = nn.Parameter(torch.empty(3, dtype=torch.float32))

    def collapse(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """streams [tokens, n, hidden] -> the sublayer's input [tokens, hidden], and what `expand` needs: post, comb, fp32."""
        n = self.streams
        weights = functional.linear(unit_rms(streams.flatten(1), self._norm_eps), self.fn)
        pre, post, comb = weights.split((n, n, n * n), dim=-1)
        pre_base, post_base, comb_base = self.base.split((n, n, n * n))
        pre = torch.sigmoid(pre * self.scale[0] + pre_base) + self._eps
        post = 2 * torch.sigmoid(post * self.scale[1] + post_base)
        comb = (comb * self.scale[2] + comb_base).view(-1, n, n)
        comb = doubly_stochastic(comb, self._iterations, self._eps)
        return (pre.unsqueeze(-1) * streams).sum(1).to(streams.dtype), post, comb

    @staticmethod
    def expand(
        out: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
    ) -> torch.Tensor:
        """Stream k becomes post[k] * out + sum over j of comb[j, k] * streams[j]."""
        mixed = comb.to(streams.dtype).transpose(1, 2) @ streams
        return post.to(streams.dtype).unsqueeze(-1) * out.unsqueeze(1) + mixed


class HyperHead(nn.Module):
    """What the last norm reads of the streams."""

    def __init__(self, geometry: V4Geometry) -> None:
        super().__init__()
        self._eps, self._norm_eps = geometry.hc_eps, geometry.rms_norm_eps
        streams = geometry.hc_mult
        self.fn = nn.Parameter(torch.empty(streams, streams * geometry.hidden_size, dtype=torch.float32))
        self.base = nn.Parameter(torch.empty(streams, dtype=torch.float32))
        self.scale = nn.Parameter(torch.empty(1, dtype=torch.float32))

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """[tokens, n, hidden] -> [tokens, hidden]."""
        weights = functional.linear(unit_rms(streams.flatten(1), self._norm_eps), self.fn)
        weights = torch.sigmoid(weights * self.scale + self.base) + self._eps
        return (weights.unsqueeze(-1) * streams).sum(1).to(streams.dtype)
