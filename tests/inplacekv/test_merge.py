from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_inplacekv.attention import partial_attention
from sparse_attn.attend import empty_state, merge
from tests.inplacekv.reference import dense_attention

SHAPE = (3, 4, 16)


def state(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(SHAPE, generator=g), torch.randn(SHAPE[:2], generator=g) * 20


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6))
def test_merge_commutes_and_associates(seed: int) -> None:
    a, b, c = state(seed), state(seed + 1), state(seed + 2)
    torch.testing.assert_close(merge([a, b]), merge([b, a]), rtol=1e-6, atol=1e-6)
    left, right = merge([merge([a, b]), c]), merge([a, merge([b, c])])
    torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)


def test_empty_is_neutral_and_two_empties_are_zero() -> None:
    full, empty = state(1), empty_state(*SHAPE)
    torch.testing.assert_close(merge([full, empty]), full, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(merge([empty, full]), full, rtol=1e-6, atol=1e-6)
    out, lse = merge([empty, empty])
    assert (out == 0).all() and (lse == -torch.inf).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 70), st.integers(1, 3), st.lists(st.integers(0, 70), max_size=4), st.integers(0, 10**6))
def test_any_split_of_the_tokens_merges_to_the_whole(
    keys: int, group: int, cuts: list[int], seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(1, 2 * group, 64, generator=g)
    k, v = (torch.randn(keys, 2, 64, generator=g) for _ in range(2))
    order = torch.randperm(keys, generator=g)
    total = empty_state(1, 2 * group, 64)
    edges = [0, *sorted(min(cut, keys) for cut in cuts), keys]
    for start, stop in itertools.pairwise(edges):
        part = order[start:stop]
        total = merge([total, partial_attention(q, k[part], v[part], 0.125)])
    wanted = dense_attention(q, k, v, 0.125, first=keys - 1)
    torch.testing.assert_close(total[0], wanted, rtol=2e-5, atol=2e-6)


def test_causal_blocks_equal_dense() -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(300, 4, 64, generator=g),
        torch.randn(300, 2, 64, generator=g),
        torch.randn(300, 2, 64, generator=g),
    )
    out, _ = partial_attention(q, k, v, 0.125, causal=True)
    torch.testing.assert_close(out, dense_attention(q, k, v, 0.125, first=0), rtol=2e-5, atol=2e-6)
