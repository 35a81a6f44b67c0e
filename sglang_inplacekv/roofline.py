"""How decode attention over host tokens is best shared between CPU and link. Pure functions of times and sizes.

A layer that reads L host tokens, a share r of them by the CPU, takes the longer of two times:

    CPU   a0 + A r L           transfer   b0 + B (1 - r) L

They are equal at r* = (B L + b0 - a0) / ((A + B) L). a0 is the hand-over and all else that a layer does, since nothing goes on
before the CPU's answer is there. Copies hide behind all of it: the tiles of the next layers cross meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """Seconds that one side needs for its tokens of a layer: nothing for none, else fixed_s + token_s each."""

    fixed_s: float
    token_s: float

    def seconds(self, tokens: float) -> float:
        return self.fixed_s + self.token_s * tokens if tokens > 0 else 0.0


def layer_seconds(share: float, cpu: Line, transfer: Line, tokens: float) -> float:
    """A layer of `tokens` host tokens, `share` of them attended by the CPU while the rest crosses."""
    return max(cpu.seconds(share * tokens), transfer.seconds((1.0 - share) * tokens))


def balanced_share(cpu: Line, transfer: Line, tokens: float) -> float:
    """The share that takes least time; of equally good ones the least. 0 where the CPU's fixed cost does not pay."""
    if tokens <= 0:
        return 0.0
    together = (transfer.token_s * tokens + transfer.fixed_s - cpu.fixed_s) / (
        (cpu.token_s + transfer.token_s) * tokens
    )
    shares = (0.0, min(max(together, 0.0), 1.0), 1.0)
    return min(shares, key=lambda share: layer_seconds(share, cpu, transfer, tokens))


def break_even_tokens(cpu: Line, transfer: Line) -> float:
    """Host tokens of a step below which the CPU gets none: its fixed cost alone exceeds what crossing takes."""
    return max(0.0, (cpu.fixed_s - transfer.fixed_s) / transfer.token_s)
