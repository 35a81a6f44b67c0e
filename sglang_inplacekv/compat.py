"""The one place that names the SGLang release this extension is written against."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

SGLANG_VERSION = "0.5.23"
BACKEND_NAME = "inplacekv"


def check_sglang_version() -> None:
    """Raise RuntimeError unless the installed SGLang is the pinned one: hooks are bound to its internals."""
    try:
        found = version("sglang")
    except PackageNotFoundError as exc:
        raise RuntimeError(f"SGLang is not installed: this extension needs sglang=={SGLANG_VERSION}") from exc
    if found != SGLANG_VERSION:
        raise RuntimeError(
            f"sglang=={found} is installed, this extension supports exactly sglang=={SGLANG_VERSION}"
        )
