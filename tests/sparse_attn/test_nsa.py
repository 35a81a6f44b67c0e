"""NSA against dense attention under masks, written from the paper's definitions query by query. fp32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sparse_attn import LayerInputs
from sparse_attn.attend import attend_selection
from sparse_attn.nsa import MlpWeights, NsaConfig, NsaSelector, NsaWeights

CONFIG = NsaConfig(
    heads=8, kv_heads=2, dk=16, dv=12, block=8, stride=4, selected_block=16, selected=4, window=32
)
TOKENS, HIDDEN = 201, 24


def mlp(d: int) -> MlpWeights:
    flat = CONFIG.block * d
    return MlpWeights(
        torch.randn(CONFIG.block, d) * 0.3,
        torch.randn(40, flat) / flat**0.5,
        torch.randn(40) * 0.1,
        torch.randn(d, 40) / 40**0.5,
        torch.randn(d) * 0.1,
    )


def make(seed: int = 0) -> tuple[NsaWeights, LayerInputs]:
    torch.manual_seed(seed)
    weights = NsaWeights(mlp(CONFIG.dk), mlp(CONFIG.dv), torch.randn(24, HIDDEN) * 0.3, torch.randn(24) * 0.3)
    width = CONFIG.dk + CONFIG.dv
    kv = {name: torch.randn(TOKENS, CONFIG.kv_heads, width) for name in ("cmp", "slc", "win")}
    q = torch.randn(TOKENS, CONFIG.heads, CONFIG.dk) * 2
    return weights, LayerInputs(0, torch.randn(TOKENS, HIDDEN), q=q, kv=kv)


def part(x: LayerInputs, first: int, last: int) -> LayerInputs:
    cut = slice(first, last)
    return LayerInputs(first, x.h[cut], q=x.q[cut], kv={name: rows[cut] for name, rows in x.kv.items()})


def squeeze(weights: MlpWeights, rows: torch.Tensor) -> torch.Tensor:
    inner = F.gelu(weights.up @ (rows + weights.position).flatten() + weights.up_bias)
    return weights.down @ inner + weights.down_bias


def importance(shares: torch.Tensor, blocks: int) -> list[float]:
    """Equation 9: shares [entries], summed over the heads of a KV head."""
    c = CONFIG
    found = [0.0] * blocks
    for j in range(blocks):
        for m in range(c.selected_block // c.stride):
            for n in range(c.block // c.stride):
                entry = c.selected_block // c.stride * (j + 1) - 1 - m - n
                if 0 <= entry < len(shares):
                    found[j] += shares[entry].item()
    return found


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """q [heads, dk] over all of k [n, dk], v [n, dv] under a mask seen [n]."""
    if not seen.any():
        return torch.zeros(len(q), v.shape[1])
    scores = (q @ k.T * CONFIG.dk**-0.5).masked_fill(~seen, -torch.inf)
    return torch.softmax(scores, -1) @ v


def oracle(weights: NsaWeights, x: LayerInputs) -> tuple[torch.Tensor, list[list[set[int]]]]:
    """Outputs [tokens, heads, dv], and the selected blocks by token and KV head."""
    c = CONFIG
    count = (TOKENS - c.block) // c.stride + 1
    group = c.heads // c.kv_heads
    gates = torch.sigmoid(x.h @ weights.gate.T + weights.gate_bias).view(TOKENS, c.heads, 3)
    out, lists = torch.empty(TOKENS, c.heads, c.dv), []
    token, begins = torch.arange(TOKENS), [i * c.stride for i in range(count)]
    squeezed = []
    for g in range(c.kv_heads):
        rows = x.kv["cmp"][:, g].split([c.dk, c.dv], -1)
        squeezed.append(
            [
                torch.stack([squeeze(mlp_, part_[i : i + c.block]) for i in begins])
                for mlp_, part_ in zip((weights.key, weights.value), rows)
            ]
        )
    for t in range(TOKENS):
        lists.append([])
        for g in range(c.kv_heads):
            heads = slice(g * group, (g + 1) * group)
            branch = {name: (rows[:, g, : c.dk], rows[:, g, c.dk :]) for name, rows in x.kv.items()}
            keys, values = squeezed[g]
            closed = torch.tensor([i + c.block <= t + 1 for i in begins])
            outs = [dense(x.q[t, heads], keys, values, closed)]
            scores = (x.q[t, heads] @ keys.T * c.dk**-0.5).masked_fill(~closed, -torch.inf)
            shares = torch.softmax(scores, -1).sum(0) if closed.any() else torch.zeros(count)
            blocks = t // c.selected_block + 1
            rank = importance(shares, blocks)
            for j in range(blocks):
                if j < c.initial or j >= blocks - c.local:
                    rank[j] = float("inf")
            best = set(sorted(range(blocks), key=lambda j: (-rank[j], j))[: c.selected])
            lists[t].append(best)
            chosen = torch.tensor([int(i) // c.selected_block in best and int(i) <= t for i in token])
            outs.append(dense(x.q[t, heads], *branch["slc"], chosen))
            outs.append(dense(x.q[t, heads], *branch["win"], (token <= t) & (token > t - c.window)))
            out[t, heads] = sum(gates[t, heads, i, None] * outs[i] for i in range(3))
    return out, lists


@pytest.fixture(scope="module")
def known() -> tuple[NsaWeights, LayerInputs, torch.Tensor, list[list[set[int]]]]:
    weights, x = make()
    return weights, x, *oracle(weights, x)


@pytest.mark.parametrize("cuts", [[201], [1] * 201, [130] + [1] * 71, [3, 5, 16, 1, 90, 86]], ids=len)
def test_equals_dense_attention_under_masks_wherever_the_prompt_is_cut(known, cuts: list[int]) -> None:
    weights, x, wanted, lists = known
    selector = NsaSelector(CONFIG, weights)
    state, first = selector.new_state(), 0
    for cut in cuts:
        piece = part(x, first, first + cut)
        selector.observe(state, piece)
        selection = selector.select(state, piece)
        outs = attend_selection(piece.q, selection, selector.spaces, state.store, CONFIG.scale)
        out = selector.finish(outs, piece, selection)
        torch.testing.assert_close(out, wanted[first : first + cut], rtol=1e-5, atol=1e-5)
        for t, heads in enumerate(selection.segments[1].ids, first):
            assert [set(row[row >= 0].tolist()) for row in heads] == lists[t]
        first += cut


def test_entry_s_weights_of_the_paper_s_geometry() -> None:
    weights = make()[0]
    selector = NsaSelector(NsaConfig(), weights)
    assert selector._counts.tolist() == [1, 2, 2, 2, 1]


def test_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="block 8 must be a multiple of stride 3"):
        NsaConfig(block=8, stride=3)
    with pytest.raises(ValueError, match=r"initial 1 \+ local 2 exceed the 2 selected"):
        NsaConfig(selected=2)
