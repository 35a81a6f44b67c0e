from __future__ import annotations

import pytest
import torch
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf

from sparse_attn.rope import rotate_head_halves, rotate_tail
from tests.sparse_attn import oracle_v4


@pytest.mark.parametrize("kind", ["swa", "csa"])
@pytest.mark.parametrize("make", [oracle_v4.flash_config, oracle_v4.tiny_config])
def test_frequencies_are_the_oracle_s_to_the_bit(kind: str, make) -> None:
    config = make(kind)
    rope = hf.DeepseekV4RotaryEmbedding(config)
    wanted = rope.main_inv_freq if kind == "swa" else rope.compress_inv_freq
    assert torch.equal(oracle_v4.inv_freq(config, kind), wanted)


def test_tail_turns_as_in_the_oracle_also_far_out_and_back_again() -> None:
    config = oracle_v4.flash_config("csa")
    turns = oracle_v4.inv_freq(config, "csa")
    positions = torch.tensor([0, 1, 127, 65_535, 1_048_575])
    x = torch.randn(5, 3, 512)
    cos, sin = hf.DeepseekV4RotaryEmbedding(config)(x, position_ids=positions[None], layer_type="compress")
    wanted = hf.apply_rotary_pos_emb(x.transpose(0, 1)[None], cos, sin)[0].transpose(0, 1)
    turned = rotate_tail(x, positions, turns)
    torch.testing.assert_close(turned, wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(rotate_tail(turned, positions, turns, back=True), x, rtol=1e-5, atol=1e-6)
    assert rotate_tail(x.bfloat16(), positions, turns).dtype == torch.bfloat16


def test_halves_of_the_head_turn_by_the_same_angles_as_pairs() -> None:
    turns = torch.tensor([0.7, 0.01])
    positions, x = torch.tensor([3, 1000]), torch.randn(2, 6)
    pairs = torch.cat((x[:, 4:], x[:, [0, 2, 1, 3]]), 1)
    wanted = rotate_tail(pairs, positions, turns)
    wanted = torch.cat((wanted[:, 2:][:, [0, 2, 1, 3]], wanted[:, :2]), 1)
    torch.testing.assert_close(rotate_head_halves(x, positions, turns), wanted, rtol=1e-6, atol=1e-6)
