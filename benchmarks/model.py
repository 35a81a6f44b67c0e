"""The models measured, in their real shapes, with drawn weights: Qwen3-30B-A3B, but where a server says otherwise."""

from __future__ import annotations

import json
from pathlib import Path

from sglang_inplacekv.models import RELEASED_KINDS, write_config

KIND = "qwen3_30b_a3b"
LAYERS = 48
Q_HEADS, KV_HEADS, HEAD_DIM = 32, 4, 128
TOKEN_BYTES = 2 * KV_HEADS * HEAD_DIM * 2 * LAYERS  # bf16 K and V of all layers
CONTEXT_TOKENS = 131072
PAGE_TOKENS = 256  # on our side


def model_folder(out: Path, layers: int | None, kind: str = KIND) -> Path:
    """Write a released model's config.json under `out`, with CONTEXT_TOKENS positions at least, and return its folder.

    layers: at most so many; None means all that it has.
    """
    if layers is not None:
        layers = min(layers, RELEASED_KINDS[kind]["num_hidden_layers"])
    folder = write_config(kind, out / f"{kind}-{layers or 'whole'}", layers=layers)
    config = folder / "config.json"
    fields = json.loads(config.read_text(encoding="utf-8"))
    fields["max_position_embeddings"] = max(CONTEXT_TOKENS, fields["max_position_embeddings"])
    config.write_text(json.dumps(fields, indent=2), encoding="utf-8")
    return folder
