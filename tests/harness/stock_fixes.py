"""What stock SGLang 0.5.23 needs on a host without a GPU."""

from __future__ import annotations

import torch


def apply() -> None:
    if torch.cuda.is_available():
        return
    import sglang.srt.layers.rotary_embedding.base as rotary

    # With no platform flag set, RotaryEmbedding imports its kernel from vLLM.
    rotary._is_cpu = True
