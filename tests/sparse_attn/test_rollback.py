"""Taking tokens back: what follows is, to the bit, as if they had never been observed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_attn import GrowingStore, LayerInputs, Selection, Selector, SelectorState, journals
from sparse_attn.attend import attend_selection
from tests.sparse_attn.small import KINDS, ForgetfulStore, part, selector_of, tokens_of

MAX_ROLLBACK = 6


def new_state(selector: Selector) -> SelectorState:
    return selector.new_state(ForgetfulStore(selector.spaces))


def kept(selector: Selector, state: SelectorState) -> dict[str, torch.Tensor]:
    """All that later results can depend on."""
    found = {}
    assert isinstance(state.store, GrowingStore)
    for name, space in selector.spaces.items():
        count = space.count(state.tokens)
        assert state.store.count(name) == count
        oldest = 0 if space.ring is None else max(0, count - space.ring + selector.max_rollback)
        found[name] = state.store.rows(name, oldest, count)
    for name, tail in state.tails.items():
        oldest = max(0, state.tokens - len(tail) + selector.max_rollback)
        found[f"journal of {name}"] = journals.read(tail, oldest, state.tokens)
    return found


def same(a: Selection, b: Selection) -> bool:
    return all(
        torch.equal(s.limit, t.limit)
        and (s.ids is None or torch.equal(s.ids, t.ids))
        and (s.span is None or all(torch.equal(x, y) for x, y in zip(s.span, t.span)))
        for s, t in zip(a.segments, b.segments, strict=True)
    )


def attend(selector: Selector, state: SelectorState, x: LayerInputs) -> tuple[Selection, list[torch.Tensor]]:
    selection = selector.select(state, x)
    return selection, attend_selection(x.q, selection, selector.spaces, state.store, 0.2)


# Each turn: tokens that stay, then wrong ones in one or two parts, which are taken back.
TURNS = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, MAX_ROLLBACK), st.integers(0, MAX_ROLLBACK)),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(TURNS)
def test_taken_back_tokens_leave_no_trace(kind: str, turns: list[tuple[int, int, int]]) -> None:
    selector = selector_of(kind, MAX_ROLLBACK)
    right = tokens_of(selector, sum(turn[0] for turn in turns), seed=1)
    state, straight = new_state(selector), new_state(selector)
    for turn, (count, wrong, cut) in enumerate(turns):
        x = part(right, state.tokens, state.tokens + count)
        for one in (state, straight):
            selector.observe(one, x)
        selection, outs = attend(selector, state, x)
        other, wanted = attend(selector, straight, x)
        assert same(selection, other) and all(map(torch.equal, outs, wanted))
        astray = tokens_of(selector, wrong, seed=100 + turn, first=state.tokens)
        cut = min(cut, wrong)
        for piece in (part(astray, 0, cut), part(astray, cut, wrong)):
            selector.observe(state, piece)
        for taken in (wrong - cut, cut):
            counts = selector.rollback(state, taken)
        assert counts == {name: space.count(state.tokens) for name, space in selector.spaces.items()}
        assert state.tokens == straight.tokens
        found, wanted_state = kept(selector, state), kept(selector, straight)
        for name, rows in wanted_state.items():
            if name in found:
                assert torch.equal(found[name], rows), name
            else:
                assert not len(rows), name


@pytest.mark.parametrize("kind", ["swa", "csa", "hca", "nsa"])
def test_taking_back_and_observing_other_tokens_equals_observing_those_alone(kind: str) -> None:
    """At every position of a block, and as far back as a selector goes."""
    selector = selector_of(kind, MAX_ROLLBACK)
    right = tokens_of(selector, 80, seed=1)
    for length in range(MAX_ROLLBACK, 48):
        state, straight = new_state(selector), new_state(selector)
        for first in range(length):
            selector.observe(state, part(right, first, first + 1))
        selector.rollback(state, MAX_ROLLBACK)
        left = length - MAX_ROLLBACK
        if left:
            selector.observe(straight, part(right, 0, left))
        x = part(right, left, left + 32)
        for one in (state, straight):
            selector.observe(one, x)
        # The beginnings were computed in products of different sizes, hence not the same bits.
        (_, outs), (_, wanted) = (attend(selector, one, x) for one in (state, straight))
        torch.testing.assert_close(outs, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["swa", "csa", "hca", "nsa"])
def test_refuses_to_go_back_further_than_journals_reach(kind: str) -> None:
    selector = selector_of(kind, MAX_ROLLBACK)
    state = selector.new_state()
    x = tokens_of(selector, 50, seed=1)
    selector.observe(state, part(x, 0, 40))
    selector.rollback(state, 4)
    with pytest.raises(
        ValueError, match="3 of 36 tokens cannot be taken back: journals reach down to token 34"
    ):
        selector.rollback(state, 3)
    # What was observed anew does not bring back older rows.
    selector.observe(state, part(x, 36, 38))
    with pytest.raises(ValueError, match="5 of 38"):
        selector.rollback(state, 5)
    selector.rollback(state, 4)
    assert state.tokens == 34
    with pytest.raises(ValueError, match="-1 of 34"):
        selector.rollback(state, -1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_snapshot_is_all_it_takes_to_go_on(kind: str) -> None:
    selector = selector_of(kind, MAX_ROLLBACK)
    right = tokens_of(selector, 60, seed=1)
    for length in [1, 7, 8, 16, 29, 32]:
        straight, begun = selector.new_state(), selector.new_state()
        for one in (straight, begun):
            selector.observe(one, part(right, 0, length))
        rows = selector.snapshot(begun)
        if length == 32 and kind in ("csa", "hca"):
            assert {name: len(kept_rows) for name, kept_rows in rows.items()} == (
                {"cmp": 4, "idx": 4} if kind == "csa" else {"cmp": 0}
            )
        state = selector.resume(length, rows, begun.store)
        x = part(right, length, 60)
        for one in (straight, state):
            selector.observe(one, x)
        (_, outs), (_, wanted) = (attend(selector, one, x) for one in (state, straight))
        assert all(map(torch.equal, outs, wanted))
        with pytest.raises(ValueError, match="cannot be taken back"):
            selector.rollback(selector.resume(length, rows, begun.store), 1)
    if kind in ("csa", "hca", "nsa"):
        with pytest.raises(ValueError, match="29 tokens leave .* rows of cmp, 0 were given"):
            selector.resume(29, {}, begun.store)


@pytest.mark.parametrize("kind", KINDS)
def test_marked_snapshots_are_those_of_a_cut_there(kind: str) -> None:
    selector = selector_of(kind, MAX_ROLLBACK)
    right = tokens_of(selector, 60, seed=1)
    for first, marks in [(0, (4, 8, 32, 33)), (30, (31, 32)), (31, (32, 36, 60)), (7, ())]:
        state, cut = selector.new_state(), selector.new_state()
        for one in (state, cut):
            selector.observe(one, part(right, 0, first))
        found = selector.observe_marked(state, part(right, first, 60), marks)
        assert len(found) == len(marks)
        for mark, snapshot in zip(marks, found):
            selector.observe(cut, part(right, cut.tokens, mark))
            torch.testing.assert_close(snapshot, selector.snapshot(cut), rtol=1e-5, atol=1e-5)
        wanted = selector.new_state()
        selector.observe(wanted, part(right, 0, first))
        selector.observe(wanted, part(right, first, 60))
        assert state.tokens == 60 and all(torch.equal(state.tails[s], wanted.tails[s]) for s in wanted.tails)
    begun = selector.new_state()
    selector.observe(begun, part(right, 0, 7))
    for mark in (7, 61):
        with pytest.raises(ValueError, match=f"marks .{mark}. do not end in tokens 7 .. 60"):
            selector.observe_marked(begun, part(right, 7, 60), [mark])
    assert begun.tokens == 7


def test_short_sequences_can_be_taken_back_whole() -> None:
    for kind in KINDS:
        selector = selector_of(kind, MAX_ROLLBACK)
        state = selector.new_state()
        selector.observe(state, tokens_of(selector, MAX_ROLLBACK, seed=1))
        assert set(selector.rollback(state, MAX_ROLLBACK).values()) == {0}
