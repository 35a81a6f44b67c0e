"""What `inplacekv plan` makes of a config.json: figures where a server would serve the model, else one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_inplacekv import cli
from sglang_inplacekv.planning import read_model
from sglang_inplacekv.v4.planning import read_layout
from tests.models.v4_checkpoints import FLASH

GQA = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
BF16 = GQA | {"dtype": "bfloat16"}
MLA = GQA | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
LATENT = "a lora_rank that is a multiple of 32 up to 512 + a multiple of 16 up to 128"
WHOLE, REAL = "a whole number from 1 to 1000000", "a number from 0 to 1000000000"
FP8_KV = {"type": "float", "num_bits": 8}
STATIC = {"strategy": "tensor", "symmetric": True, "dynamic": False}
# As transformers saves one.
NESTED = {"main": {"rope_theta": 10000.0}, "compress": {"rope_theta": 160000.0, "rope_type": "default"}}


RATES = ["--cpu-gbps", "84", "--link-gbps", "52"]


def write(folder: Path, config: object) -> Path:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def refusal(folder: Path, config: object, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of bounded length that is all it prints, without what all of them begin with."""
    assert cli.main(["plan", "--model", str(write(folder, config)), *RATES]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and len(err) < 300
    return err.removesuffix("\n").removeprefix("error: --model: ").removeprefix("its config.json has ")


@pytest.mark.parametrize(
    "value", ["x", "4", [1], {}, {"a": 1}, -1, 0, 1.5, float("nan"), True, 10**30], ids=repr
)
@pytest.mark.parametrize(
    "name",
    ["num_hidden_layers", "head_dim", "index_head_dim", "sliding_window", "index_topk", "qk_rope_head_dim"],
)
def test_whole_numbers_of_deepseek_v4(
    name: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(tmp_path, FLASH | {name: value}, capsys)
    assert line == f"{name} {value!r}, possible is {WHOLE}"


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"hc_eps": "x"}, f"hc_eps 'x', possible is {REAL}"),
        ({"rope_theta": [1]}, f"rope_theta [1], possible is {REAL}"),
        ({"compress_rope_theta": float("inf")}, f"compress_rope_theta inf, possible is {REAL}"),
        ({"num_hash_layers": "3"}, "num_hash_layers '3', possible is a whole number from 0 to 1000000"),
        (
            {"qk_rope_head_dim": None, "partial_rotary_factor": "x"},
            "partial_rotary_factor 'x', possible is a number from 0 to 1",
        ),
        ({"rope_scaling": FLASH["rope_scaling"] | {"factor": "x"}}, f"factor 'x', possible is {REAL}"),
        ({"rope_parameters": [1]}, "rope_parameters [1], possible is an object"),
        ({"rope_parameters": NESTED | {"main": 5}}, "main 5, possible is an object"),
        ({"rope_parameters": NESTED | {"main": {}}}, f"rope_theta None, possible is {REAL}"),
        *[
            ({"compress_rates": value, "layer_types": []}, f"compress_rates {value!r}, possible is an object")
            for value in ([1], "x", 5, True)
        ],
        *[
            ({name: value}, f"{name} {value!r}, possible is a list of names or whole numbers")
            for name in ("layer_types", "compress_ratios", "mlp_layer_types")
            for value in (5, "x", {"a": 1}, [[4]])
        ],
        ({"compress_ratios": ["4"] * 43}, "a layer ratio in quotes, possible is a number"),
        ({"compress_ratios": [0] * 43}, "no CSA layer, of ratio 4, possible is one or more"),
        ({"compress_ratios": [0, 128] * 22}, "no CSA layer, of ratio 4, possible is one or more"),
        ({"num_hidden_layers": 1}, "no CSA layer, of ratio 4, possible is one or more"),
        ({"head_dim": 100}, f"head_dim 100, possible is {LATENT}"),
        (
            {"layer_types": ["a\nb"] * 43},
            "layers of a b, possible are ratios 0, 4, 128",
        ),
    ],
    ids=str,
)
def test_a_deepseek_v4_that_does_not_tell_or_is_not_served(
    fields: dict, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(tmp_path, FLASH | fields, capsys) == line


def test_a_long_message_keeps_what_is_possible(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(tmp_path, FLASH | {"scoring_func": "x" * 5000}, capsys)
    assert line.startswith("scoring_func 'xxx") and line.endswith("xxx', possible is 'sqrtsoftplus'")


@pytest.mark.parametrize(
    ("fields", "layers", "kept"),
    [
        ({"compress_ratios": [4] * 43}, (43, 0), 43 * 32 * 2),
        ({"compress_ratios": [0, *[4] * 42]}, (42, 0), 42 * 32 * 2),
        ({"compress_ratios": [4, *[128] * 42]}, (1, 42), (32 + 42 * 4) * 2),
        ({"rope_parameters": NESTED, "num_hidden_layers": 3}, (1, 0), 32 * 2),
    ],
    ids=str,
)
def test_a_deepseek_v4_needs_csa_layers_alone(
    fields: dict, layers: tuple[int, int], kept: int, tmp_path: Path
) -> None:
    """kept: bytes a token, 128 wide index keys of an entry in 4 tokens and 512 wide HCA entries, one in 128."""
    found = read_layout(write(tmp_path, FLASH | fields), 256)
    assert found is not None
    assert (len(found.csa_layers), len(found.hca_layers)) == layers
    assert found.shape.page_bytes == 256 * layers[0] * 256 and found.kept_page_bytes == 256 * kept
    assert cli.main(["plan", "--model", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (GQA | {"full_attention_interval": 4}, "full_attention_interval 4, possible is none"),
        (GQA | {"attention_chunk_size": 8192}, "attention_chunk_size 8192, possible is none"),
        (
            GQA | {"hybrid_override_pattern": "M-M*" * 99},
            f"hybrid_override_pattern '{'M-M*' * 9}M-M, possible is none",
        ),
        (MLA | {"linear_attn_config": {}, "index_topk": 2048}, "index_topk 2048, possible is none"),
        (MLA | {"linear_attn_config": {"a": 1}}, "linear_attn_config {'a': 1}, possible is none"),
        (
            {"text_config": GQA | {"cross_attention_layers": [3, 8]}},
            "cross_attention_layers [3, 8], possible is none",
        ),
        (GQA | {"attn_logit_softcapping": "a\nb"}, r"attn_logit_softcapping 'a\nb', possible is none"),
        (GQA | {"layer_types": ["a\nb"]}, r"layers of 'a\nb', possible is full attention in every layer"),
        (
            GQA | {"layer_types": ["full_attention", *(f"{i}" * 5000 for i in range(9))]},
            f"layers of '{'0' * 39}, possible is full attention in every layer",
        ),
        (GQA | {"layer_types": {"a": 1}}, "layer_types {'a': 1}, possible is a list"),
        *[
            (config, "KV of FP8 in its quantization_config, possible is KV of the model's dtype")
            for config in (
                GQA
                | {
                    "quantization_config": {
                        "quant_method": "compressed-tensors",
                        "kv_cache_scheme": FP8_KV | STATIC,
                    }
                },
                GQA | {"quantization_config": {"quant_algo": "NVFP4", "kv_cache_scheme": FP8_KV}},
                GQA | {"compression_config": {"quant_algo": "FP8", "kv_cache_quant_algo": "fp8"}},
                {
                    "text_config": GQA
                    | {"quantization_config": {"quantization": {"kv_cache_quant_algo": "FP8"}}}
                },
            )
        ],
    ],
    ids=lambda value: str(value)[:80],
)
def test_a_model_that_is_not_served(
    config: dict, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(tmp_path, config, capsys) == line


@pytest.mark.parametrize(
    "fields",
    [
        dict.fromkeys(("full_attention_interval", "attention_chunk_size", "index_topk", "layer_types")),
        {"layer_types": ["full_attention"] * 2, "quantization_config": {"quant_method": "fp8"}},
        {"quantization_config": {"quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"}},
        # SGLang reads neither.
        {"kv_cache_scheme": FP8_KV | STATIC},
        {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "kv_cache_scheme": FP8_KV | STATIC | {"dynamic": True},
            }
        },
    ],
    ids=lambda value: str(value)[:80],
)
def test_a_model_that_is_served(fields: dict, tmp_path: Path) -> None:
    assert read_model(write(tmp_path, GQA | fields), 256).shape.token_bytes == 2048


@pytest.mark.parametrize(
    ("outer", "inner", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, {}, torch.bfloat16),
        ({"torch_dtype": "bfloat16"}, {"torch_dtype": None}, torch.bfloat16),
        ({"torch_dtype": "bfloat16"}, {"torch_dtype": "float16"}, torch.float16),
        ({"dtype": "float16", "torch_dtype": "bfloat16"}, {}, torch.float16),
    ],
)
def test_a_text_model_takes_its_parents_dtype(
    outer: dict, inner: dict, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = write(tmp_path, outer | {"text_config": GQA | inner})
    assert read_model(folder, 256).shape.dtype == dtype


@pytest.mark.parametrize(
    ("config", "words"),
    [(None, "null"), (5, "a number"), ("x", "a string"), (True, "a truth value"), ([], "a list")],
)
def test_a_config_that_is_no_object(
    config: object, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(tmp_path, config, capsys).endswith(f"config.json holds {words}, possible is an object")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{", "cannot be read as JSON: JSONDecodeError"),
        ("\xff", "cannot be read as JSON"),
        ("[]", "holds a list, possible is an object"),
        (BF16 | {"num_attention_heads": None}, "has num_attention_heads None"),
        (BF16 | {"num_attention_heads": "4"}, "has num_attention_heads '4', possible is a whole number"),
        (BF16 | {"attn_logit_softcapping": 50.0}, "has attn_logit_softcapping 50.0, possible is none"),
        (BF16 | {"num_hidden_layers": 0}, "has num_hidden_layers 0"),
        (BF16 | {"head_dim": True}, "has head_dim True"),
        (BF16 | {"head_dim": -128}, "has head_dim -128"),
        (BF16 | {"head_dim": 72}, "has head_dim 72, possible is 64, 80"),
        (BF16 | {"num_key_value_heads": 0}, "has num_key_value_heads 0"),
        (BF16 | {"num_key_value_heads": 3}, "has 4 query heads on 3 KV heads"),
        (BF16 | {"kv_lora_rank": 512}, "has qk_rope_head_dim None"),
        (BF16 | {"kv_lora_rank": 100, "qk_rope_head_dim": 10}, "has latent rows of 100 + 10"),
        (
            BF16 | {"layer_types": ["full_attention", "sliding_attention"]},
            "has layers of 'sliding_attention'",
        ),
        (BF16 | {"sliding_window": 4096}, "has a sliding window"),
    ],
)
def test_a_config_that_does_not_tell_or_is_not_served(
    text: str | dict, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = text if isinstance(text, str) else json.dumps(text)
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    assert cli.main(["plan", "--model", str(tmp_path), *RATES]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: --model: ") and line in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("fields", "kib"),
    [
        ({}, 2),
        ({"dtype": "float32"}, 2),  # SGLang serves it in fp16
        ({"head_dim": None, "hidden_size": 1024}, 4),
        ({"num_key_value_heads": None}, 4),
        ({"sliding_window": 4096, "use_sliding_window": False}, 2),
        ({"text_config": BF16 | {"num_hidden_layers": 4}}, 4),
    ],
)
def test_configs_that_tell(fields: dict, kib: float, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BF16 | fields))
    assert read_model(tmp_path, 256).shape.token_bytes == kib * 1024
