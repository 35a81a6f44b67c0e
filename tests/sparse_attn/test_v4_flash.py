"""A CSA layer of V4-Flash's size against transformers': 64 heads of 512, hidden 4096, 64 x 128 indexer, top-512, window 128."""

from __future__ import annotations

import pytest
import torch

from sparse_attn.attend import attend_selection
from tests.sparse_attn import oracle_v4
from tests.sparse_attn.oracle_v4 import Oracle, inputs_of, project_out, selector_of

PREFILL, DECODED = 2060, 40
# The oracle attends every key that it holds, 127 raw ones and a chunk's: whole, the prefill takes it minutes.
CHUNK = 256


@pytest.mark.slow
def test_prefill_and_decode_at_the_released_geometry() -> None:
    oracle = Oracle(oracle_v4.flash_config("csa"))
    tokens = PREFILL + DECODED
    h = torch.randn(tokens, oracle.config.hidden_size, generator=torch.Generator().manual_seed(5))
    selector = selector_of(oracle, "csa")
    state = selector.new_state()
    first = 0
    for last in [*range(CHUNK, PREFILL, CHUNK), *range(PREFILL, tokens + 1)]:
        wanted = oracle.forward(h[:last], first)
        x = inputs_of(oracle, "csa", h, first, last)
        selector.observe(state, x)
        selection = selector.select(state, x)
        outs = attend_selection(x.q, selection, selector.spaces, state.store, selector.config.scale)
        heads = selector.finish(outs, x, selection)
        torch.testing.assert_close(heads, oracle.heads[-1], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(project_out(oracle, heads), wanted, rtol=1e-5, atol=1e-5)
        for row, other in zip(selection.segments[1].ids[:, 0], oracle.selected[-1]):
            assert set(row[row >= 0].tolist()) == set(other[other >= 0].tolist())
        first = last
    assert selection.segments[1].ids.shape == (1, 1, 512) and state.store.count("cmp") == 525
