"""DeepSeek-V4's layers against transformers'. fp32 throughout: sums of a few hundred terms of order 1 differ by some 1e-6."""

from __future__ import annotations

import pytest
import torch

from sparse_attn import LayerInputs, V4Config, V4Selector, V4Weights
from sparse_attn.attend import attend_selection
from tests.sparse_attn import oracle_v4
from tests.sparse_attn.oracle_v4 import KINDS, Oracle, inputs_of, project_out, selector_of

TOKENS = 300
CUTS = {
    "whole": [300],
    "tokens": [1] * 300,
    "prefill, then decode": [203] + [1] * 97,
    "uneven": [3, 67, 61, 1, 1, 127, 40],
    "blocks": [128, 4, 124, 44],
}


def hidden_states(tokens: int, width: int) -> torch.Tensor:
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(5))


def run(selector: V4Selector, oracle: Oracle, kind: str, h: torch.Tensor, cuts: list[int]):
    """Outputs of the heads [tokens, H, d] and, by token, the ids that were selected."""
    state, first = selector.new_state(), 0
    heads, lists = [], []
    for cut in cuts:
        x = inputs_of(oracle, kind, h, first, first + cut)
        selector.observe(state, x)
        selection = selector.select(state, x)
        outs = attend_selection(x.q, selection, selector.spaces, state.store, selector.config.scale)
        heads.append(selector.finish(outs, x, selection))
        for segment in selection.segments:
            if segment.ids is not None:
                lists += [set(row[row >= 0].tolist()) for row in segment.ids[:, 0]]
        first += cut
    return torch.cat(heads), lists


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_equals_the_oracle_wherever_the_prompt_is_cut(kind: str, cuts: list[int]) -> None:
    oracle = Oracle(oracle_v4.tiny_config(kind))
    h = hidden_states(TOKENS, oracle.config.hidden_size)
    wanted = oracle.forward(h, 0)
    heads, lists = run(selector_of(oracle, kind), oracle, kind, h, cuts)
    torch.testing.assert_close(heads, oracle.heads[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(project_out(oracle, heads), wanted, rtol=1e-5, atol=1e-5)
    if kind == "csa":
        assert lists == [set(row[row >= 0].tolist()) for row in oracle.selected[0]]


@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_entries_are_the_oracle_s(kind: str) -> None:
    oracle = Oracle(oracle_v4.tiny_config(kind))
    h = hidden_states(TOKENS, oracle.config.hidden_size)
    oracle.forward(h, 0)
    selector = selector_of(oracle, kind)
    state = selector.new_state()
    closed = selector.observe(state, inputs_of(oracle, kind, h, 0, TOKENS))
    cached = oracle.cache.layers[0].compressed_kv
    assert {item.space for item in closed} == set(selector.spaces)
    for space, name in (("cmp", "compressor"), ("idx", "indexer")):
        if space in selector.spaces:
            count = TOKENS // selector.config.ratio
            entries = state.store.rows(space, 0, count)[:, 0]
            torch.testing.assert_close(entries, cached[name][0], rtol=1e-5, atol=1e-5)
            (values,) = [item.values for item in closed if item.space == space]
            assert torch.equal(values[:, 0], entries)


@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_query_that_closes_a_block_sees_its_entry(kind: str) -> None:
    oracle = Oracle(oracle_v4.tiny_config(kind))
    selector = selector_of(oracle, kind)
    ratio = selector.config.ratio
    h = hidden_states(ratio, oracle.config.hidden_size)
    state = selector.new_state()
    x = inputs_of(oracle, kind, h, 0, ratio)
    closed = {item.space: item for item in selector.observe(state, x)}
    assert closed["cmp"].first == 0 and len(closed["cmp"].values) == 1
    segment = selector.select(state, x).segments[1]
    assert segment.limit.tolist() == [0] * (ratio - 1) + [1]
    if segment.ids is not None:
        assert segment.ids.flatten().tolist() == [-1] * (ratio - 1) + [0]


def test_refuses_tokens_out_of_order_and_of_a_wrong_shape() -> None:
    oracle = Oracle(oracle_v4.tiny_config("csa"))
    selector = selector_of(oracle, "csa")
    h = hidden_states(20, oracle.config.hidden_size)
    state = selector.new_state()
    x = inputs_of(oracle, "csa", h, 0, 8)
    with pytest.raises(ValueError, match="next token is 0, tokens from 3"):
        selector.observe(state, inputs_of(oracle, "csa", h, 3, 8))
    with pytest.raises(ValueError, match="0 observed"):
        selector.select(state, x)
    with pytest.raises(ValueError, match=r"win must be \(8, 1, 64\)"):
        selector.observe(state, LayerInputs(0, x.h, kv={"win": x.kv["win"][..., :32]}))
    with pytest.raises(ValueError, match="needs h of 8 tokens"):
        selector.observe(state, LayerInputs(0, kv=x.kv))
    assert state.tokens == 0 and not state.tails


def test_entries_are_kept_in_the_dtype_asked_for_and_computed_in_fp32() -> None:
    oracle = Oracle(oracle_v4.tiny_config("csa"))
    h = hidden_states(TOKENS, oracle.config.hidden_size)
    exact, rounded = selector_of(oracle, "csa"), selector_of(oracle, "csa", entry_dtype=torch.bfloat16)
    x = inputs_of(oracle, "csa", h, 0, TOKENS)
    states = [selector.new_state() for selector in (exact, rounded)]
    for wanted, found in zip(exact.observe(states[0], x), rounded.observe(states[1], x)):
        assert torch.equal(found.values, wanted.values.bfloat16())
    assert states[1].tails["cmp"].dtype == torch.float32
    assert rounded.spaces["cmp"].entry_bytes == 64 * 2


def test_spaces_of_the_released_geometry() -> None:
    """Window and journals stay, the entries may spill; bytes of the released fp8 formats."""
    spaces = V4Config("csa", entry_bytes=584, index_bytes=132).spaces()
    assert {name for name, space in spaces.items() if space.spill} == {"cmp"}
    assert {name for name, space in spaces.items() if not space.dv} == {"idx"}
    grown = sum(space.entry_bytes / space.stride for space in spaces.values() if space.ring is None)
    assert grown == (584 + 132) / 4
    assert spaces["cmp"].count(2**20) * 584 == 146 * 2**20
    assert [spaces["cmp"].count(tokens) for tokens in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]
    assert [V4Config("hca").spaces()["cmp"].count(tokens) for tokens in (127, 128, 255)] == [0, 1, 1]
    with pytest.raises(ValueError, match="kind must be swa, csa or hca, is 'mla'"):
        V4Config("mla")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a csa layer needs weights of its compressor and indexer"):
        V4Selector(V4Config("csa"), V4Weights(torch.zeros(64), torch.zeros(32)))
