"""A CSA layer of V4-Flash's size against transformers': 64 heads of 512, hidden 4096, 64 x 128 indexer, top-512, window 128."""

from __future__ import annotations

import pytest
import torch

from sparse_attn.attend import attend_selection
from tests.sparse_attn import oracle_v4
from tests.sparse_attn.oracle_v4 import Oracle, inputs_of, project_out, selector_of

PREFILL, DECODED = 2060, 40
# Of the prefill both sides attend these queries, past the 512th entry in the end: all of them would take minutes on two cores.
ATTENDED = 160


@pytest.mark.slow
def test_prefill_and_decode_at_the_released_geometry() -> None:
    oracle = Oracle(oracle_v4.flash_config("csa"))
    tokens, first = PREFILL + DECODED, PREFILL - ATTENDED
    h = torch.randn(tokens, oracle.config.hidden_size, generator=torch.Generator().manual_seed(5))
    selector = selector_of(oracle, "csa")
    state = selector.new_state()
    fill(oracle, h[:first])
    selector.observe(state, inputs_of(oracle, "csa", h, 0, first))
    for last in range(PREFILL, tokens + 1):
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
    cached = oracle.cache.layers[0].compressed_kv
    for space, name in (("cmp", "compressor"), ("idx", "indexer")):
        torch.testing.assert_close(
            state.store.rows(space, 0, 525)[:, 0], cached[name][0], rtol=1e-5, atol=1e-5
        )
    assert selection.segments[1].ids.shape == (1, 1, 512)


@torch.no_grad()
def fill(oracle: Oracle, h: torch.Tensor) -> None:
    """Bring the oracle's cache to where it is behind a prefill of h [T, hidden], by the modules that its forward calls."""
    x = inputs_of(oracle, "csa", h, 0, len(h))
    window = x.kv["win"][None].transpose(1, 2)
    oracle.cache.update(window, window, 0)
    for first in range(0, len(h), 256):  # the indexer scores every query: small parts bound that memory
        part = slice(first, min(first + 256, len(h)))
        positions = torch.arange(part.start, part.stop)[None]
        oracle.layer.compressor(h[None, part], x.q_resid[None, part], positions, oracle.cache, 0)
