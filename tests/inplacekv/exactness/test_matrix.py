"""Our backend equals stock attention for every share, D budget, prompt length and kind of batch."""

from __future__ import annotations

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
BUDGETS = ["minimum", "half", "everything"]
RADIX = pytest.mark.parametrize("radix", [True, False], ids=["radix", "no-radix"])
LENGTHS = [PAGE - 1, PAGE, PAGE + 1, 2 * CHUNK + 3]


def device_tokens(budget: str, needed: int, page_size: int = PAGE) -> int:
    half = needed // page_size // 2 * page_size
    return {"minimum": 0, "half": half, "everything": needed}[budget]


def assert_regions_used(seen: Traffic, share: float, budget: str) -> None:
    """The homes that the configuration asks for were really held and read while decoding, and no others."""
    held, read = seen.held, seen.decode
    if budget == "everything":
        assert held["D"] and read["D"] and not (held["C"] or held["T"] or held["window"]), held
        assert not (read["C"] or read["T"]), read
        return
    assert bool(held["D"]) == (budget == "half"), held
    assert held["window"], held
    assert bool(held["C"]) == bool(read["C"]) == (share > 0), (held, read)
    assert bool(held["T"]) == bool(read["T"]) == (share < 1), (held, read)
    assert bool(seen.extend["C"]) <= (share > 0) and bool(seen.extend["T"]) <= (share < 1), seen.extend


@RADIX
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_one_request(kind, share, budget, length, radix):
    batch = prompts(length, seed=length)
    expected = stock(kind, batch)
    device = device_tokens(budget, tokens_needed(batch))
    with server(kind, share=share, device_tokens=device, disable_radix_cache=not radix) as runner:
        seen = watch(runner)
        compare(expected, runner.generate(batch), tolerance=TOLERANCE)
        if length > 2 * CHUNK or share in (0, 1):
            assert_regions_used(seen, share, budget)
        assert_all_returned(runner)


def family(base: list[int], page_size: int) -> list[list[int]]:
    """Prompts that leave `base` on a page border, inside a page, past its end, and not at all."""
    (tail,) = prompts(page_size + 3, seed=1)
    return [base[:page_size] + tail, base[: 2 * page_size + 5] + tail, base + tail, base]


def serve_mixed(runner: Runner, first: list[list[int]], related: list[list[int]]) -> list[Result]:
    """`first` with all logprobs; while it decodes, `related` one after another, from the prefix cache if there is one."""
    handles = [runner.submit(prompt) for prompt in first]
    runner.step_until(lambda: all(len(handle.output_ids) > 2 for handle in handles))
    handles += [runner.submit(p, want_prompt_logprobs=False, delay=3 * i) for i, p in enumerate(related)]
    runner.run_until_idle()
    return [handle.result() for handle in handles]


@RADIX
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_mixed_batch_with_shared_prefixes(kind, share, budget, radix):
    first = prompts(*LENGTHS)
    related = family(first[-1], PAGE)
    expected = stock(kind, first + related)
    device = device_tokens(budget, tokens_needed(first + related))
    with server(kind, share=share, device_tokens=device, disable_radix_cache=not radix) as runner:
        seen = watch(runner)
        results = serve_mixed(runner, first, related)
        compare(expected, results, tolerance=TOLERANCE)
        hits = [result.cached_tokens for result in results]
        full = 2 * CHUNK
        assert hits == ([0, 0, 0, 0, PAGE, 2 * PAGE, full, full] if radix else [0] * 8)
        assert_regions_used(seen, share, budget)
        assert_all_returned(runner)


def test_mixed_batch_with_the_default_page_of_256():
    page, chunk = 256, 512
    first = prompts(page - 1, page, page + 1, 2 * chunk + 3)
    related = family(first[-1], page)
    expected = stock("qwen3_moe", first + related)
    device = device_tokens("half", tokens_needed(first + related, page_size=page), page)
    with server(
        "qwen3_moe",
        share=0.37,
        device_tokens=device,
        page_size=page,
        chunked_prefill_size=chunk,
        tile_tokens=page,
        host_memory="48MB",
    ) as runner:
        seen = watch(runner)
        compare(expected, serve_mixed(runner, first, related), tolerance=TOLERANCE)
        assert_regions_used(seen, 0.37, "half")
        assert_all_returned(runner)


@pytest.mark.slow
@pytest.mark.parametrize(("share", "budget"), [(0, "half"), (0.37, "minimum"), (1, "minimum"), (0.37, "everything")])
def test_smollm2_reads_real_text(share, budget):
    text = text_tokens("smollm2")
    first = [text[:131], text[500:517]]
    related = [text[:80] + text[900:940]]
    expected = stock("smollm2", first + related)
    device = device_tokens(budget, tokens_needed(first + related))
    with server("smollm2", share=share, device_tokens=device, host_memory="256MB") as runner:
        seen = watch(runner)
        results = serve_mixed(runner, first, related)
        compare(expected, results, tolerance=TOLERANCE)
        assert results[-1].cached_tokens == 80
        assert_regions_used(seen, share, budget)
        assert_all_returned(runner)
    assert NEW_TOKENS == len(results[0].output_ids)
