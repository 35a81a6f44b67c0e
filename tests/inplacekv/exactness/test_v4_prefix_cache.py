"""DeepSeek-V4's prefix cache, held to transformers: others' prefixes, answers, eviction, retraction and late writes."""

from __future__ import annotations

import pytest

from sglang_inplacekv.tickets import Ticket
from sglang_inplacekv.v4.records import RecordTable, TailRecords
from tests.inplacekv.exactness.late_frees import LateFrees
from tests.inplacekv.exactness.support import assert_all_returned, prompts, slow_queues
from tests.inplacekv.exactness.v4_support import PAGE, V4Server, server

SHARES = pytest.mark.parametrize(
    ("share", "device_tokens"), [(0, 0), (0.3, 3 * PAGE), (1, 0), (0.3, 32 * PAGE)]
)


def ask(served: V4Server, prompt: list[int], *, new_tokens: int = 6, delay: int = 0):
    # Logprobs of a prompt would have all of it computed again.
    return served.runner.submit(prompt, delay=delay, max_new_tokens=new_tokens, want_prompt_logprobs=False)


def answer(served: V4Server, *prompts_: list[int], new_tokens: int = 6):
    handles = [ask(served, prompt, new_tokens=new_tokens) for prompt in prompts_]
    served.runner.run_until_idle()
    return handles


@SHARES
def test_prefixes_shared_at_page_borders_and_beyond(share, device_tokens) -> None:
    """The pages are completed in the middle of chunks and at their ends; those that share begin at once, in several chunks."""
    (first, *tails) = prompts(3 * PAGE + 10, 1, 40, 3 * PAGE + 7, 70, seed=21)
    cuts = (3 * PAGE, PAGE, 2 * PAGE, 2 * PAGE + 5)
    with server(share=share, device_tokens=device_tokens, chunk=2 * PAGE) as served:
        handles = answer(served, first)
        shared = [first[:cut] + tail for cut, tail in zip(cuts, tails)]
        handles += answer(served, *shared, first, first[: 2 * PAGE], first[: 2 * PAGE + 1])
        assert [handle.cached_tokens // PAGE for handle in handles] == [0, 3, 1, 2, 2, 3, 1, 2]
        assert not served.runner.kv_pool.records.table.lost_records
        assert_all_returned(served.runner)
        assert not len(served.runner.kv_pool.records.table)
    served.assert_equals_transformers(*handles)


@pytest.mark.parametrize(("share", "device_tokens"), [(0.3, PAGE), (1, 0)])
def test_answers_become_prefixes(share, device_tokens) -> None:
    """A page completed by a decode has its record too."""
    first, second, third = prompts(PAGE - 10, PAGE - 20, 60, seed=22)
    with server(share=share, device_tokens=device_tokens) as served:
        handles = answer(served, first, new_tokens=20)
        for more in (second, third):
            before = handles[-1]
            handles += answer(served, [*before.prompt, *before.output_ids, *more], new_tokens=20)
        assert [handle.cached_tokens for handle in handles] == [0, PAGE, 2 * PAGE]
        assert len(handles[1].prompt) < 2 * PAGE
        assert_all_returned(served.runner)
    served.assert_equals_transformers(*handles)


def test_rows_are_told_apart() -> None:
    """The row of a request that stopped where another's prefix ends holds the state of the one that stopped."""
    one, two, tail = prompts(PAGE, PAGE, 20, seed=23)
    with server(share=0.5, device_tokens=0, max_running_requests=1) as served:
        handles = answer(served, one + tail)
        answer(served, two, new_tokens=1)
        handles += answer(served, one + tail[:9])
        assert handles[-1].cached_tokens == PAGE
    served.assert_equals_transformers(*handles)


def test_later_pages_were_evicted() -> None:
    first, tail, other = prompts(4 * PAGE + 9, 20, 3 * PAGE, seed=24)
    with server(share=0.5, device_tokens=0, max_total_tokens=7 * PAGE) as served:
        table = served.runner.kv_pool.records.table
        handles = [*answer(served, first), *answer(served, first[: 2 * PAGE] + tail)]
        assert len(table) == 4
        handles += answer(served, other)
        assert len(table) == 5, "two pages were evicted, their records with them"
        handles += answer(served, first)
        assert [handle.cached_tokens for handle in handles] == [0, 2 * PAGE, 0, 2 * PAGE]
        assert_all_returned(served.runner)
    served.assert_equals_transformers(*handles)


def test_an_aborted_prompt_is_gone_on_with() -> None:
    """Aborted between two of its chunks."""
    (prompt,) = prompts(4 * PAGE + 30, seed=30)
    with server(share=0.5, device_tokens=0, chunk=PAGE) as served:
        aborted = ask(served, prompt)
        served.runner.step(2)
        served.runner.abort(aborted)
        served.runner.run_until_idle()
        assert not aborted.output_ids
        handles = answer(served, prompt)
        assert 0 < handles[0].cached_tokens < 4 * PAGE
        assert_all_returned(served.runner)
    served.assert_equals_transformers(*handles)


@pytest.mark.parametrize("share", [0, 1])
def test_retracted_requests_find_their_pages(monkeypatch, share) -> None:
    read, reads = TailRecords.read, []
    monkeypatch.setattr(TailRecords, "read", lambda own, page, who: reads.append(who) or read(own, page, who))
    with server(share=share, device_tokens=PAGE, retract_every=7) as served:
        handles = [ask(served, prompt, new_tokens=24) for prompt in prompts(140, 20, 300, 120, seed=25)]
        served.runner.run_until_idle()
        assert sum(handle.retractions for handle in handles) and reads
        assert_all_returned(served.runner)
    served.assert_equals_transformers(*handles)


def late(monkeypatch, served: V4Server):
    """One request follows another onto pages that were completed a step ago; returns them, and how many tickets were open."""
    read, pending = TailRecords.read, []

    def noted(own: TailRecords, page: int, who: str):
        pending.append(not own._tickets[own.table.use(page)].done)
        return read(own, page, who)

    monkeypatch.setattr(TailRecords, "read", noted)
    first, tail = prompts(2 * PAGE + 20, 11, seed=26)
    handles = [ask(served, first), ask(served, first[: 2 * PAGE] + tail, delay=1)]
    served.runner.run_until_idle()
    assert handles[1].cached_tokens == 2 * PAGE
    return handles, sum(pending)


def test_late_records_are_waited_for(monkeypatch) -> None:
    slow_queues(monkeypatch, 0.03, "write")
    with server(share=0.5, device_tokens=0, chunk=2 * PAGE) as served:
        handles, pending = late(monkeypatch, served)
        assert pending, "the record had been written before it was asked for"
    served.assert_equals_transformers(*handles)


def test_a_record_read_before_it_is_written_is_noticed(monkeypatch) -> None:
    slow_queues(monkeypatch, 0.03, "write")
    wait = Ticket.wait
    monkeypatch.setattr(
        Ticket, "wait", lambda own, s, who: None if "tail record of" in who else wait(own, s, who)
    )
    with server(share=0.5, device_tokens=0, chunk=2 * PAGE) as served:
        with pytest.raises(RuntimeError, match="a score is NaN"):  # the slot's poison
            late(monkeypatch, served)


def test_the_record_of_another_page_is_noticed(monkeypatch) -> None:
    first, tail = prompts(2 * PAGE + 20, 11, seed=27)
    use = RecordTable.use
    with server(share=0.5, device_tokens=0) as served:
        handles = answer(served, first)
        monkeypatch.setattr(
            RecordTable, "use", lambda own, page: use(own, next(p for p in own._slot_of if p != page))
        )
        handles += answer(served, first[: 2 * PAGE] + tail)
        assert handles[1].cached_tokens == 2 * PAGE
    served.assert_equals_transformers(handles[0])
    with pytest.raises(AssertionError, match="logprob|chose"):
        served.assert_equals_transformers(handles[1])


@pytest.mark.parametrize("count", [0, 1, 3])
def test_few_records_cut_the_match(monkeypatch, count) -> None:
    monkeypatch.setattr(RecordTable, "__init__", with_count(RecordTable.__init__, count))
    first, other, tail = prompts(4 * PAGE + 20, 2 * PAGE + 3, 12, seed=28)
    with server(share=0.5, device_tokens=0, chunk=2 * PAGE) as served:
        handles = [*answer(served, first), *answer(served, first[: 3 * PAGE] + tail), *answer(served, first)]
        handles += [*answer(served, other), *answer(served, first)]
        assert [handle.cached_tokens // PAGE for handle in handles] == {
            0: [0, 0, 0, 0, 0],
            1: [0, 0, 3, 0, 0],  # the second request's record went to the page that the first one had cached
            3: [0, 3, 4, 0, 4],
        }[count]
        assert served.runner.kv_pool.records.table.lost_records
        assert_all_returned(served.runner)
    served.assert_equals_transformers(*handles)


def with_count(init, count: int):
    return lambda table, _: init(table, count)


def test_records_of_freed_pages_push_no_others_out(monkeypatch) -> None:
    """Of twins the second one's pages are freed, on a GPU later; the next prompt takes the records that were theirs."""
    monkeypatch.setattr("sglang_inplacekv.pool.FreedPages", LateFrees)
    monkeypatch.setattr(LateFrees, "polls", [10**9])
    monkeypatch.setattr(RecordTable, "__init__", with_count(RecordTable.__init__, 6))
    kept, twin, other = prompts(*[2 * PAGE + 5] * 3, seed=41)
    with server(share=0.5, device_tokens=32 * PAGE, chunk=8 * PAGE) as served:
        answer(served, kept, new_tokens=1)
        for prompt, delay in ((twin, 0), (twin, 0), (other, 1)):
            ask(served, prompt, new_tokens=1, delay=delay)
        served.runner.run_until_idle()
        assert not served.runner.kv_pool.records.table.lost_records
        assert answer(served, kept)[0].cached_tokens == 2 * PAGE
        assert_all_returned(served.runner)


def test_switched_off() -> None:
    first, tail = prompts(PAGE + 20, 11, seed=29)
    with server(share=0.5, device_tokens=0, disable_radix_cache=True) as served:
        assert served.runner.kv_pool.records.nbytes == 0
        handles = [*answer(served, first), *answer(served, first + tail)]
        assert not any(handle.cached_tokens for handle in handles)
    served.assert_equals_transformers(*handles)
