"""DeepSeek-V4's configuration, checkpoint names, quantised tensors and layers, against transformers' where it has them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers.models.deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs

from sglang_inplacekv.models import checkpoint_path, long_text, make_tiny
from sglang_inplacekv.models.deepseek_v4 import (
    ARCHITECTURE,
    MODEL_TYPE,
    V4Geometry,
    Yarn,
    experts,
    hyper,
    loading,
    names,
    override_args,
    quantised,
    read_config,
)
from tests.models.v4_checkpoints import FLASH, PRO, fp4, fp8, released_names, transformers_model

YARN = Yarn(factor=16.0, beta_fast=32.0, beta_slow=1.0, original_tokens=65536)


@pytest.fixture(scope="module")
def tiny() -> Path:
    return make_tiny("deepseek_v4", checkpoint_path("tiny-deepseek_v4"))


# Configuration


@pytest.mark.parametrize(
    ("config", "kinds", "groups"),
    [(FLASH, {0: 2, 4: 21, 128: 20}, 8), (PRO, {0: 0, 4: 30, 128: 31}, 16)],
    ids=["flash", "pro"],
)
def test_released_geometry(config: dict, kinds: dict[int, int], groups: int) -> None:
    geometry = V4Geometry.from_config(config)
    assert {ratio: len(geometry.layers_of(ratio)) for ratio in kinds} == kinds
    assert geometry.layers == config["num_hidden_layers"], "the draft block's ratio is left out"
    assert geometry.hash_layers == (True,) * 3 + (False,) * (geometry.layers - 3)
    assert (geometry.rope_dim, geometry.o_groups, geometry.yarn) == (64, groups, YARN)
    assert (geometry.rope_theta, geometry.compress_rope_theta) == (10000, 160000)
    assert V4Geometry.from_dict(json.loads(json.dumps(geometry.to_dict()))) == geometry


@pytest.mark.parametrize("config", [FLASH, PRO], ids=["flash", "pro"])
def test_geometry_from_what_transformers_saves(config: dict) -> None:
    fields = {name: value for name, value in config.items() if name != "quantization_config"}
    saved = json.loads(DeepseekV4Config(**fields).to_json_string(use_diff=False))
    assert "compress_ratios" not in saved
    assert V4Geometry.from_config(saved) == V4Geometry.from_config(config)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"scoring_func": "sigmoid"}, "scoring_func 'sigmoid', possible is 'sqrtsoftplus'"),
        ({"n_shared_experts": 2}, "n_shared_experts 2, possible is 1"),
        ({"compress_ratios": [0, 2] + [4] * 41}, "layers of 2, possible are ratios 0, 4, 128"),
        ({"compress_ratios": [4] * 9}, "9 compress ratios for num_hidden_layers 43"),
        ({"index_topk": None}, "no index_topk"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            "rope type 'linear', possible are yarn and default",
        ),
    ],
)
def test_refuses_what_is_not_computed(change: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        V4Geometry.from_config(FLASH | change)


def test_override_leads_to_our_architecture(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FLASH))
    fields = read_config(str(tmp_path))
    assert fields is not None
    given = json.loads(override_args(fields, '{"max_position_embeddings": 4096, "index_topk": 64}'))
    assert given["max_position_embeddings"] == 4096
    assert given["architectures"] == [ARCHITECTURE] and given["model_type"] == MODEL_TYPE
    assert given["quantization_config"] is None
    assert V4Geometry.from_dict(given["v4_geometry"]).index_topk == 64, "the user's own override counts"
    (tmp_path / "config.json").write_text(json.dumps(FLASH | {"architectures": ["LlamaForCausalLM"]}))
    assert read_config(str(tmp_path)) is None
    assert read_config(str(tmp_path / "nothing")) is None


def test_importing_the_package_imports_no_sglang() -> None:
    program = "import sys, sglang_inplacekv.models.deepseek_v4; print('sglang' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "False\n", done.stderr


# Checkpoints


def test_three_spellings_are_one(tiny: Path) -> None:
    with safe_open(tiny / "model.safetensors", "pt") as file:
        saved = list(file.keys())
    ours = {names.canonical(name) for name in saved}
    assert ours == {names.canonical(released_names(name)) for name in saved}
    model = transformers_model(tiny)
    own = {name for name in model.state_dict() if "inv_freq" not in name}
    stacked = {names.canonical(name) for name in own}
    unstacked = {name for name in ours if name is not None and ".experts." not in name}
    assert {name for name in stacked if name is not None and ".experts." not in name} == unstacked
    assert names.canonical("mtp.0.attn.wkv.weight") is None
    assert names.canonical("layers.2.attn.indexer.compressor.ape") == (
        "layers.2.self_attn.compressor.indexer.position_bias"
    )
    for suffix in ("scale", "weight_scale_inv"):
        assert (
            names.canonical(f"layers.2.ffn.experts.7.w2.{suffix}") == "layers.2.mlp.experts.7.down_proj.scale"
        )


@pytest.mark.parametrize("shape", [(128, 256), (200, 300)])
def test_fp8_blocks(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3
    low, scale, whole = fp8(weight)
    assert torch.equal(quantised.dequantise(low, scale), whole)
    assert torch.equal(quantised.dequantise(low, scale.float()), whole), "scales may come as floats"
    assert torch.equal(quantised.dequantise(low, scale.view(torch.uint8)), whole), "or as plain exponents"
    assert (whole - weight).abs().max() < 0.07 * weight.abs().max()
    with pytest.raises(ValueError, match=r"scales \(1, 1\) for a weight of .*, possible are"):
        quantised.dequantise(low, scale[:1, :1])


def test_fp4_columns() -> None:
    weight = torch.randn(5, 96, generator=torch.Generator().manual_seed(2))
    packed, scale, whole = fp4(weight)
    assert packed.shape == (5, 48) and scale.shape == (5, 3)
    assert torch.equal(quantised.dequantise(packed, scale), whole)
    by_hand = torch.tensor([[0x2B]], dtype=torch.uint8).repeat(1, 16)  # low nibble 11: -1.5, high nibble 2: 1
    doubled = torch.full((1, 1), 128, dtype=torch.uint8)
    assert quantised.dequantise(by_hand, doubled)[0, :2].tolist() == [-3.0, 2.0]


def test_scales_find_their_weights_in_any_order() -> None:
    low, scale, whole = fp8(torch.ones(4, 8))
    pair = [("layers.0.attn.wkv.weight", low), ("layers.0.attn.wkv.scale", scale)]
    hyper_scale = ("layers.0.hc_attn_scale", torch.ones(3))
    for order in (pair, pair[::-1]):
        found = dict(loading.plain_tensors([order[0], hyper_scale, order[1]]))
        assert torch.equal(found["layers.0.self_attn.kv_proj.weight"], whole)
        assert torch.equal(found["layers.0.attn_hc.scale"], torch.ones(3))
    with pytest.raises(ValueError, match=r"without .*layers\.0\.self_attn\.kv_proj"):
        list(loading.plain_tensors(pair[:1]))


class _Expected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Linear(2, 3, bias=False)
        self.register_buffer("inv_freq", torch.ones(1), persistent=False)


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({}, "lacks 1 tensors or parts of them: norm.weight"),
        ({"norm.weight": torch.ones(3, 2), "more": torch.ones(1)}, "has more, which the model has not"),
        ({"norm.weight": torch.ones(2, 2)}, r"norm.weight is \(2, 2\), the model's is \(3, 2\)"),
    ],
)
def test_a_checkpoint_must_fit(tensors: dict[str, torch.Tensor], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        loading.load_tensors(_Expected(), tensors.items())


# Layers


def copied(module: nn.Module, source: nn.Module, renamed: dict[str, str] | None = None) -> nn.Module:
    """`module` with the weights of transformers' `source`."""
    own = {(renamed or {}).get(name, name): value for name, value in source.state_dict().items()}
    module.load_state_dict(own)
    return module


def inputs(tiny: Path, tokens: int) -> tuple[V4Geometry, torch.Tensor]:
    fields = read_config(str(tiny))
    assert fields is not None
    generator = torch.Generator().manual_seed(3)
    return V4Geometry.from_config(fields), torch.randn(tokens, 128, generator=generator)


@pytest.mark.parametrize("layer", [0, 1], ids=["by table", "by scores"])
@torch.no_grad()
def test_feed_forward(tiny: Path, layer: int) -> None:
    geometry, x = inputs(tiny, 40)
    source = transformers_model(tiny).model.layers[layer].mlp
    ids = torch.arange(7, 47)
    ours = copied(experts.FeedForward(geometry, layer), source)(x * 12, ids)  # so large that clamps bite
    wanted = source((x * 12)[None], input_ids=ids[None])[0]
    assert (ours - wanted).abs().max() < 1e-6 * wanted.abs().max()


@torch.no_grad()
def test_hyper_connections(tiny: Path) -> None:
    geometry, x = inputs(tiny, 40 * geometry_streams(tiny))
    streams = x.view(40, geometry.hc_mult, 128)
    model = transformers_model(tiny).model
    source = model.layers[2].ffn_hc
    ours = copied(hyper.HyperConnection(geometry), source)
    own, post, comb = ours.collapse(streams)
    post_wanted, comb_wanted, wanted = source(streams[None])
    for mine, other in ((own, wanted), (post, post_wanted), (comb, comb_wanted)):
        assert (mine - other[0]).abs().max() < 1e-5
    assert (comb.sum(1) - 1).abs().max() < 1e-3 and (comb.sum(2) - 1).abs().max() < 1e-3
    mixed = ours.expand(own, streams, post, comb)
    by_hand = post[:, :, None] * own[:, None] + torch.einsum("tjk,tjd->tkd", comb, streams)
    assert (mixed - by_hand).abs().max() < 1e-5
    renamed = {f"hc_{name}": name for name in ("fn", "base", "scale")}
    head = copied(hyper.HyperHead(geometry), model.hc_head, renamed)
    assert (head(streams) - model.hc_head(streams[None])[0]).abs().max() < 1e-5


def geometry_streams(tiny: Path) -> int:
    return inputs(tiny, 0)[0].hc_mult


# The tiny checkpoint


@torch.no_grad()
def test_tiny_checkpoint_is_not_degenerate(tiny: Path) -> None:
    model = transformers_model(tiny)
    assert type(model) is theirs.DeepseekV4ForCausalLM
    for name, value in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
        spread = value.float().std() if value.numel() > 1 else (value - 1).abs().max()
        assert spread > 0.02, f"{name} is all but constant"
    table = model.model.layers[0].mlp.gate.tid2eid
    assert (table[:, 0] != table[:, 1]).all() and len(table.unique()) == 4
    assert sum(file.stat().st_size for file in tiny.iterdir()) < 8e6


@torch.no_grad()
def test_last_logits_depend_on_early_tokens(tiny: Path) -> None:
    from transformers import AutoTokenizer

    model = transformers_model(tiny)
    ids = AutoTokenizer.from_pretrained(tiny)(long_text(4000), return_tensors="pt").input_ids[:, :1024]
    batch = ids.repeat(4, 1)
    for row, position in enumerate((0, 3, 300), start=1):
        batch[row, position] = (batch[row, position] + 37) % model.config.vocab_size
    logits = model(batch, logits_to_keep=1).logits[:, -1]
    change = (logits[1:] - logits[0]).abs().amax(dim=1)
    assert change.min() > 0.01, f"largest change of a last logit, by changed position: {change.tolist()}"
    assert 0.5 < logits[0].std() < 5.0, "logits are neither flat nor saturated"
