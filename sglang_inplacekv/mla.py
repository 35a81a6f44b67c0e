"""How SGLang's DeepSeek models call attention under our backend."""

from __future__ import annotations

from sglang.srt.models.deepseek_common.attention_backend_handler import (
    AttentionBackendRegistry,
    _dispatch_mla_subtype,
)

from sglang_inplacekv.compat import BACKEND_NAME


def register() -> None:
    """Attention over latent rows, of a prefill as well.

    Without a handler of its own, an unknown backend's prefix-free prefills take the expanded form and write no latent rows
    through it. On a GPU a prefill is cheaper over the keys and values that the rows expand to, chunk by chunk; SGLang does
    that with Triton kernels, which a host without a GPU cannot run.
    """
    AttentionBackendRegistry.register(BACKEND_NAME, _dispatch_mla_subtype)
