"""DeepSeek-V3.2's layers against transformers', which attends expanded and masked; ours is absorbed and listed. fp32."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from transformers import DynamicCache
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as hf
from transformers.models.deepseek_v32.configuration_deepseek_v32 import DeepseekV32Config

from sparse_attn import LayerInputs
from sparse_attn.attend import attend_selection
from sparse_attn.dsa import DsaConfig, DsaIndexerWeights, DsaSelector, DsaWeights
from sparse_attn.rope import frequencies, rotate_tail

TOKENS = 150
THETA = 10000.0


def oracle_config() -> DeepseekV32Config:
    return DeepseekV32Config(
        hidden_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=32,
        q_lora_rank=48,
        qk_rope_head_dim=16,
        qk_nope_head_dim=24,
        v_head_dim=20,
        index_topk=24,
        index_n_heads=16,
        index_head_dim=32,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        attn_implementation="eager",
    )


class Oracle:
    """One layer with random weights, run once over all tokens."""

    @torch.no_grad()
    def __init__(self) -> None:
        self.config = oracle_config()
        torch.manual_seed(0)
        self.layer = hf.DeepseekV32Attention(self.config, 0).eval()
        for parameter in self.layer.parameters():
            if parameter.dim() == 1:
                parameter.normal_(1, 0.1)
            else:
                parameter.normal_(0, 1 / math.sqrt(parameter.shape[-1]))
        self.layer.indexer.register_forward_hook(lambda _, inputs, ids: setattr(self, "selected", ids[0]))
        self.h = torch.randn(TOKENS, self.config.hidden_size)
        rope = hf.DeepseekV32RotaryEmbedding(self.config)
        positions = torch.arange(TOKENS)[None]
        mask = torch.full((TOKENS, TOKENS), -torch.inf).triu(1)[None, None]
        self.out = self.layer(
            self.h[None],
            position_embeddings=rope(self.h[None], position_ids=positions),
            attention_mask=mask,
            past_key_values=DynamicCache(config=self.config),
            position_ids=positions,
        )[0][0]

    def up(self) -> tuple[torch.Tensor, torch.Tensor]:
        """W_uk [heads, nope, rank] and W_uv [heads, v_head_dim, rank]."""
        config = self.config
        weight = self.layer.kv_b_proj.weight.detach()
        weight = weight.view(config.num_attention_heads, -1, config.kv_lora_rank)
        return weight.split([config.qk_nope_head_dim, config.v_head_dim], 1)

    def selector(self, list_owner: int | None = None) -> DsaSelector:
        config, module = self.config, self.layer.indexer
        geometry = DsaConfig(
            list_owner=list_owner,
            heads=config.num_attention_heads,
            kv_lora_rank=config.kv_lora_rank,
            rope_dim=config.qk_rope_head_dim,
            index_heads=config.index_n_heads,
            index_dim=config.index_head_dim,
            index_topk=config.index_topk,
        )
        indexer = DsaIndexerWeights(
            module.wk.weight.detach(),
            module.k_norm.weight.detach(),
            module.k_norm.bias.detach(),
            module.wq_b.weight.detach(),
            module.weights_proj.weight.detach(),
        )
        turns = frequencies(config.qk_rope_head_dim, THETA)
        return DsaSelector(geometry, DsaWeights(turns, self.up()[1], indexer if list_owner is None else None))

    @torch.no_grad()
    def inputs(self, first: int, last: int) -> LayerInputs:
        layer, config, positions = self.layer, self.config, torch.arange(first, last)
        turns = frequencies(config.qk_rope_head_dim, THETA)
        h = self.h[first:last]
        q_resid = layer.q_a_layernorm(layer.q_a_proj(h))
        q = layer.q_b_proj(q_resid).view(last - first, config.num_attention_heads, -1)
        plain, turned = q.split([config.qk_nope_head_dim, config.qk_rope_head_dim], -1)
        absorbed = torch.einsum("thd,hdc->thc", plain, self.up()[0])
        q = torch.cat((absorbed, rotate_tail(turned, positions, turns)), -1)
        latent, key = layer.kv_a_proj_with_mqa(h).split([config.kv_lora_rank, config.qk_rope_head_dim], -1)
        rows = torch.cat((layer.kv_a_layernorm(latent), rotate_tail(key, positions, turns)), -1)
        return LayerInputs(first, h, q_resid, q, {"lat": rows[:, None]})


def run(oracle: Oracle, selector: DsaSelector, cuts: list[int], lists: torch.Tensor | None = None):
    state, first, out, selected = selector.new_state(), 0, [], []
    for cut in cuts:
        x = oracle.inputs(first, first + cut)
        if lists is not None:
            x = LayerInputs(x.first, q=x.q, kv=x.kv, lists=lists[first : first + cut, None])
        selector.observe(state, x)
        selection = selector.select(state, x)
        outs = attend_selection(x.q, selection, selector.spaces, state.store, oracle.layer.scaling)
        out.append(F.linear(selector.finish(outs, x, selection).flatten(1), oracle.layer.o_proj.weight))
        selected += [set(row[row >= 0].tolist()) for row in selection.segments[0].ids[:, 0]]
        first += cut
    return torch.cat(out), selected


@pytest.mark.parametrize("cuts", [[150], [1] * 150, [90] + [1] * 60, [23, 24, 2, 77, 24]], ids=len)
def test_equals_the_oracle_wherever_the_prompt_is_cut(cuts: list[int]) -> None:
    oracle = Oracle()
    out, selected = run(oracle, oracle.selector(), cuts)
    torch.testing.assert_close(out, oracle.out, rtol=1e-5, atol=1e-5)
    # Where a query sees less than k tokens, the oracle fills up with later ones, which its mask hides.
    assert selected == [{i for i in row.tolist() if i <= t} for t, row in enumerate(oracle.selected)]


def test_lists_of_another_layer_are_attended_without_later_tokens() -> None:
    oracle = Oracle()
    selector = oracle.selector(list_owner=7)
    assert set(selector.spaces) == {"lat"}
    assert any((row > t).any() for t, row in enumerate(oracle.selected))
    out, _ = run(oracle, selector, [100] + [1] * 50, oracle.selected)
    torch.testing.assert_close(out, oracle.out, rtol=1e-5, atol=1e-5)
    state, x = selector.new_state(), oracle.inputs(0, 5)
    selector.observe(state, x)
    with pytest.raises(ValueError, match="lists of layer 7"):
        selector.select(state, x)
