"""Entry point of group `sglang.srt.plugins`: runs in every SGLang process.

Inert unless our backend is selected, with one exception: on a host without a GPU `cpu_host` lets SGLang run at all.
"""

from __future__ import annotations

from sglang_inplacekv import compat, cpu_host


def register() -> None:
    """Register backend, flags and hooks. SGLang swallows what this raises; `hooks.verify` finds what is missing."""
    compat.check_sglang_version()
    from sglang.srt.arg_groups.choices import add_chunked_prefix_cache_attention_backend
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices

    from sglang_inplacekv import hooks

    hooks.register()
    if cpu_host.is_cpu_host():
        cpu_host.apply()
    if compat.BACKEND_NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([compat.BACKEND_NAME])
        # Else SGLang turns the chunk-by-chunk prefill of MLA off.
        add_chunked_prefix_cache_attention_backend(compat.BACKEND_NAME)

    @register_attention_backend(compat.BACKEND_NAME)
    def create(runner):
        from sglang_inplacekv.build import build_backend

        return build_backend(runner)
