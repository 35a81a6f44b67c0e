"""What is done with a Decoder: sweeps of the share, a sequence that grows, a host on which something changes."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from sglang_inplacekv.feedback import ShareController

from .decoder import Decoder, Step
from .scale import Shape
from .stats import Spread

_FOLLOWED = 0.03  # a share this close has arrived


def step_ms(steps: Iterable[Step]) -> Spread:
    return Spread.of(1e3 * step.seconds for step in steps)


def rounds_ms(rounds: Iterable[Sequence[Step]]) -> list[float]:
    """The median ms of each round's steps."""
    return [step_ms(steps).median for steps in rounds]


def settle(decoder: Decoder, steps: int, least_s: float = 0.0) -> float:
    """Let the controller run so many steps, and for `least_s`, and return the share that it has come to, in whole pages."""
    decoder.auto()
    return settled(_steps_for(decoder, steps, least_s))


def settled(steps: Sequence[Step]) -> float:
    """Median over the last quarter."""
    return statistics.median_low(step.share for step in steps[-max(1, len(steps) // 4) :])


def distinct(shares: Iterable[float], pages: int) -> list[float]:
    """Shares from 0 to 1 in whole pages, each once."""
    whole = {int(share * pages + 0.5) for share in shares if 0 <= share <= 1}
    return [count / pages for count in sorted(whole)]


def sweep(
    decoder: Decoder,
    shares: Sequence[float],
    control: ShareController,
    rounds: int,
    steps: int,
    least_s: float = 0.0,
) -> tuple[dict[float, list[list[Step]]], list[list[Step]]]:
    """Rounds of steps at each share, by stealing, and as `control` wants. Of each so many, and for `least_s`, a round.

    In another order each round, so that none has the better part of the host, or always the same one before it.
    """
    found: dict[float, list[list[Step]]] = {share: [] for share in shares}
    controlled: list[list[Step]] = []
    arms: list[tuple[float | None, list[list[Step]]]] = [*found.items(), (None, controlled)]
    for turn in range(rounds):
        for share, own in random.Random(turn).sample(arms, len(arms)):
            if share is None:
                decoder.follow(control)
            else:
                decoder.fixed(share, steals=True)
            decoder.step()  # plans anew
            own.append(_steps_for(decoder, steps, least_s))
    return found, controlled


def _steps_for(decoder: Decoder, count: int, least_s: float) -> list[Step]:
    found = decoder.steps(count)
    while sum(step.seconds for step in found) < least_s:
        found.append(decoder.step())
    return found


def growing(decoder: Decoder, first_tokens: int, page_tokens: int, pages: Sequence[int]) -> list[Step]:
    """One sequence from `first_tokens`, a step whenever so many `pages` have come. It begins with what the scope asks now."""
    decoder.place(Shape(1, first_tokens))
    have, steps = first_tokens // page_tokens, []
    for wanted in pages:
        while have < wanted:
            decoder.grow()
            have += 1
        steps.append(decoder.step())
    return steps


@dataclass(frozen=True)
class Change:
    """Steps before something changed on the host, and after; `grown` after that, a page longer with each."""

    before: list[Step]
    after: list[Step]
    grown: list[Step]

    @property
    def follow_steps(self) -> int:
        """How many steps the share took to where it settled."""
        end = settled(self.after)
        return next(count for count, step in enumerate(self.after, 1) if abs(step.share - end) <= _FOLLOWED)

    def fields(self) -> dict:
        fields = {
            "share_before": settled(self.before),
            "share_after": settled(self.after),
            "target_after": self.after[-1].target,
            "floor": self.after[-1].floor,
            "follow_steps": self.follow_steps,
            "before_ms": step_ms(self.before[len(self.before) // 2 :]),
            "after_ms": step_ms(self.after[len(self.after) // 2 :]),
        }
        if self.grown:
            fields |= {"share_grown": self.grown[-1].share, "floor_grown": self.grown[-1].floor}
        return fields


def change(
    decoder: Decoder,
    steps: int,
    after_steps: int,
    hog: Callable[[], AbstractContextManager],
    grow_steps: int = 0,
    each: Callable[[], None] = lambda: None,
) -> Change:
    """Decode `steps`, then `after_steps` and `grow_steps` under `hog`. `each` is called after every step before growing."""

    def run(count: int) -> list[Step]:
        found = []
        for _ in range(count):
            found.append(decoder.step())
            each()
        return found

    before, grown = run(steps), []
    with hog():
        after = run(after_steps)
        for _ in range(grow_steps):
            decoder.grow()
            grown.append(decoder.step())
    return Change(before, after, grown)
