"""The real scheduler driven at random: submit, step, abort, flush and starve in any order; every answer stays stock's."""

from __future__ import annotations

import random

import pytest

from tests.harness import Handle, Runner, compare
from tests.inplacekv.exactness.support import (
    CHUNK,
    PAGE,
    TOLERANCE,
    assert_all_returned,
    first_tokens,
    prompts,
    server,
    so_far,
    stock,
)

ACTIONS, LONGEST_ANSWER, CAPACITY = 200, 36, 26 * PAGE


def prompt_pool() -> list[list[int]]:
    """Short ones, ones around page and chunk borders, and two trees of shared prefixes."""
    pool = prompts(1, PAGE, CHUNK - 1, CHUNK + 1, 2 * CHUNK + 3, 3 * CHUNK, seed=4)
    tails = prompts(1, PAGE - 1, PAGE, CHUNK + 5, seed=5)
    pool += [pool[4][: 2 * PAGE] + tails[0], pool[4] + tails[1], pool[4][: 5 * PAGE + 7] + tails[2]]
    pool += [pool[5][:CHUNK] + tails[3], pool[5] + tails[0]]
    return pool


class Driver:
    """Takes one random action at a time and checks the books after each."""

    def __init__(self, runner: Runner, seed: int, pool: list[list[int]]) -> None:
        self.runner, self.draw, self.pool = runner, random.Random(seed), pool
        self.requests: list[tuple[int, int, Handle]] = []  # (place in pool, tokens asked for, handle)
        self.flushes = 0

    @property
    def unfinished(self) -> list[Handle]:
        return [handle for _, _, handle in self.requests if not handle.done]

    def act(self) -> None:
        action = self.draw.choices(
            (self.submit, self.step, self.abort, self.flush, self.finish_all), weights=(25, 60, 8, 4, 3)
        )[0]
        action()
        self.runner.kv_pool.regions.check_integrity()

    def submit(self) -> None:
        if len(self.unfinished) >= 12:
            return
        which = self.draw.randrange(len(self.pool))
        tokens = self.draw.choice((1, 2, PAGE, LONGEST_ANSWER))
        handle = self.runner.submit(
            self.pool[which],
            max_new_tokens=tokens,
            # SGLang reserves room for the whole answer only of those that ignore the end of text.
            ignore_eos=self.draw.random() < 0.3,
            want_prompt_logprobs=self.draw.random() < 0.3,
        )
        self.requests.append((which, tokens, handle))

    def step(self) -> None:
        self.runner.step(self.draw.choice((1, 1, 2, 5)))

    def abort(self) -> None:
        if self.unfinished:
            self.runner.abort(self.draw.choice(self.unfinished))

    def flush(self) -> None:
        """Empties the prefix cache if the server is idle, is refused if not."""
        idle = not self.unfinished and self.runner.scheduler.inbox.empty
        if idle:
            self.runner.run_until_idle()
            self.flushes += 1
        assert self.runner.scheduler.flush_cache() or not idle

    def finish_all(self) -> None:
        self.runner.run_until_idle()
        assert not self.unfinished


@pytest.mark.parametrize(
    ("share", "device", "radix", "seed", "admission"),
    [
        (0, 0, True, 1, "spill"),
        (0.37, 6 * PAGE, True, 2, "spill"),
        (0.37, 0, False, 3, "spill"),
        (1, 6 * PAGE, True, 4, "spill"),
        (0.37, 10 * PAGE, True, 5, "queue"),
        (1, 10 * PAGE, False, 6, "auto"),
    ],
)
def test_any_order_of_events(share, device, radix, seed, admission):
    pool = prompt_pool()
    expected = stock("qwen3_moe", pool, LONGEST_ANSWER)
    assert all(1 not in result.output_ids for result in expected), "an answer ends early"
    # Host chunks of five pages, so that the two roles compete for them.
    args = {"host_memory": "4MB", "max_total_tokens": CAPACITY, "disable_radix_cache": not radix}
    args |= {"schedule_conservativeness": 0.01, "retract_every": 23, "admission": admission}
    with server("qwen3_moe", share=share, device_tokens=device, seed=seed, **args) as runner:
        assert runner.scheduler.max_total_num_tokens == CAPACITY
        driver = Driver(runner, seed, pool)
        for _ in range(ACTIONS):
            driver.act()
        driver.finish_all()
        assert_all_returned(runner)
    requests = driver.requests
    for which, tokens, handle in requests:
        answer = so_far(handle)
        compare([first_tokens(expected[which], len(answer.output_ids))], [answer], tolerance=TOLERANCE)
        assert handle.finish_reason["type"] == "abort" or len(answer.output_ids) == tokens
    finished = sum(handle.finish_reason["type"] != "abort" for _, _, handle in requests)
    assert 20 < finished < len(requests)
    assert driver.flushes and sum(handle.retractions for _, _, handle in requests)
    assert radix == any(handle.cached_tokens for _, _, handle in requests)
