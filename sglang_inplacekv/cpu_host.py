"""What stock SGLang needs to serve on a host without a GPU and without sgl_kernel's CPU ops.

These touch nothing on a CUDA host. They hold for every attention backend, torch_native included, because the reference that
our output is compared with is stock SGLang on the same host.
"""

from __future__ import annotations

import functools

import torch


def is_cpu_host() -> bool:
    return not torch.cuda.is_available()


def apply() -> None:
    """Idempotent. To be called before a model is built."""
    from sglang.srt.layers.rotary_embedding import base, factory

    # Makes RotaryEmbedding use its native path: with no platform flag set it imports vllm's CUDA ops.
    base._is_cpu = True
    # MLA models get their rotary embedding there, and it knows yarn alone.
    if not hasattr(factory.get_rope_cpu, "__wrapped__"):
        factory.get_rope_cpu = _any_rope(factory.get_rope, factory.get_rope_cpu)


def _any_rope(get_rope, yarn_alone):
    @functools.wraps(yarn_alone)
    def get_rope_cpu(
        head_size,
        rotary_dim,
        max_position,
        base,
        is_neox_style=True,
        rope_scaling=None,
        dtype=None,
        partial_rotary_factor=1.0,
        device=None,
    ):
        shape = (head_size, rotary_dim, max_position, base, is_neox_style)
        if rope_scaling is None:
            return get_rope(*shape, None, dtype, partial_rotary_factor)
        return yarn_alone(*shape, rope_scaling, dtype, partial_rotary_factor, device)

    return get_rope_cpu


def is_applied() -> bool:
    from sglang.srt.layers.rotary_embedding import base, factory

    return base._is_cpu and hasattr(factory.get_rope_cpu, "__wrapped__")
