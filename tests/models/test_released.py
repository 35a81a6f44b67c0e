"""Configurations of released models: real shapes, loadable by transformers, fewer layers on demand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from sglang_inplacekv.models import RELEASED_KINDS, write_config
from sglang_inplacekv.models.__main__ import main

# (hidden, layers, query heads, KV heads, experts, experts per token, vocabulary, KiB of bf16 KV per token)
SHAPES = {
    "qwen3_30b_a3b": (2048, 48, 32, 4, 128, 8, 151936, 96),
    "mixtral_8x7b": (4096, 32, 32, 8, 8, 2, 32000, 128),
    "deepseek_v2_lite": (2048, 27, 16, 16, 64, 6, 102400, 31104 / 1024),
}


def kv_bytes_per_token(config) -> int:
    if config.model_type == "deepseek_v2":
        latent = config.kv_lora_rank + config.qk_rope_head_dim
        return config.num_hidden_layers * latent * config.dtype.itemsize
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * config.dtype.itemsize


@pytest.mark.parametrize("kind", sorted(RELEASED_KINDS))
def test_real_shape(tmp_path: Path, kind: str) -> None:
    config = AutoConfig.from_pretrained(write_config(kind, tmp_path / kind))
    shape = (
        config.hidden_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.num_local_experts if kind == "mixtral_8x7b" else config.num_experts,
        config.num_experts_per_tok,
        config.vocab_size,
        kv_bytes_per_token(config) / 1024,
    )
    assert shape == SHAPES[kind]
    assert config.rope_parameters["rope_theta"] == (10_000 if kind == "deepseek_v2_lite" else 1_000_000)
    assert not config.tie_word_embeddings


def test_deepseek_v2_lite_as_transformers_and_sglang_read_it(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(write_config("deepseek_v2_lite", tmp_path / "m", layers=2))
    assert (config.q_lora_rank, config.kv_lora_rank, config.qk_nope_head_dim) == (None, 512, 128)
    assert (config.qk_rope_head_dim, config.v_head_dim) == (64, 128)
    assert (config.first_k_dense_replace, config.n_shared_experts) == (1, 2)
    assert (config.intermediate_size, config.moe_intermediate_size) == (10944, 1408)
    assert (config.moe_layer_freq, config.scoring_func) == (1, "softmax")  # SGLang fails without them
    rope = config.rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("yarn", 40, 4096)
    assert config.max_position_embeddings == rope["factor"] * rope["original_max_position_embeddings"]


def test_fewer_layers_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    main(["mixtral_8x7b", str(tmp_path / "m"), "--layers", "4"])
    assert capsys.readouterr().out == f"{tmp_path / 'm'}\n"
    fields = json.loads((tmp_path / "m" / "config.json").read_text())
    assert fields == RELEASED_KINDS["mixtral_8x7b"] | {"num_hidden_layers": 4}


def test_the_command_refuses_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "file").touch()
    for out, layers, line in (
        ("m", ["--layers", "0"], "has 48 layers: asked 0, possible are 1 to 48"),
        ("foreign", [], "was not made by this tool"),
        ("foreign/file/m", [], "File exists"),
    ):
        assert main(["qwen3_30b_a3b", str(tmp_path / out), *layers]) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: ") and line in err and err.count("\n") == 1


def test_refuses_what_it_cannot_make(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown released model 'gpt2'; known kinds: "):
        write_config("gpt2", tmp_path / "m")
    with pytest.raises(ValueError, match="has 48 layers: asked 49, possible are 1 to 48"):
        write_config("qwen3_30b_a3b", tmp_path / "m", layers=49)
    with pytest.raises(SystemExit):
        main(["qwen3_moe", str(tmp_path / "m"), "--layers", "2"])
