"""Where prepared checkpoints live, and how one appears there in a single step."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DONE_MARKER = ".inplacekv-done"


def models_dir() -> Path:
    """Return the cache directory: ``$INPLACEKV_MODELS``, else ``.models`` in the checkout or working directory."""
    if chosen := os.environ.get("INPLACEKV_MODELS"):
        return Path(chosen).expanduser().resolve()
    checkout = Path(__file__).resolve().parent.parent
    return (checkout if (checkout / "pyproject.toml").is_file() else Path.cwd()) / ".models"


def checkpoint_path(name: str) -> Path:
    """Return where the checkpoint ``name`` is cached by default; it need not exist yet."""
    return models_dir() / name


def is_prepared(out_dir: Path, recipe: str) -> bool:
    """Tell whether ``out_dir`` holds a complete checkpoint made by exactly this ``recipe``."""
    marker = out_dir / DONE_MARKER
    return marker.is_file() and marker.read_text(encoding="utf-8") == recipe


@contextmanager
def staged(out_dir: Path, recipe: str) -> Iterator[Path]:
    """Yield a scratch directory that replaces ``out_dir`` once the block ends without an exception.

    Readers see the old checkpoint, none, or the whole new one; an interrupted run leaves ``out_dir`` as it was. Two
    processes may make the same checkpoint at once. A directory that holds anything but a checkpoint of ours is never
    replaced.
    """
    ours = (out_dir / DONE_MARKER).is_file()
    if out_dir.exists() and not ours and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise FileExistsError(f"{out_dir} exists and was not made by this tool: choose another directory")
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}-", dir=out_dir.parent))
    try:
        yield scratch
        (scratch / DONE_MARKER).write_text(recipe, encoding="utf-8")
        scratch.chmod(0o755)
        retired = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}-old-", dir=out_dir.parent))
        try:
            if out_dir.exists():
                out_dir.rename(retired / out_dir.name)
            try:
                scratch.rename(out_dir)
            except OSError:
                # Another process may have been faster with the same checkpoint.
                if not is_prepared(out_dir, recipe):
                    raise
        finally:
            shutil.rmtree(retired, ignore_errors=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
