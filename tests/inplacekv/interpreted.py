"""Checks of Triton kernels as programs of their own: the interpreter is chosen before triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_interpreted(checks: str) -> None:
    """Run a module of this folder, whose last word is that all agrees."""
    command = [sys.executable, "-m", f"tests.inplacekv.{checks}"]
    env = os.environ | {"TRITON_INTERPRET": "1"}
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.endswith("agree\n"), done.stderr[-2000:]
