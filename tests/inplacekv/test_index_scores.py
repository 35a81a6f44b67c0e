"""Index scores: by Triton's interpreter here, compiled on a GPU."""

from __future__ import annotations

import pytest
import torch

from sglang_inplacekv.executors.index_scores import best_entries, index_scores
from tests.inplacekv.index_scores_checks import check
from tests.inplacekv.interpreted import run_interpreted


def test_interpreted() -> None:
    run_interpreted("index_scores_checks")


def test_what_does_not_fit_is_refused() -> None:
    queries, weights, keys = torch.ones(1, 16, 16), torch.ones(1, 16), torch.ones(1, 5, 16)
    for own, message in (
        ((queries[:, :8], weights[:, :8], keys), "8 index heads of 16"),
        ((queries, weights, keys.bfloat16()), "do not fit"),
        ((queries, weights, keys.mT.contiguous().mT), "contiguous"),
        ((queries[0], weights, keys), "3, 2 and 3 dimensions"),
        ((queries, weights.bfloat16(), keys), "weights of torch.bfloat16, which must be fp32"),
        ((queries.int(), weights, keys.int()), "queries of torch.int32"),
    ):
        with pytest.raises(ValueError, match=message):
            index_scores(*own)
    for out in (torch.zeros(2, 3).int(), torch.zeros(1, 6).int(), torch.zeros(1, 3)):
        with pytest.raises(ValueError, match=r"the best of scores \(1, 5\) into"):
            best_entries(torch.ones(1, 5), out)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 16, 32, 300), (1, 64, 128, 16384), (3, 64, 128, 5000)])
def test_compiled(shape: tuple[int, int, int, int]) -> None:
    # Products of bf16 are exact, sums fp32. A score adds up 64 x 128 of them, of order one and weighted by 0.01.
    check(*shape, "cuda", 1e-5)
