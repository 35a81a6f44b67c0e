"""Listed attention and the merge, against a dense softmax in fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_attn import Segment, Space
from sparse_attn.attend import attend_rows, empty_state, expand, merge, pack

SCALE = 0.3
LATENT = Space("cmp", 4, 8, 4, dk=16, dv=12, v_in_k=True, entry_bytes=1)
HEADS_OF_KV = Space("slc", 1, 1, 1, dk=16, dv=12, v_in_k=False, entry_bytes=1, kv_heads=2)
SPACES = pytest.mark.parametrize("space", [LATENT, HEADS_OF_KV], ids=["latent", "two KV heads"])


def dense(q: torch.Tensor, space: Space, rows: torch.Tensor, ids: torch.Tensor, sink: torch.Tensor | None):
    """Softmax over the listed rows and the sink, fp64: out [T, H, dv]."""
    rows, q = rows.double(), q.double()
    keys = rows[..., : space.dk]
    values = rows[..., : space.dv] if space.v_in_k else rows[..., space.dk :]
    group = q.shape[1] // space.kv_heads
    out = torch.zeros(*q.shape[:2], space.dv, dtype=torch.float64)
    for t in range(len(q)):
        for h in range(q.shape[1]):
            g = h // group
            listed = ids[t, g if ids.shape[1] > 1 else 0]
            listed = listed[listed >= 0]
            scores = keys[listed, g] @ q[t, h] * SCALE
            if sink is not None:
                scores = torch.cat([scores, sink[h : h + 1].double()])
            if len(scores):
                out[t, h] = torch.softmax(scores, 0)[: len(listed)] @ values[listed, g]
    return out.float()


def random_case(space: Space, seed: int, tokens: int = 5, entries: int = 30, lists: int = 1):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(tokens, 4, space.dk, generator=g) * 3
    rows = torch.randn(entries, space.kv_heads, space.width, generator=g)
    keep = torch.rand(tokens, lists, entries, generator=g) < torch.rand(tokens, lists, 1, generator=g)
    ids = torch.where(keep, torch.arange(entries), -1)
    return q, rows, ids, torch.randn(4, generator=g)


@SPACES
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), parts=st.integers(1, 4), with_sink=st.booleans())
def test_any_division_merges_to_the_dense_result_and_the_sink_enters_once(
    space: Space, seed: int, parts: int, with_sink: bool
) -> None:
    q, rows, ids, sink = random_case(space, seed, lists=space.kv_heads)
    side = torch.randint(0, parts, ids.shape, generator=torch.Generator().manual_seed(seed + 1))
    states = [attend_rows(q, space, rows, torch.where(side == i, ids, -1), SCALE) for i in range(parts)]
    states.append(empty_state(*q.shape[:2], space.dv))
    out, _ = merge(states, sink if with_sink else None)
    torch.testing.assert_close(
        out, dense(q, space, rows, ids, sink if with_sink else None), rtol=1e-5, atol=1e-5
    )


def test_merges_associate_and_lse_carries_the_sink() -> None:
    q, rows, ids, sink = random_case(LATENT, 3)
    a, b = (attend_rows(q, LATENT, rows, torch.where(ids % 2 == i, ids, -1), SCALE) for i in range(2))
    torch.testing.assert_close(merge([merge([a], sink), b]), merge([a, b], sink), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(merge([b, a]), merge([a, b]), rtol=1e-6, atol=1e-6)
    out, lse = merge([empty_state(2, 4, 12)], sink)
    assert (out == 0).all()
    torch.testing.assert_close(lse, (sink / torch.log(torch.tensor(2.0))).expand(2, 4))
    out, lse = merge([empty_state(2, 4, 12), empty_state(2, 4, 12)])
    assert (out == 0).all() and (lse == -torch.inf).all()


def test_large_scores_neither_overflow_nor_vanish() -> None:
    q, rows, ids, sink = random_case(LATENT, 4)
    q = q * 1000
    out, lse = merge([attend_rows(q, LATENT, rows, ids, SCALE)], sink)
    assert out.isfinite().all() and lse.isfinite().all()
    torch.testing.assert_close(out, dense(q, LATENT, rows, ids, sink), rtol=1e-3, atol=1e-3)


def test_padding_reads_nothing_that_was_not_written() -> None:
    rows = torch.full((6, 1, 16), torch.nan)
    rows[3] = 1.0
    q = torch.randn(3, 4, 16)
    out, lse = attend_rows(q, LATENT, rows, torch.tensor([[[3, -1]], [[-1, -1]], [[-1, 3]]]), SCALE)
    assert out.isfinite().all() and (out[1] == 0).all() and (lse[1] == -torch.inf).all()


@SPACES
def test_queries_are_attended_in_parts_where_lists_are_long(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, rows, ids, _ = random_case(space, 5, tokens=7)
    whole = attend_rows(q, space, rows, ids, SCALE)
    monkeypatch.setattr("sparse_attn.attend._GATHERED", 2 * space.kv_heads * 30 * space.width)
    torch.testing.assert_close(attend_rows(q, space, rows, ids, SCALE), whole, rtol=1e-6, atol=1e-6)


def test_expand_drops_padding_and_what_is_past_the_limit() -> None:
    limit = torch.tensor([3, 5])
    ids = torch.tensor([[[0, 2, 3, -1]], [[4, 5, 1, -1]]], dtype=torch.int32)
    assert expand(Segment("lat", 0, limit, ids=ids)).tolist() == [[[0, 2, -1, -1]], [[4, -1, 1, -1]]]
    blocks = torch.tensor([[[1, -1]], [[2, 0]]], dtype=torch.int32)
    assert expand(Segment("slc", 0, limit, ids=blocks, unit=2)).tolist() == [
        [[2, -1, -1, -1]],
        [[4, -1, 0, 1]],
    ]
    span = (torch.tensor([1, 2]), torch.tensor([9, 4]))
    assert expand(Segment("win", 0, limit, span=span)).tolist() == [
        [[1, 2, -1, -1, -1, -1, -1, -1]],
        [[2, 3, -1, -1, -1, -1, -1, -1]],
    ]
    nothing = (torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
    assert expand(Segment("cmp", 0, limit, span=nothing)).shape == (2, 1, 0)
    with pytest.raises(ValueError, match="either ids or a span"):
        Segment("win", 0, limit)


def test_pack_keeps_order_and_cuts_empty_columns() -> None:
    ids = torch.tensor([[[-1, 7, -1, 3]], [[-1, -1, 2, -1]]])
    assert pack(ids).tolist() == [[[7, 3]], [[2, -1]]]
    assert pack(torch.full((2, 1, 3), -1)).shape == (2, 1, 0)
