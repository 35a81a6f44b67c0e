"""Which checkpoints are DeepSeek-V4, and what of their config SGLang is to see instead. No SGLang in here.

SGLang knows the released architecture's name and gives it KV pools, page sizes and kernels of its own. Our name is unknown to
it; the released name stays in config.json.
"""

from __future__ import annotations

import json
from typing import Any

from .geometry import STOCK_ARCHITECTURE, V4Geometry

# Neither contains a name that SGLang looks for, in whole or in part.
ARCHITECTURE = "InplaceV4ForCausalLM"
MODEL_TYPE = "inplacekv_v4"


def read_config(model_path: str, revision: str | None = None) -> dict[str, Any] | None:
    """The fields of a DeepSeek-V4 checkpoint's config.json, None if it is of another architecture or there is none."""
    from transformers import PreTrainedConfig

    try:
        fields, _ = PreTrainedConfig.get_config_dict(model_path, revision=revision)
    except (OSError, ValueError):
        return None  # SGLang will say what is wrong with it
    return fields if STOCK_ARCHITECTURE in (fields.get("architectures") or ()) else None


def override_args(fields: dict[str, Any], asked: str) -> str:
    """Value of SGLang's --json-model-override-args: the user's own, `asked`, and on top what leads to our model.

    ValueError as V4Geometry.from_config, and if `asked` is no JSON object.
    """
    own = json.loads(asked or "{}")
    if not isinstance(own, dict):
        raise ValueError(f"model override args {asked!r}, possible is a JSON object")
    geometry = V4Geometry.from_config({**fields, **own})
    return json.dumps(
        own
        | {
            "architectures": [ARCHITECTURE],
            "model_type": MODEL_TYPE,
            "v4_geometry": geometry.to_dict(),
            # Tensors are dequantised when they are loaded.
            "quantization_config": None,
        }
    )
