from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_attn import indexer
from sparse_attn.indexer import top_entries, top_ids


def picked(scores: list[float], limit: int, k: int) -> list[int]:
    """By definition: highest first, of equal ones the lowest id."""
    order = sorted(range(limit), key=lambda i: (-scores[i], i))
    return sorted(order[:k])


# Few different values make many ties; negative ones and zeros of both signs among them.
ROWS = st.lists(
    st.lists(st.sampled_from([-1.5, -0.0, 0.0, 2.0, 7.0]), min_size=12, max_size=12), min_size=1, max_size=5
)


@settings(max_examples=200, deadline=None)
@given(ROWS, st.integers(1, 14), st.data())
def test_of_equal_scores_the_lowest_id_goes_first(
    rows: list[list[float]], k: int, data: st.DataObject
) -> None:
    limits = data.draw(st.lists(st.integers(0, 12), min_size=len(rows), max_size=len(rows)))
    ids = top_ids(torch.tensor(rows), torch.tensor(limits)[:, None], k)
    assert ids.dtype == torch.int32 and ids.shape == (len(rows), min(k, 12))
    for row, scores, limit in zip(ids.tolist(), rows, limits):
        wanted = picked(scores, limit, k)
        assert row == wanted + [-1] * (len(row) - len(wanted))


def test_refuses_nan() -> None:
    with pytest.raises(RuntimeError, match="a score is NaN"):
        top_ids(torch.tensor([[1.0, torch.nan, 0.5, 0.2]]), torch.tensor([[4]]), 2)


@pytest.mark.parametrize("stride", [1, 4])
@pytest.mark.parametrize("first", [0, 3, 21, 100])
def test_equals_scores_written_out_by_query_in_any_part(
    stride: int, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = torch.Generator().manual_seed(first)
    tokens, heads, dim, k = 37, 5, 8, 6
    queries = torch.randn(tokens, heads, dim, generator=g)
    weights = torch.randn(tokens, heads, generator=g)
    keys = torch.randn((first + tokens) // stride, dim, generator=g)
    whole = top_entries(queries, weights, keys, first, stride, k)
    # Five heads and few channels: relu leaves no head for some scores, which then tie at 0.
    for t in range(tokens):
        limit = (first + t + 1) // stride
        scores = (torch.relu(keys[:limit] @ queries[t].T) * weights[t]).sum(-1)
        row = whole[t]
        assert row[row >= 0].tolist() == picked([round(s, 5) for s in scores.tolist()], limit, k)
    monkeypatch.setattr(indexer, "_SCORES", 3 * heads * len(keys))
    assert torch.equal(top_entries(queries, weights, keys, first, stride, k), whole)
    assert top_entries(queries[:0], weights[:0], keys, first, stride, k).shape[0] == 0
