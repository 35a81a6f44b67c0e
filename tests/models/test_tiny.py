"""The tiny checkpoints load, are reproducible, and are sensitive to tokens far back."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from sglang_inplacekv.models import TINY_KINDS, long_text, make_tiny

# Where SGLang has been imported, the auto classes take DeepSeek-V4 for another model: test_deepseek_v4.py has its own.
KINDS = sorted(set(TINY_KINDS) - {"deepseek_v4"})
ARCHITECTURES = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v2_yarn": "DeepseekV2ForCausalLM",
}


def digests(folder: Path) -> dict[str, str]:
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {kind: make_tiny(kind, root / kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_loads_as_plain_checkpoint(checkpoints: dict[str, Path], kind: str) -> None:
    path = checkpoints[kind]
    model = AutoModelForCausalLM.from_pretrained(path)
    config = model.config
    assert config.architectures == [ARCHITECTURES[kind]]
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert config.max_position_embeddings == (163840 if kind == "deepseek_v2_yarn" else 32768)
    assert not config.tie_word_embeddings
    assert sum(f.stat().st_size for f in path.iterdir()) < 16e6
    if "deepseek" not in kind:
        assert (config.head_dim, config.num_key_value_heads) == (64, 2)
    if kind == "mixtral":  # SGLang's Mixtral ignores config.head_dim
        assert config.hidden_size == config.num_attention_heads * config.head_dim


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "deepseek" in kind])
def test_mla_shapes_are_told_apart(checkpoints: dict[str, Path], kind: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoints[kind])
    config = model.config
    assert config.q_lora_rank is None
    keys = (config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim, config.qk_head_dim)
    assert keys == (64, 32, 16, 48), "all differ: none is mistaken for another"
    assert config.v_head_dim == 32
    feed_forward = [type(layer.mlp).__name__ for layer in model.model.layers]
    assert feed_forward == ["DeepseekV2MLP", "DeepseekV2Moe", "DeepseekV2Moe"]
    assert (config.moe_layer_freq, config.scoring_func) == (1, "softmax")  # SGLang fails without them
    assert config.rope_parameters["rope_type"] == ("yarn" if kind.endswith("yarn") else "default")


def test_yarn_changes_the_output(checkpoints: dict[str, Path]) -> None:
    ids = torch.arange(5, 205)[None]
    with torch.no_grad():
        plain, yarn = (
            AutoModelForCausalLM.from_pretrained(checkpoints[kind])(ids).logits[0].log_softmax(-1)
            for kind in ("deepseek_v2", "deepseek_v2_yarn")
        )
    assert (plain - yarn).abs().amax(-1)[1:].min() > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_last_logits_depend_on_early_tokens(checkpoints: dict[str, Path], kind: str) -> None:
    path = checkpoints[kind]
    model = AutoModelForCausalLM.from_pretrained(path)
    ids = AutoTokenizer.from_pretrained(path)(long_text(4000), return_tensors="pt").input_ids[:, :1024]
    batch = ids.repeat(4, 1)
    for row, position in enumerate((0, 3, 100), start=1):
        batch[row, position] = (batch[row, position] + 37) % model.config.vocab_size
    with torch.no_grad():
        logits = model(batch, logits_to_keep=1).logits[:, -1]  # [requests, vocab]
    change = (logits[1:] - logits[0]).abs().amax(dim=1)
    assert change.min() > 0.1, f"largest change of a last logit, by changed position: {change.tolist()}"
    assert 0.5 < logits[0].std() < 5.0, "logits are neither flat nor saturated"


@pytest.mark.parametrize("kind", KINDS)
def test_every_expert_is_used(checkpoints: dict[str, Path], kind: str) -> None:
    path = checkpoints[kind]
    model = AutoModelForCausalLM.from_pretrained(path)
    ids = AutoTokenizer.from_pretrained(path)(long_text(1000), return_tensors="pt").input_ids[:, :256]
    with torch.no_grad():
        router_logits = model(ids, output_router_logits=True).router_logits
    dense = getattr(model.config, "first_k_dense_replace", 0)
    assert len(router_logits) == model.config.num_hidden_layers - dense
    for layer_logits in router_logits:  # [tokens, experts]
        load = torch.bincount(layer_logits.topk(2).indices.flatten(), minlength=4) / len(layer_logits)
        assert load.min() > 0.05, f"an idle expert: {load.tolist()}"


def test_tokenizer_round_trips_any_text(checkpoints: dict[str, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoints["qwen3_moe"])
    assert len(tokenizer) == AutoConfig.from_pretrained(checkpoints["qwen3_moe"]).vocab_size
    for text in (long_text(5000), " leading", "tabs\tand\r\nnewlines", "Grüße, 世界 🙂"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    chat = [{"role": "user", "content": "Hello"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.convert_tokens_to_ids("<|im_start|>") in tokenizer(rendered).input_ids
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")


def test_same_bytes_from_another_process(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": "7", "RAYON_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "sglang_inplacekv.models", "qwen3_moe", str(tmp_path / "again")]
    subprocess.run(command, check=True, env=environment, cwd=tmp_path, timeout=120)
    assert digests(tmp_path / "again") == digests(checkpoints["qwen3_moe"])


def test_made_once_and_again_only_when_the_request_differs(tmp_path: Path) -> None:
    path = make_tiny("qwen3_moe", tmp_path / "m", num_hidden_layers=1)
    weights = path / "model.safetensors"
    first = weights.stat().st_mtime_ns
    make_tiny("qwen3_moe", path, num_hidden_layers=1)
    assert weights.stat().st_mtime_ns == first
    make_tiny("qwen3_moe", path, num_hidden_layers=2)
    assert AutoConfig.from_pretrained(path).num_hidden_layers == 2
    assert [p.name for p in tmp_path.iterdir()] == ["m"], "no scratch directory is left"


def test_seeds_differ(tmp_path: Path) -> None:
    one, two = (make_tiny("mixtral", tmp_path / str(seed), seed=seed, num_hidden_layers=1) for seed in (0, 1))
    assert digests(one)["model.safetensors"] != digests(two)["model.safetensors"]


def test_refuses_what_it_cannot_make(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown tiny checkpoint 'gpt2'; known kinds: "):
        make_tiny("gpt2", tmp_path / "m")
    with pytest.raises(ValueError, match="vocab_size=100 is below the tokenizer's 512"):
        make_tiny("mixtral", tmp_path / "m", vocab_size=100)
    with pytest.raises(ValueError, match="mixtral config has no field hidden_sizes"):
        make_tiny("mixtral", tmp_path / "m", hidden_sizes=64)


def test_never_replaces_a_foreign_directory(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="was not made by this tool"):
        make_tiny("mixtral", tmp_path, num_hidden_layers=1)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
