"""The share follows what is measured: it converges, follows a hog, and neither noise nor a lone outlier moves it."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable

import pytest

from sglang_inplacekv.feedback import HALF_LIFE_STEPS, Costs, ShareController
from sglang_inplacekv.roofline import Line, balanced_share, layer_seconds

LAYERS, TOKENS, PAGE = 24, 32768, 256
CPU, TRANSFER = Line(30e-6, 2048 / 80e9), Line(0.0, 2048 / 50e9)


class Host:
    """A server whose two sides take the times of two lines, the CPU's fixed_s being what a layer does besides."""

    def __init__(self, start: float = 0.5) -> None:
        self.cpu, self.transfer = CPU, TRANSFER
        self.control = ShareController(start, CPU.fixed_s)
        self.shares: list[float] = []
        self.beside = 0.0

    def step(self, tokens: int = TOKENS, noise: Callable[[], float] = lambda: 1.0) -> float:
        share = self.control.share(tokens)
        computed = min(tokens, round(share * tokens / PAGE) * PAGE)
        attention_s = self.cpu.token_s * computed * noise()
        transfer_s = self.transfer.token_s * (tokens - computed) * noise()
        layer_s = max(self.cpu.fixed_s + attention_s, transfer_s)
        late = transfer_s > self.cpu.fixed_s + attention_s
        # A wait counts from before the hand-over, also where the copy comes before the answer.
        exposed_s = transfer_s - self.cpu.fixed_s + CPU.fixed_s if late else self.beside * attention_s
        self.control.observe(
            Costs(
                cpu_s=LAYERS * attention_s,
                cpu_tokens=LAYERS * computed,
                answers=LAYERS if computed else 0,
                between_s=(LAYERS - 1) * (layer_s - attention_s) if computed else 0.0,
                betweens=LAYERS - 1 if computed else 0,
                transfer_s=LAYERS * transfer_s,
                transfer_tokens=LAYERS * (tokens - computed),
                exposed_s=LAYERS * exposed_s,
            )
        )
        self.shares.append(share)
        return share

    def steps(self, count: int, **settings) -> float:
        for _ in range(count):
            self.step(**settings)
        return self.shares[-1]

    def best(self, tokens: int = TOKENS) -> float:
        return balanced_share(self.cpu, self.transfer, tokens)


@pytest.mark.parametrize("start", [0.05, 0.5, 0.95])
def test_converges_from_anywhere(start: float) -> None:
    host = Host(start)
    assert host.steps(8) == pytest.approx(host.best(), abs=0.03)


@pytest.mark.parametrize("tokens", [2048, 8192, 32768, 131072])
@pytest.mark.parametrize("beside", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("fixed_us", [100, 500])
def test_what_a_layer_does_besides_is_found_out(fixed_us: int, beside: float, tokens: int) -> None:
    """Only the hand-over of 30 us was known. The rest shows in the time from one answer of the CPU to the next."""
    host = Host()
    host.cpu, host.beside = Line(fixed_us * 1e-6, CPU.token_s), beside
    share = host.steps(10 * HALF_LIFE_STEPS, tokens=tokens)
    whole = round(share * tokens / PAGE) * PAGE / tokens
    best = layer_seconds(host.best(tokens), host.cpu, host.transfer, tokens)
    page_s = PAGE * (CPU.token_s + TRANSFER.token_s)
    assert layer_seconds(whole, host.cpu, host.transfer, tokens) <= 1.03 * best + page_s


@pytest.mark.parametrize("side", ["cpu", "transfer"])
def test_follows_a_hog_within_four_half_lives(side: str) -> None:
    host = Host()
    before = host.steps(20)
    line = getattr(host, side)
    setattr(host, side, Line(line.fixed_s, 2.5 * line.token_s))
    after = host.steps(4 * HALF_LIFE_STEPS)
    assert after == pytest.approx(host.best(), abs=0.04)
    assert after < before - 0.1 if side == "cpu" else after > before + 0.1


@pytest.mark.parametrize("side", ["cpu", "transfer"])
def test_a_step_far_out_is_followed_only_if_others_follow(side: str) -> None:
    host = Host()
    before, line = host.steps(20), getattr(host, side)
    setattr(host, side, Line(line.fixed_s, 50 * line.token_s))
    host.step()
    setattr(host, side, line)
    assert host.steps(HALF_LIFE_STEPS) == pytest.approx(before, abs=0.05)
    setattr(host, side, Line(line.fixed_s, 10 * line.token_s))
    assert host.steps(8 * HALF_LIFE_STEPS) == pytest.approx(host.best(), abs=0.04)


@pytest.mark.parametrize("side", ["cpu", "transfer"])
def test_steps_far_out_now_and_then_move_nothing(side: str) -> None:
    """A host that others use too: one step in ten, at random, takes four times as long."""
    host, draw = Host(), random.Random(side)
    before = host.steps(20)
    line = getattr(host, side)
    for _ in range(400):
        setattr(host, side, Line(line.fixed_s, 4 * line.token_s) if draw.random() < 0.1 else line)
        host.step()
    assert statistics.fmean(abs(share - before) for share in host.shares[20:]) < 0.02


@pytest.mark.parametrize("side", ["cpu", "transfer"])
def test_three_steps_far_out_move_little(side: str) -> None:
    host = Host()
    before, line = host.steps(20), getattr(host, side)
    setattr(host, side, Line(line.fixed_s, 50 * line.token_s))
    host.steps(3)
    setattr(host, side, line)
    host.steps(HALF_LIFE_STEPS)
    assert max(abs(share - before) for share in host.shares[20:]) < 0.08


@pytest.mark.parametrize("side", ["cpu", "transfer"])
def test_a_side_that_is_slow_most_of_the_time_is_slow(side: str) -> None:
    host = Host()
    host.steps(20)
    line = getattr(host, side)
    for step in range(400):
        setattr(host, side, line if step % 4 == 3 else Line(line.fixed_s, 6 * line.token_s))
        host.step()
    slow = Line(line.fixed_s, 6 * line.token_s)
    setattr(host, side, slow)
    at_most = layer_seconds(host.best(), host.cpu, host.transfer, TOKENS)
    assert layer_seconds(host.shares[-1], host.cpu, host.transfer, TOKENS) < 1.5 * at_most


def test_the_first_measured_step_is_not_trusted_whole() -> None:
    host = Host()
    host.steps(3)
    host.cpu = Line(CPU.fixed_s, 100 * CPU.token_s)
    host.step()
    host.cpu = CPU
    assert host.steps(5) == pytest.approx(host.best(), abs=0.04)


def test_noise_does_not_move_it() -> None:
    host, draw = Host(), random.Random(0)
    host.steps(20)
    shares = {host.step(noise=lambda: draw.uniform(0.97, 1.03)) for _ in range(200)}
    assert len(shares) <= 3, shares


@pytest.mark.parametrize(("slower", "follows"), [(1.002, False), (1.06, True)])
def test_a_share_moves_where_a_layer_would_take_less(slower: float, follows: bool) -> None:
    """Near 0.6, where a link that is 6% slower asks for 0.014 more, and a layer takes 3% longer until it gets that."""
    host = Host()
    host.steps(20)
    before, best = host.shares[-1], host.best()
    host.transfer = Line(0.0, slower * TRANSFER.token_s)
    assert host.best() - best < 0.02
    after = host.steps(60)
    assert (after > before) == follows
    if follows:
        lines = host.cpu, host.transfer, TOKENS
        assert layer_seconds(after, *lines) < 1.015 * layer_seconds(host.best(), *lines)


def test_grows_with_the_context() -> None:
    host = Host()
    host.steps(20)
    short, long = host.steps(2, tokens=600), host.steps(2, tokens=200_000)
    assert short < long
    assert host.steps(1, tokens=200) == 0.0, "the CPU's fixed cost does not pay"
    assert host.steps(1) == pytest.approx(host.best(), abs=0.03), "and comes back"


@pytest.mark.parametrize("side", ["cpu", "transfer"])
def test_a_side_that_was_given_up_is_tried_again(side: str) -> None:
    """A hog so heavy that the other side does better alone leaves; nobody measures the idle side meanwhile."""
    host, tokens = Host(), 32 * PAGE
    host.steps(20, tokens=tokens)
    line, alone = getattr(host, side), 0.0 if side == "cpu" else 1.0
    setattr(host, side, Line(line.fixed_s, 2000 * line.token_s))
    host.steps(20 * HALF_LIFE_STEPS, tokens=tokens)
    assert host.shares[-1] == pytest.approx(alone, abs=PAGE / tokens / 2)
    setattr(host, side, line)
    for step in range(700):
        host.step(tokens)
        if step % 50 == 0:
            host.control.observe(Costs())  # as after a prefill
    assert host.shares[-1] == pytest.approx(host.best(tokens), abs=0.05)


def test_no_time_at_all_is_no_error() -> None:
    control = ShareController(0.5, 0.0)
    for _ in range(20):
        control.observe(Costs(cpu_tokens=1, transfer_tokens=1))
    assert 0.0 <= control.share(1) <= 1.0


def test_what_was_predicted_holds_until_steps_are_measured() -> None:
    predicted = Line(30e-6, 2048 / 20e9), Line(0.0, 2048 / 50e9)
    host = Host()
    host.control = ShareController(0.5, CPU.fixed_s, predicted)
    assert host.step() == pytest.approx(balanced_share(*predicted, TOKENS)) != pytest.approx(host.best())
    assert host.control.cpu is None and host.control.share(200) == 0.0
    assert host.steps(8) == pytest.approx(host.best(), abs=0.03)


@pytest.mark.parametrize("side", [0, 1])
def test_a_side_that_was_predicted_to_be_useless_is_tried(side: int) -> None:
    predicted = [CPU, TRANSFER]
    predicted[side] = Line(predicted[side].fixed_s, 1e5 * predicted[side].token_s)
    host = Host()
    host.control = ShareController(0.5, CPU.fixed_s, (predicted[0], predicted[1]))
    assert host.steps(100) == pytest.approx(side, abs=1e-3)
    assert host.steps(420) == pytest.approx(host.best(), abs=0.03)


def test_one_side_alone_changes_nothing() -> None:
    control = ShareController(0.5, 0.0)
    for _ in range(10):
        control.observe(Costs(cpu_s=1.0, cpu_tokens=1000))
    assert control.share(TOKENS) == 0.5 and control.transfer is None
