"""The team's rounds under the thread sanitizer."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = (ROOT / "cpu_attn/src/workers.cpp", Path(__file__).with_name("workers_rounds.cpp"))


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_rounds(sanitizer: str, tmp_path: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path / "rounds"
    flags = [
        "-std=c++17",
        "-O1",
        "-g",
        "-pthread",
        f"-fsanitize={sanitizer}",
        f"-I{ROOT / 'cpu_attn/include'}",
    ]
    built = subprocess.run(
        [compiler, *flags, *map(str, SOURCES), "-o", str(program)], capture_output=True, text=True
    )
    if built.returncode and "san" in built.stderr and "cannot find" in built.stderr:
        pytest.skip(f"{compiler} comes without the {sanitizer} sanitizer")
    assert built.returncode == 0, built.stderr
    run = subprocess.run([str(program)], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
