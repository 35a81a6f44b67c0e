from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_attn import Space
from sparse_attn.hot import HotSet

SPACE = Space("cmp", 4, 8, 4, dk=2, dv=2, v_in_k=True, entry_bytes=584)


def rows_of(ids: torch.Tensor) -> torch.Tensor:
    return ids[:, None, None].expand(-1, 1, 2) * 10.0


# Each step attends some entries, or takes entries back from one on.
STEPS = st.lists(st.one_of(st.sets(st.integers(0, 30), max_size=9), st.integers(0, 30)), max_size=30)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 8), STEPS)
def test_holds_the_most_recently_attended(capacity: int, steps: list[set[int] | int]) -> None:
    hot = HotSet(SPACE, capacity)
    steps_of: OrderedDict[int, int] = OrderedDict()  # entry -> step of its last use
    for step, chosen in enumerate(steps):
        if isinstance(chosen, int):
            hot.drop_from(chosen)
            steps_of = OrderedDict((i, s) for i, s in steps_of.items() if i < chosen)
        else:
            ids = torch.tensor(sorted(chosen), dtype=torch.int64)
            hot.begin_step()
            slots = hot.slots(ids)
            assert {int(i) for i in ids[slots >= 0]} == chosen & set(steps_of)
            hot.use(slots)
            steps_of.update(dict.fromkeys(chosen & set(steps_of), step))
            missed = ids[slots < 0]
            admitted = hot.admit(missed, rows_of(missed))
            room = capacity - sum(s == step for s in steps_of.values())
            assert admitted == min(room, len(missed))
            for entry in missed[len(missed) - admitted :].tolist():
                if len(steps_of) == capacity:
                    oldest = min(steps_of.values())
                    # Of those last used together any may go.
                    gone = [
                        i for i, s in steps_of.items() if s == oldest and hot.slots(torch.tensor([i])) < 0
                    ]
                    assert gone
                    del steps_of[gone[0]]
                steps_of[entry] = step
        hot.check_integrity()
        everything = torch.arange(31)
        slots = hot.slots(everything)
        held = everything[slots >= 0]
        assert set(held.tolist()) == set(steps_of) and len(hot) == len(held) <= capacity
        if len(held):
            assert torch.equal(hot.rows[slots[held]], rows_of(held))


def test_what_this_step_attends_is_not_evicted_in_it() -> None:
    hot = HotSet(SPACE, 3)
    first, more = torch.tensor([0, 1, 2]), torch.tensor([5, 6])
    hot.admit(first, rows_of(first))
    hot.begin_step()
    hot.use(hot.slots(torch.tensor([0, 2, -1])))
    assert hot.admit(more, rows_of(more)) == 1
    assert hot.slots(torch.tensor([0, 1, 2, 5, 6])).ge(0).tolist() == [True, False, True, False, True]
    assert hot.evicted == 1


def test_refuses_a_negative_size_and_finds_broken_books() -> None:
    with pytest.raises(ValueError, match="-1 entries"):
        HotSet(SPACE, -1)
    hot = HotSet(SPACE, 3)
    ids = torch.tensor([4])
    hot.admit(ids, rows_of(ids))
    hot._slot_of[3] = 0
    with pytest.raises(RuntimeError, match="1 slots are taken, 2 entries have one"):
        hot.check_integrity()
