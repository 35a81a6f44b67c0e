"""Whether a short layer does better with all of its host tokens on one side. What decides there is in neither side's line."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection

# Launching both sides' work takes the host up to this. A layer that takes longer is as long as the lines say.
_SHORT_LAYER_S = 0.6e-3
_TRIAL_STEPS = 3  # the first of them plans anew and does not count
_RECENT_STEPS = 8
# Steps from one trial to the next: twice as many after each that was in vain.
_FIRST_WAIT, _MOST_WAIT = 8, 1024
_BETTER = 0.97  # of the time before
_SAME_SHARE = 0.02
_SAME_TOKENS = 0.1  # times of steps that differ by more of their tokens are not compared


class EndTrials:
    """Tries shares of 1 and 0 for a few steps now and then, and holds one while it is faster than what else was tried.

    While one is held, the share that the lines ask for is tried in its turn. Only what steps attend is tried: where pages are
    placed remains the lines' affair, since a page stays where it is.
    """

    def __init__(self) -> None:
        self._held: float | None = None  # None: the lines' share
        self._trial: float | None = None
        self._tries = False
        self._times: list[float] = []  # of the trial's steps
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)  # layers' seconds without a trial
        self._tokens = 0  # of their steps, about
        self._since, self._wait, self._turn = 0, _FIRST_WAIT, 0

    @property
    def share(self) -> float | None:
        """What the next step should attend by the CPU; None: what the lines ask for."""
        return self._trial if self._tries else self._held

    def note(self, share: float, tokens: int, layer_s: float, ends: Collection[float] = (1.0, 0.0)) -> None:
        """A step that read so many host tokens a layer, of which the CPU attended `share`, took layer_s a layer.

        ends: shares that may be tried next.
        """
        if abs(tokens - self._tokens) > _SAME_TOKENS * self._tokens:
            self.break_off()
            self._tokens = tokens
            self._recent.clear()
        if self._tries:
            self._note_trial(share, layer_s)
            return
        self._recent.append(layer_s)
        self._since += 1
        if statistics.median(self._recent) > _SHORT_LAYER_S:
            if self._held is not None:
                # What made the layer long may be over soon: the end is not to wait as if trials had been in vain.
                self._wait = _FIRST_WAIT
            self._held, self._since = None, 0
        elif self._since >= self._wait and len(self._recent) >= _TRIAL_STEPS:
            others: list[float | None] = [end for end in ends if abs(end - share) > _SAME_SHARE]
            if self._held is not None:
                others.append(None)
            if not others:
                return
            self._trial, self._tries, self._times = others[self._turn % len(others)], True, []
            self._turn += 1

    def break_off(self) -> None:
        """The steps to come are not comparable with those before, or steps were not noted. A trial that is cut short was in
        vain: else, where no trial comes to its end, the next one would begin at once."""
        if self._tries:
            self._end_in_vain()

    def _end_in_vain(self) -> None:
        self._tries, self._since, self._wait = False, 0, min(2 * self._wait, _MOST_WAIT)

    def _note_trial(self, share: float, layer_s: float) -> None:
        possible = self._trial is None or abs(share - self._trial) <= _SAME_SHARE
        self._times.append(layer_s)
        if possible and len(self._times) < _TRIAL_STEPS:
            return
        if possible and statistics.mean(self._times[1:]) < _BETTER * statistics.median(self._recent):
            self._held, self._tries, self._since, self._wait = self._trial, False, 0, _FIRST_WAIT
            self._recent.clear()
        else:
            self._end_in_vain()
