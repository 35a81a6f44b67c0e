"""DeepSeek-V4's released form of a row, 584 bytes: e4m3 with a power of two for each 64 channels, rotary channels in bf16.

bytes      what
0 .. 448   channels 0 .. 448, e4m3
448 .. 576 channels 448 .. 512, bf16
576 .. 583 exponents of the 7 blocks of 64 coded channels, biased by 127
583        0
"""

from __future__ import annotations

import torch

CODED, ROPE, BLOCK = 448, 64, 64  # channels
WIDTH = CODED + ROPE
_BLOCKS = CODED // BLOCK
_POWERS = CODED + 2 * ROPE  # where the exponents begin
ROW_BYTES = _POWERS + 8
_LARGEST = 448.0  # of e4m3
_LEAST = 2.0**-100  # of a block's largest value: blocks of zeros, too, have an exponent


def pack(rows: torch.Tensor) -> torch.Tensor:
    """rows [n, 512] of any float dtype, finite, to uint8 [n, 584]. Powers of two are rounded up, so that nothing overflows.

    Raises ValueError on another width.
    """
    if rows.dim() != 2 or rows.shape[1] != WIDTH:
        raise ValueError(f"rows {tuple(rows.shape)}: packed ones have {WIDTH} channels")
    blocks = rows[:, :CODED].float().view(-1, _BLOCKS, BLOCK)
    fraction, power = torch.frexp(blocks.abs().amax(-1).clamp(min=_LEAST) / _LARGEST)
    power = torch.where(fraction == 0.5, power - 1, power)  # a power of two itself needs no more
    coded = torch.ldexp(blocks, -power.unsqueeze(-1)).to(torch.float8_e4m3fn)
    packed = torch.zeros(len(rows), ROW_BYTES, dtype=torch.uint8, device=rows.device)
    packed[:, :CODED] = coded.flatten(1).view(torch.uint8)
    packed[:, CODED:_POWERS] = rows[:, CODED:].bfloat16().contiguous().view(torch.uint8)
    packed[:, _POWERS : _POWERS + _BLOCKS] = (power + 127).to(torch.uint8)
    return packed


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [n, 584] to bf16 [n, 512], which holds every value that e4m3 and a power of two can make.

    Raises ValueError on other rows.
    """
    if packed.dim() != 2 or packed.shape[1] != ROW_BYTES or packed.dtype != torch.uint8:
        raise ValueError(f"packed rows {tuple(packed.shape)} {packed.dtype}, not of {ROW_BYTES} bytes")
    coded = packed[:, :CODED].contiguous().view(torch.float8_e4m3fn).float().view(-1, _BLOCKS, BLOCK)
    power = packed[:, _POWERS : _POWERS + _BLOCKS].int() - 127
    values = torch.ldexp(coded, power.unsqueeze(-1)).flatten(1).bfloat16()
    rotary = packed[:, CODED:_POWERS].contiguous().view(torch.bfloat16)
    return torch.cat((values, rotary), 1)
