"""FP8 and FP4 tensors of released checkpoints, as plain weights. Scales are powers of two (ue8m0)."""

from __future__ import annotations

import torch

FP8_BLOCK = 128  # rows and columns that share a scale
FP4_BLOCK = 32  # columns that share a scale
# e2m1: sign, two bits of exponent, one of mantissa; the nibble is the index.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_VALUES = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
_BYTES = (torch.int8, torch.uint8)
_UE8M0_BIAS = 127


def is_quantised(weight: torch.Tensor) -> bool:
    """Whether `weight` means nothing without its scales. A whole-number table is not asked about."""
    return weight.dtype in (torch.float8_e4m3fn, getattr(torch, "float4_e2m1fn_x2", None), *_BYTES)


def scale_values(scale: torch.Tensor) -> torch.Tensor:
    """Scales as fp32: they come as ue8m0, as that exponent's plain byte, or as floats."""
    if scale.dtype == torch.float8_e8m0fnu:
        scale = scale.view(torch.uint8)
    if scale.dtype in _BYTES:
        return torch.exp2(scale.view(torch.uint8).float() - _UE8M0_BIAS)
    return scale.float()


def dequantise(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return fp32 [out, in].

    weight: e4m3 [out, in] with a scale for each 128 x 128 block, [ceil(out / 128), ceil(in / 128)]; or e2m1, two to a byte, the
    lower bits first, [out, in / 2] with a scale for each 32 columns, [out, in / 32]. ValueError if the shapes do not fit.
    """
    scale = scale_values(scale)
    if weight.dtype == torch.float8_e4m3fn:
        values, blocks = weight.float(), (FP8_BLOCK, FP8_BLOCK)
    else:
        values, blocks = _unpacked(weight), (1, FP4_BLOCK)
    wanted = tuple(-(-size // block) for size, block in zip(values.shape, blocks, strict=True))
    if tuple(scale.shape) != wanted:
        raise ValueError(
            f"scales {tuple(scale.shape)} for a weight of {tuple(values.shape)}, possible are {wanted}"
        )
    for dim, block in enumerate(blocks):
        scale = scale.repeat_interleave(block, dim)[(slice(None),) * dim + (slice(values.shape[dim]),)]
    return values * scale


def _unpacked(weight: torch.Tensor) -> torch.Tensor:
    packed = weight.view(torch.uint8)
    nibbles = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    return _E2M1_VALUES.to(weight.device)[nibbles.long()]
