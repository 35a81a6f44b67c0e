"""DeepSeek-V4's compressor: a block of tokens becomes one entry, by a softmax over its slots for every channel.

With C = h Wkv, Z = h Wgate + bias[position in block], r tokens a block and one series of columns:

    entry_w = sum over j in block w of softmax_j(Z_j) * C_j

With two series a | b, blocks overlap: the 2r slots of entry w are series a of block w - 1 and series b of block w; block 0 has
only its own. Then a weighted RMSNorm and rotary position r w, the block's first token. All of it is fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from sparse_attn import journals
from sparse_attn.rope import rotate_tail


@dataclass(frozen=True)
class CompressorWeights:
    """coff is the number of series, d the width of an entry. Any float dtype."""

    kv: Tensor  # [coff * d, hidden]
    gate: Tensor  # [coff * d, hidden]
    position_bias: Tensor  # [ratio, coff * d], columns a | b as in a checkpoint
    norm: Tensor  # [d]


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / rms(x) over the last channels, times weight; computed and returned in fp32."""
    x = x.float()
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return normed if weight is None else normed * weight.float()


class Compressor:
    """One compressor of one layer; the tokens of the open block are in the caller's journal.

    The two projections are copied into one fp32 matrix here, so weights have to be loaded before.
    """

    def __init__(
        self, weights: CompressorWeights, ratio: int, overlap: bool, inv_freq: Tensor, eps: float
    ) -> None:
        self.ratio = ratio
        self.blocks = 2 if overlap else 1  # that an entry reads
        self.dim = weights.norm.shape[0]
        columns = self.blocks * self.dim
        for name, found, wanted in (
            ("kv", weights.kv.shape[0], columns),
            ("gate", weights.gate.shape[0], columns),
            ("position_bias", tuple(weights.position_bias.shape), (ratio, columns)),
        ):
            if found != wanted:
                raise ValueError(
                    f"{name} of a compressor of {self.dim} channels must have {wanted}, has {found}"
                )
        self._projection = torch.cat((weights.kv, weights.gate)).float()
        self._bias = weights.position_bias.float()
        self._norm, self._eps, self._inv_freq = weights.norm, eps, inv_freq

    def tail_rows(self, max_rollback: int) -> int:
        """Rows that a journal needs: the open block and those before it that its entry reads, wherever a rollback ends."""
        return max_rollback + self.ratio * self.blocks

    def journal_from(self, tokens: int) -> int:
        """First token that the entry after `tokens` tokens reads."""
        return max(0, (tokens // self.ratio - self.blocks + 1) * self.ratio)

    def project(self, h: Tensor) -> Tensor:
        """h [T, hidden] to journal rows C | Z, fp32 [T, 2 * coff * d], the bias not yet in."""
        return F.linear(h.float(), self._projection)

    def close(self, tail: Tensor | None, first: int, rows: Tensor) -> tuple[int, Tensor]:
        """The entries that rows [T, 2 * coff * d] of tokens first .. first + T complete.

        tail: journal of the tokens before, None if there are none. Returns the first one's id and fp32 [entries, d].
        """
        ratio = self.ratio
        opened, closed = first // ratio, (first + len(rows)) // ratio
        if opened == closed:
            return opened, rows.new_empty(0, self.dim)
        start = self.journal_from(first)
        rows = rows[: closed * ratio - first]
        if start < first:
            if tail is None:
                raise RuntimeError(f"token {first} has no journal of the tokens before it")
            rows = torch.cat((journals.read(tail, start, first), rows))
        values, logits = rearrange(rows, "(w r) (two c) -> two w r c", r=ratio, two=2)
        logits = logits + self._bias
        if self.blocks == 2:
            if opened == 0:
                values = F.pad(values, (0, 0, 0, 0, 1, 0))
                logits = F.pad(logits, (0, 0, 0, 0, 1, 0), value=-torch.inf)
            values, logits = (
                torch.cat((x[:-1, :, : self.dim], x[1:, :, self.dim :]), 1) for x in (values, logits)
            )
        pooled = (torch.softmax(logits, 1) * values).sum(1)
        positions = torch.arange(opened, closed, device=rows.device) * ratio
        return opened, rotate_tail(rms_norm(pooled, self._norm, self._eps), positions, self._inv_freq)
