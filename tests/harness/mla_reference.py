"""What stock SGLang's torch_native backend needs to serve an MLA model rightly. For tests: the product brings its own.

Without it the output can be wrong in silence. Nothing else is missing on a CPU: MoE, norms and sampling fall to their
native forms.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from sglang.srt.models.deepseek_common.attention_backend_handler import (
    AttentionBackendRegistry,
    _dispatch_mla_subtype,
)

BACKEND = "torch_native"


@contextmanager
def mla_reference() -> Iterator[None]:
    """Models built and run in this block by torch_native attend the latent cache in absorbed form, in every forward."""
    # A name without a handler gets Triton's: multi-head attention over K and V that are handed over, when no prefix is
    # cached. torch_native reads K and V from the pool instead, which holds latents. Where shapes happen to agree
    # (kv_lora_rank == qk_nope_head_dim), that is wrong output and no error.
    with mock.patch.dict(AttentionBackendRegistry._handlers, {BACKEND: _dispatch_mla_subtype}):
        yield
