"""What stock SGLang needs to serve on a host without a GPU and without sgl_kernel's CPU ops.

These touch nothing on a CUDA host. They hold for every attention backend, torch_native included, because the reference that
our output is compared with is stock SGLang on the same host.
"""

from __future__ import annotations

import torch


def is_cpu_host() -> bool:
    return not torch.cuda.is_available()


def apply() -> None:
    """Make RotaryEmbedding use its native path: with no platform flag set it imports vllm's CUDA ops."""
    from sglang.srt.layers.rotary_embedding import base

    base._is_cpu = True


def is_applied() -> bool:
    from sglang.srt.layers.rotary_embedding import base

    return base._is_cpu
