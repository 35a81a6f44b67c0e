"""Parts of sparse_attention_demo.py."""

try:
    import transformers.models.deepseek_v4  # noqa: F401
except ImportError as missing:
    raise SystemExit(
        f"error: the tiny checkpoint and its oracle are transformers' DeepSeek-V4, which is not installed ({missing}); "
        "`make setup` installs it"
    ) from None
