"""A selection on two sides: the lists divide it, and the result is the undivided one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparse_attn import GrowingStore, Selector, SelectorState, Space
from sparse_attn.attend import attend_selection
from sparse_attn.compose import Composer, place
from sparse_attn.cpu_side import LatentCpuSide, TorchCpuSide
from sparse_attn.hot import HotSet
from sparse_attn.traffic import Policy, break_even_misses, exchange_bytes
from tests.sparse_attn.small import HEADS, KINDS, part, selector_of, tokens_of

SCALE = 0.2
POLICIES = {
    "compute": Policy.compute(),
    "fetch": Policy.fetch(),
    "split": Policy.split(0.4),
    "fewest bytes": Policy.fewest_bytes(),
}


class Only:
    """Entries of some spaces alone: what is asked of the wrong side fails."""

    def __init__(self, store: GrowingStore, spaces: set[str]) -> None:
        self._store, self._spaces = store, spaces
        self.asked: list[Tensor] = []

    def slots(self, space: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        assert space in self._spaces
        self.asked.append(ids[ids >= 0])
        return self._store.slots(space, ids)


def composer_of(
    selector: Selector, policy: Policy, hot_entries: int, on_place=None
) -> tuple[SelectorState, Composer, Only]:
    state = selector.new_state()
    assert isinstance(state.store, GrowingStore)
    spilled = {space.name for space in selector.spaces.values() if space.spill}
    home = Only(state.store, spilled)
    resident = Only(state.store, set(selector.spaces) - spilled)
    composer = Composer(
        selector,
        SCALE,
        policy,
        resident=resident,
        home=home,
        cpu=TorchCpuSide(home),
        hot_entries=hot_entries,
        on_place=on_place,
    )
    return state, composer, home


def undivided(selector: Selector, state: SelectorState, x) -> Tensor:
    selection = selector.select(state, x)
    outs = attend_selection(x.q, selection, selector.spaces, state.store, SCALE)
    return selector.finish(outs, x, selection)


@pytest.mark.parametrize("hot_entries", [0, 6, 1000])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_result_does_not_depend_on_the_division(kind: str, policy: Policy, hot_entries: int) -> None:
    """fp32 sums in another order: 1e-5. From the first token on, where most lists are empty."""
    selector = selector_of(kind)
    state, composer, _ = composer_of(selector, policy, hot_entries)
    x = tokens_of(selector, 90, seed=2)
    first = 0
    for count in [1, 2, 1, 40, *[1] * 30, 3, 12]:
        piece = part(x, first, first + count)
        out = composer.forward(state, piece)
        torch.testing.assert_close(out, undivided(selector, state, piece), rtol=1e-5, atol=1e-5)
        for hot in composer.hot.values():
            hot.check_integrity()
        first += count
    assert set(composer.hot) == {name for name, space in selector.spaces.items() if space.spill}


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 20), st.sampled_from([0.0, 0.3, 0.5, 1.0, None]))
def test_lists_are_disjoint_and_together_the_selection(seed: int, held: int, share: float | None) -> None:
    g = torch.Generator().manual_seed(seed)
    space = Space("cmp", 4, 8, 4, dk=2, dv=2, v_in_k=True, entry_bytes=100)
    hot = HotSet(space, 20)
    resident = torch.randperm(40, generator=g)[:held].sort().values
    hot.admit(resident, torch.zeros(held, 1, 2))
    ids = torch.stack([torch.randperm(40, generator=g)[:12] for _ in range(6)]).view(3, 2, 12)
    ids = torch.where(torch.rand(ids.shape, generator=g) < 0.3, -1, ids)
    found = place(ids, hot, Policy(share), exchange=1000)
    on_hot, on_tile, on_cpu = found.hot >= 0, found.tile >= 0, found.cpu >= 0
    assert torch.equal(on_hot.int() + on_tile.int() + on_cpu.int(), (ids >= 0).int())
    assert torch.equal(hot.slots(ids[on_hot]), found.hot[on_hot]) and set(ids[on_hot].tolist()) <= set(
        resident.tolist()
    )
    assert torch.equal(found.fetched[found.tile[on_tile]], ids[on_tile])
    assert torch.equal(found.cpu[on_cpu], ids[on_cpu])
    missed = set(ids[(ids >= 0) & ~on_hot].tolist())
    assert set(found.fetched.tolist()) | set(on_cpu_ids := ids[on_cpu].tolist()) == missed
    assert not set(found.fetched.tolist()) & set(on_cpu_ids)
    assert found.different == len(set(ids[ids >= 0].tolist()))
    wanted = (len(missed) * 100 > 1000) * len(missed) if share is None else round(share * len(missed))
    assert found.cpu_entries == len(set(on_cpu_ids)) == wanted


def test_new_entries_are_on_the_device_for_the_query_that_closes_them() -> None:
    selector = selector_of("csa")
    state, composer, home = composer_of(selector, Policy.compute(), hot_entries=64)
    x = tokens_of(selector, 64, seed=2)
    for first in range(64):
        composer.forward(state, part(x, first, first + 1))
    assert not home.asked and composer.traffic.hits == composer.traffic.listed > 0
    assert composer.traffic.homed_bytes == 16 * selector.spaces["cmp"].entry_bytes


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("kind", ["csa", "dsa", "nsa"])
def test_rollback_drops_copies_of_entries_that_are_no_more(kind: str, policy: Policy) -> None:
    selector = selector_of(kind)
    state, composer, _ = composer_of(selector, policy, hot_entries=1000)
    right = tokens_of(selector, 60, seed=2)
    composer.forward(state, part(right, 0, 33))
    for first in range(33, 57, 3):
        composer.forward(state, tokens_of(selector, 6, seed=first, first=first))
        composer.rollback(state, 6)
        for name, hot in composer.hot.items():
            left = selector.spaces[name].count(first)
            assert (hot.slots(torch.arange(left, left + 9)) == -1).all()
        piece = part(right, first, first + 3)
        out = composer.forward(state, piece)
        for hot in composer.hot.values():
            hot.check_integrity()
        straight = selector.new_state()
        selector.observe(straight, part(right, 0, first + 3))
        torch.testing.assert_close(out, undivided(selector, straight, piece), rtol=1e-5, atol=1e-5)


def test_a_watcher_is_told_where_entries_go() -> None:
    told = []
    selector = selector_of("csa")
    state, composer, home = composer_of(selector, Policy.split(0.4), 6, lambda *what: told.append(what))
    x = tokens_of(selector, 48, seed=2)
    selector.observe(state, x)
    last = part(x, 47, 48)
    selection = selector.select(state, last)
    composer.attend(last.q, selection)
    ((space, ids, placement),) = told
    assert space == "cmp" and torch.equal(ids, selection.segments[1].ids.long())
    assert torch.equal(placement.cpu[placement.cpu >= 0], home.asked[0])
    assert torch.equal(placement.fetched, home.asked[1])


def csa_step(policy: Policy):
    """One query of a CSA layer over 12 closed entries, of which it selects 5 and none is hot."""
    selector = selector_of("csa")
    state, composer, _ = composer_of(selector, policy, hot_entries=5)
    x = tokens_of(selector, 48, seed=2)
    selector.observe(state, x)
    last = part(x, 47, 48)
    composer.attend(last.q, selector.select(state, last))
    return selector.spaces["cmp"], composer, last, selector, state


def test_bytes_of_computed_misses_are_queries_and_answers() -> None:
    _, composer, *_ = csa_step(Policy.compute())
    traffic = composer.traffic
    assert (traffic.listed, traffic.hits, traffic.cpu_entries, traffic.fetched_entries) == (5, 0, 5, 0)
    assert traffic.query_bytes == HEADS * 32 * 4 and traffic.answer_bytes == HEADS * (32 + 1) * 4
    assert traffic.fetched_bytes == traffic.homed_bytes == 0
    assert traffic.link_bytes == exchange_bytes(1, HEADS, 32, 32, 4)


def test_bytes_of_fetched_misses_are_the_entries_and_they_are_hot_then() -> None:
    space, composer, last, selector, state = csa_step(Policy.fetch())
    traffic = composer.traffic
    assert (traffic.fetched_entries, traffic.cpu_entries) == (5, 0)
    assert traffic.link_bytes == traffic.fetched_bytes == traffic.selected_bytes == 5 * space.entry_bytes
    composer.attend(last.q, selector.select(state, last))
    assert traffic.hits == 5 and traffic.hit_rate == 0.5 and traffic.fetched_entries == 5


def test_bytes_of_a_split_are_both() -> None:
    space, composer, *_ = csa_step(Policy.split(0.4))
    traffic = composer.traffic
    assert (traffic.cpu_entries, traffic.fetched_entries) == (2, 3)
    assert traffic.link_bytes == exchange_bytes(1, HEADS, 32, 32, 4) + 3 * space.entry_bytes


def test_break_even_of_the_released_geometries() -> None:
    # V4-Flash: 64 heads of 512; bf16 queries there, fp32 answers back, entries of 584 bytes.
    assert exchange_bytes(1, 64, 512, 512, 2) == 65536 + 131072 + 256
    assert round(break_even_misses(64, 512, 512, 2, 584)) == 337
    assert round(break_even_misses(128, 576, 512, 2, 656)) == 625  # V3.2
    with pytest.raises(ValueError, match="cpu_share must be 0 to 1, is 1.5"):
        Policy.split(1.5)


def test_cpu_attn_s_kernels_attend_the_cpu_s_lists() -> None:
    """fp32 rows: the same tolerance as any other division."""
    selector = selector_of("csa")
    x = tokens_of(selector, 90, seed=2)
    state, composer, home = composer_of(selector, Policy.split(0.6), hot_entries=3)
    composer._cpu = LatentCpuSide(home)
    for first, last in [(0, 40), *((i, i + 1) for i in range(40, 90))]:
        piece = part(x, first, last)
        out = composer.forward(state, piece)
        torch.testing.assert_close(out, undivided(selector, state, piece), rtol=1e-5, atol=1e-5)
    assert composer.traffic.cpu_entries > 50


@pytest.mark.parametrize("heads", [1, 4])
def test_cpu_attn_on_an_executor_with_empty_lists_and_rotary_channels(heads: int) -> None:
    from cpu_attn import Executor

    space = Space("lat", 1, 1, 1, dk=48, dv=32, v_in_k=True, entry_bytes=192, spill=True)
    store = GrowingStore({"lat": space})
    store.append("lat", 0, torch.randn(50, 1, 48))
    q = torch.randn(3, heads, 48)
    ids = torch.tensor([[[4, -1, 49]], [[-1, -1, -1]], [[0, 7, 3]]])
    wanted = TorchCpuSide(store).submit(q, space, ids, SCALE).wait()
    with Executor(threads=1) as executor:
        side = LatentCpuSide(store, executor)
        torch.testing.assert_close(side.submit(q, space, ids, SCALE).wait(), wanted, rtol=1e-5, atol=1e-5)
        nothing = side.submit(q, space, torch.full((3, 1, 2), -1), SCALE).wait()
        assert (nothing[0] == 0).all() and (nothing[1] == -torch.inf).all()
        store.append("lat", 50, torch.randn(500, 1, 48))  # moves the rows
        wanted = TorchCpuSide(store).submit(q, space, ids + 400, SCALE).wait()
        torch.testing.assert_close(
            side.submit(q, space, ids + 400, SCALE).wait(), wanted, rtol=1e-5, atol=1e-5
        )
    nsa = selector_of("nsa").spaces["slc"]
    store = GrowingStore({"slc": nsa})
    store.append("slc", 0, torch.randn(4, 2, 22))
    with pytest.raises(ValueError, match="one KV head"):
        LatentCpuSide(store).submit(torch.randn(1, 4, 12), nsa, torch.zeros(1, 2, 1).long(), SCALE)
