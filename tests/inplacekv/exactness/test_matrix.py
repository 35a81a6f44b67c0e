"""Our backend equals stock attention for every share, D budget, prompt length and kind of batch."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from tests.harness import Result, Runner, compare
from tests.inplacekv.exactness.support import (
    CHUNK,
    NEW_TOKENS,
    PAGE,
    TOLERANCE,
    Traffic,
    assert_all_returned,
    prompts,
    server,
    stock,
    text_tokens,
    tokens_needed,
    watch,
)

SHARES = [0, 0.37, 1]
BUDGETS = ["minimum", "half", "everything"]  # of D
KINDS = pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v2"])  # GQA and MLA
RADIX = pytest.mark.parametrize("radix", [True, False], ids=["radix", "no-radix"])
LENGTHS = [PAGE - 1, PAGE, PAGE + 1, 2 * CHUNK + 3]


def device_tokens(budget: str, needed: int, page_size: int = PAGE) -> int:
    half = needed // page_size // 2 * page_size
    return {"minimum": 0, "half": half, "everything": needed}[budget]


def assert_regions_used(seen: Traffic, share: float, budget: str, *, prefilled: bool = True) -> None:
    """The homes that the configuration asks for were held and read while decoding, and no others.

    Pages that a prefill filled are read from home. Pages that decoding filled are, once their flush has ended: when, is
    up to a thread.
    """
    wanted = {
        "D": budget != "minimum",
        "C": budget != "everything" and share > 0,
        "T": budget != "everything" and share < 1,
        "window": budget != "everything",
    }
    held = {region: seen.held[region] > 0 for region in wanted}
    read = {region: seen.decode[region] > 0 for region in ("C", "T")}
    assert held == wanted, seen
    assert not any(seen.extend[region] for region in read if not wanted[region]), seen
    if prefilled:
        assert read == {region: wanted[region] for region in read}, seen
    else:
        assert not any(read[region] for region in read if not wanted[region]), seen


@KINDS
@RADIX
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("share", SHARES)
def test_one_request_around_a_page(kind, share, budget, radix):
    batch = prompts(*LENGTHS[:3])
    expected = stock(kind, batch)
    device = device_tokens(budget, tokens_needed(batch[:1]))
    with server(kind, share=share, device_tokens=device, disable_radix_cache=not radix) as runner:
        for prompt, result in zip(batch, expected):
            seen = watch(runner)
            compare([result], runner.generate([prompt]), tolerance=TOLERANCE)
            if share in (0, 1):  # else too few pages for both regions
                assert_regions_used(seen, share, budget, prefilled=False)
            assert_all_returned(runner)


@KINDS
@RADIX
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("share", SHARES)
def test_one_request_past_two_chunks(kind, share, budget, radix):
    batch = prompts(*LENGTHS)[3:]
    expected = stock(kind, batch)
    device = device_tokens(budget, tokens_needed(batch))
    with server(kind, share=share, device_tokens=device, disable_radix_cache=not radix) as runner:
        seen = watch(runner)
        compare(expected, runner.generate(batch), tolerance=TOLERANCE)
        assert_regions_used(seen, share, budget)
        assert_all_returned(runner)


def family(base: list[int], page_size: int) -> list[list[int]]:
    """Prompts that leave `base` on a page border, inside a page, past its end, and not at all."""
    (tail,) = prompts(page_size + 3, seed=1)
    return [base[:page_size] + tail, base[: 2 * page_size + 5] + tail, base + tail, base]


def serve_mixed(
    runner: Runner, first: list[list[int]], related: list[list[int]], new_tokens: int = NEW_TOKENS
) -> list[Result]:
    """`first` with all logprobs; while it decodes, `related` one after another, from the prefix cache if there is one."""
    handles = [runner.submit(prompt, max_new_tokens=new_tokens) for prompt in first]
    runner.step_until(lambda: all(len(handle.output_ids) > 2 for handle in handles))
    handles += [
        runner.submit(prompt, want_prompt_logprobs=False, delay=3 * i, max_new_tokens=new_tokens)
        for i, prompt in enumerate(related)
    ]
    runner.run_until_idle()
    return [handle.result() for handle in handles]


@pytest.mark.parametrize(
    ("kind", "radix"),
    [
        *((kind, radix) for kind in ("qwen3_moe", "mixtral", "deepseek_v2") for radix in (True, False)),
        ("deepseek_v2_yarn", True),
    ],
)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("share", SHARES)
def test_mixed_batch_with_shared_prefixes(kind, share, budget, radix):
    first = prompts(*LENGTHS)
    related = family(first[-1], PAGE)
    hits = [PAGE, 2 * PAGE, 2 * CHUNK, 2 * CHUNK] if radix else [0] * 4
    expected = stock(kind, first + related)
    device = device_tokens(budget, tokens_needed(first + related) - sum(hits))
    with server(kind, share=share, device_tokens=device, disable_radix_cache=not radix) as runner:
        seen = watch(runner)
        results = serve_mixed(runner, first, related)
        compare(expected, results, tolerance=TOLERANCE)
        assert [result.cached_tokens for result in results] == [0] * 4 + hits
        assert_regions_used(seen, share, budget)
        assert_all_returned(runner)


def test_mixed_batch_with_the_default_page_of_256():
    page, chunk = 256, 512
    first = prompts(page - 1, page, page + 1, 2 * chunk + 3)
    related = family(first[-1], page)
    hits = [page, 2 * page, 2 * chunk, 2 * chunk]
    expected = stock("qwen3_moe", first + related)
    device = device_tokens("half", tokens_needed(first + related, page_size=page) - sum(hits), page)
    args = {"page_size": page, "chunked_prefill_size": chunk, "tile_tokens": page, "host_memory": "48MB"}
    with server("qwen3_moe", share=0.37, device_tokens=device, **args) as runner:
        seen = watch(runner)
        results = serve_mixed(runner, first, related)
        compare(expected, results, tolerance=TOLERANCE)
        assert [result.cached_tokens for result in results] == [0] * 4 + hits
        assert_regions_used(seen, 0.37, "half")
        assert_all_returned(runner)


@pytest.mark.parametrize(
    ("share", "budget", "radix"),
    [(share, budget, True) for share in SHARES for budget in BUDGETS]
    + [(0, "minimum", False), (0.37, "half", False), (1, "half", False)],
)
def test_smollm2_reads_real_text(share, budget, radix):
    text = text_tokens("smollm2")
    first = [text[:131], text[500:517], text[600:616], text[700:715]]
    related = [text[:80] + text[900:940]]
    hit = 80 if radix else 0
    expected = stock("smollm2", first + related)
    device = device_tokens(budget, tokens_needed(first + related) - hit)
    args = {"host_memory": "64MB", "tile_tokens": 4 * PAGE, "disable_radix_cache": not radix}
    with server("smollm2", share=share, device_tokens=device, **args) as runner:
        seen = watch(runner)
        results = serve_mixed(runner, first, related)
        compare(expected, results, tolerance=TOLERANCE)
        assert [result.cached_tokens for result in results] == [0] * 4 + [hit]
        assert_regions_used(seen, share, budget)
        assert_all_returned(runner)


@KINDS
def test_the_share_that_is_found(kind):
    """`auto`: the target moves from step to step, and what the CPU steals of T is attended once."""
    batch = prompts(*LENGTHS, 5 * CHUNK)
    expected = stock(kind, batch)
    with server(kind, share="auto", device_tokens=0) as runner:
        seen = watch(runner)
        compare(expected, runner.generate(batch), tolerance=TOLERANCE)
        assert seen.decode["stolen"], seen
        assert_all_returned(runner)


class EveryOther:
    """Ends that ask for all of T every other step, as trials do for some."""

    def __init__(self) -> None:
        self.noted: list[tuple[float, float]] = []
        self.broken_off = 0

    @property
    def share(self) -> float | None:
        return 1.0 if len(self.noted) % 2 else None

    def note(self, share: float, tokens: int, layer_s: float, ends: Collection[float]) -> None:
        self.noted.append((share, layer_s))

    def break_off(self) -> None:
        self.broken_off += 1


@KINDS
def test_a_step_that_attends_another_share_than_the_target(kind):
    batch = prompts(*LENGTHS, 5 * CHUNK)
    expected = stock(kind, batch)
    with server(kind, share="auto", device_tokens=0) as runner:
        ends = runner.kv_pool._control.ends = EveryOther()
        compare(expected, runner.generate(batch), tolerance=TOLERANCE)
        shares = [share for share, _ in ends.noted]
        assert ends.broken_off, "the first decode after a prefill"
        assert set(shares[1::2]) == {1.0} and min(shares[::2]) < 1.0
        assert all(layer_s > 0 for _, layer_s in ends.noted)
        assert_all_returned(runner)
