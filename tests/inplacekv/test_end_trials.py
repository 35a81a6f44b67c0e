"""Short layers end on the side that is fastest, whatever bounds them; long ones are left to the lines."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable

import pytest

from sglang_inplacekv.end_trials import EndTrials
from sglang_inplacekv.feedback import Costs, ShareController
from sglang_inplacekv.roofline import Line
from sglang_inplacekv.write_scope import WriteScope

TOKENS = 2048
SHORT_S, LONG_S = 0.4e-3, 2e-3


def run(
    trials: EndTrials,
    layer_s: Callable[[float], float],
    steps: int,
    lines: float = 0.5,
    tokens: int = TOKENS,
    floor: float = 0.0,
) -> list[float]:
    """Shares of the steps. No share is possible below `floor`."""
    shares = []
    for _ in range(steps):
        share = max(lines if trials.share is None else trials.share, floor)
        trials.note(share, tokens, layer_s(share))
        shares.append(share)
    return shares


def fastest_at(best: float, seconds: float = SHORT_S, gain: float = 0.2) -> Callable[[float], float]:
    return lambda share: seconds * (1 - gain if share == best else 1.0)


@pytest.mark.parametrize("best", [0.0, 1.0])
@pytest.mark.parametrize("lines", [0.0, 0.3, 1.0])
def test_the_faster_end_is_found_and_held(best: float, lines: float) -> None:
    shares = run(EndTrials(), fastest_at(best), 400, lines)
    assert statistics.median(shares[40:]) == best
    assert sum(share != best for share in shares[40:]) < 40, "others are tried again, the less the longer"


def test_what_the_lines_ask_for_stays_where_no_end_is_faster() -> None:
    noise = random.Random(0)
    shares = run(EndTrials(), lambda share: SHORT_S * noise.uniform(0.985, 1.015), 3000)
    assert shares[-1] == 0.5
    assert sum(share != 0.5 for share in shares) < 60


def test_a_long_layer_is_not_tried() -> None:
    assert set(run(EndTrials(), fastest_at(1.0, LONG_S), 500)) == {0.5}


def test_an_end_is_left_when_it_is_no_longer_faster_or_the_layer_no_longer_short() -> None:
    trials = EndTrials()
    assert run(trials, fastest_at(1.0), 60)[-1] == 1.0
    assert run(trials, lambda share: SHORT_S * (1 + share), 60)[-1] < 1.0
    trials = EndTrials()
    run(trials, fastest_at(1.0), 60)
    assert run(trials, lambda share: LONG_S, 20, tokens=16 * TOKENS)[-1] == 0.5


def test_an_end_is_found_again_soon_after_a_spell_of_long_layers() -> None:
    """As when others use the host for a moment."""
    trials = EndTrials()
    run(trials, fastest_at(1.0), 2000)
    run(trials, lambda share: LONG_S, 10)
    assert trials.share is None
    assert run(trials, fastest_at(1.0), 60)[-1] == 1.0


def test_an_end_below_what_lies_in_c_is_given_up_at_once() -> None:
    shares = run(EndTrials(), fastest_at(0.4, gain=0.5), 200, floor=0.4)
    tried = [share for share in shares if share == 0.4]
    assert 0 < len(tried) < 10 and shares[-1] == 0.5


def test_steps_of_other_lengths_are_not_compared() -> None:
    """A batch that halves is not a better share."""
    trials = EndTrials()
    run(trials, fastest_at(-1.0), 8)
    assert trials.share == 1.0
    assert run(trials, fastest_at(-1.0, SHORT_S / 2), 3, tokens=TOKENS // 2) == [1.0, 0.5, 0.5]


@pytest.mark.parametrize("steps", [3, 4, 5])
@pytest.mark.parametrize("prefills", [False, True])
def test_trials_that_are_cut_short_are_in_vain(steps: int, prefills: bool) -> None:
    """Be it by other tokens or by prefills: none comes to its end, and fewer and fewer begin."""
    trials, tried, tokens = EndTrials(), [], TOKENS
    for _ in range(2000 // steps):
        tried += [share != 0.5 for share in run(trials, lambda share: SHORT_S, steps, tokens=tokens)]
        if prefills:
            tried.append(trials.share is not None)  # the step that is not timed
            trials.break_off()
            assert trials.share is None
        else:
            tokens = 3 * TOKENS - tokens
    assert 0 < sum(tried[:1000]) < 30 and sum(tried[1000:]) < 6


@pytest.mark.parametrize("seed", range(20))
def test_a_trial_ends_whatever_happens(seed: int) -> None:
    draw, trials = random.Random(seed), EndTrials()
    possible, asked = draw.choice([(0.0, 1.0), (1.0,), (0.0,), ()]), 0
    for _ in range(3000):
        wanted, share = trials.share, draw.random()
        if wanted in possible:
            share = wanted
        event = draw.random()
        if event < 0.05:
            trials.break_off()
        tokens = draw.choice([TOKENS, 2 * TOKENS]) if event > 0.9 else TOKENS
        held, tries = trials._held, trials._tries
        trials.note(share, tokens, SHORT_S * draw.uniform(0.5, 1.4), possible)
        asked = asked + 1 if tries and trials._tries else 0
        assert asked < 3
        assert trials._held in (held, wanted, None) and trials._held in (None, *possible)


@pytest.mark.parametrize("idle", ["cpu", "transfer"])
def test_a_side_that_idles_behind_an_end_is_measured_anew(idle: str) -> None:
    """An end that is held through the time after which its other side counts as unknown is left again as others are."""
    layers, token_s, end = 24, 5e-8, 0.0 if idle == "cpu" else 1.0
    control, unknown, shares = ShareController(0.5, 20e-6), [], []
    for step in range(6000):
        tokens = TOKENS if step < 4000 else 32 * TOKENS
        lines = control.share(tokens)
        share = lines if control.step_share is None else control.step_share
        computed = round(share * tokens)
        crossed = tokens - computed
        control.observe(
            Costs(
                cpu_s=layers * token_s * computed,
                cpu_tokens=layers * computed,
                answers=layers if computed else 0,
                between_s=(layers - 1) * 20e-6 if computed else 0.0,
                betweens=layers - 1 if computed else 0,
                transfer_s=layers * token_s * crossed,
                transfer_tokens=layers * crossed,
            )
        )
        short_s = SHORT_S * (0.7 if share == end else 1.0)
        control.note_step(share, tokens, max(short_s, token_s * computed, token_s * crossed))
        unknown.append(control.cpu is None or control.transfer is None)
        shares.append(share)
    assert sum(unknown[1000:4000]), "the other side was given up for a while"
    assert sum(share == end for share in shares[1000:4000]) > 2800 and sum(unknown) < 100
    assert min(shares[-1000:]) > 0.4 and max(shares[-1000:]) < 0.6


@pytest.mark.parametrize("slow", ["cpu", "transfer"])
def test_an_end_that_would_take_too_long_by_its_line_is_not_tried(slow: str) -> None:
    sides = {"cpu": Line(0.0, 1e-7), "transfer": Line(0.0, 1e-7)}
    sides[slow] = Line(0.0, 20e-7)
    control, shares = ShareController(0.5, 0.0, (sides["cpu"], sides["transfer"])), set()
    for _ in range(300):
        lines = control.share(TOKENS)
        shares.add(lines if control.ends.share is None else control.ends.share)
        control.note_step(lines, TOKENS, SHORT_S)
    assert shares == {lines, 0.0 if slow == "cpu" else 1.0}


def test_a_layer_that_the_lines_explain_is_not_tried() -> None:
    cpu, transfer = Line(0.0, 1.9e-7), Line(0.0, 1.9e-7)
    control = ShareController(0.5, 0.0, (cpu, transfer))
    for _ in range(300):
        control.note_step(control.share(TOKENS), TOKENS, 1.1 * cpu.seconds(TOKENS / 2))
        assert control.ends.share is None


def test_pages_go_where_the_lines_want_them_meanwhile() -> None:
    scope = WriteScope(0.5, steals=True, step_share=1.0)
    assert scope.wanted_compute(100) == 40
    assert scope.wanted_stolen(40, 60) == 60
    scope.step_share = 0.0
    assert scope.wanted_compute(100) == 40 and scope.wanted_stolen(40, 60) == 0
