"""Some seconds of what `make fuzz` does at length."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 8


def test_random_inputs_under_sanitizers() -> None:
    tools = Path(sys.executable).parent
    cmake, ninja = (shutil.which(name, path=f"{tools}:{os.environ['PATH']}") for name in ("cmake", "ninja"))
    if cmake is None or ninja is None:
        pytest.skip("needs cmake and ninja")
    build = ROOT / "build/fuzz"
    options = ["-DCPU_ATTN_FUZZ=ON", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    for command in ([cmake, "-S", ROOT, "-B", build, "-G", "Ninja", *options], [cmake, "--build", build]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    run = subprocess.run([build / "cpu_attn_fuzz", str(SECONDS)], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "scalar" in run.stdout
