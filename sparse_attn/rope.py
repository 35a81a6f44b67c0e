"""Rotary positions in the layouts of the models here. Angles and products are fp32, results of the input's dtype.

`inv_freq` is fp32 [rope_dim / 2], radians a token.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def frequencies(rope_dim: int, theta: float) -> Tensor:
    # In the order of the released code, to the bit: a rounding more turns position 10^6 by a twentieth of a radian.
    return 1.0 / theta ** (torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim)


def yarn_frequencies(
    rope_dim: int,
    theta: float,
    factor: float,
    original_positions: int,
    beta_fast: float = 32,
    beta_slow: float = 1,
) -> Tensor:
    """YaRN (arXiv 2309.00071): slow channels are stretched by `factor`, fast ones stay, a ramp lies between.

    DeepSeek-V4 takes the frequencies alone: neither cos and sin nor the softmax scale carry YaRN's attention factor there.
    """

    def channel_of(rotations: float) -> float:  # that turns so often within the original context
        return rope_dim * math.log(original_positions / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    plain = frequencies(rope_dim, theta)
    low = max(math.floor(channel_of(beta_fast)), 0)
    high = min(math.ceil(channel_of(beta_slow)), rope_dim - 1)
    width = high - low if high > low else 0.001
    ramp = ((torch.arange(rope_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    kept = 1 - ramp
    return plain / factor * (1 - kept) + plain * kept


def _cos_sin(x: Tensor, positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """Of x [T, ..., d]: [T, ..., rope_dim / 2] with ones between."""
    angles = positions.to(x.device, torch.float32)[:, None] * inv_freq.to(x.device)
    angles = angles.view(len(positions), *(1,) * (x.dim() - 2), -1)
    return angles.cos(), angles.sin()


def rotate_tail(x: Tensor, positions: Tensor, inv_freq: Tensor, *, back: bool = False) -> Tensor:
    """Rotate the last channels of x [T, ..., d], pairs (2i, 2i + 1), at positions [T]; `back` by the negative angle."""
    rope_dim = 2 * len(inv_freq)
    cos, sin = _cos_sin(x, positions, inv_freq)
    if back:
        sin = -sin
    plain, tail = x[..., :-rope_dim], x[..., -rope_dim:].float()
    even, odd = tail[..., 0::2], tail[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    return torch.cat((plain, turned.to(x.dtype)), -1)


def rotate_head_halves(x: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    """Rotate the first channels of x [T, ..., d], pairs (i, i + rope_dim / 2), at positions [T]."""
    half = len(inv_freq)
    cos, sin = _cos_sin(x, positions, inv_freq)
    low, high, plain = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    turned = torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
    return torch.cat((turned.to(x.dtype), plain), -1)
