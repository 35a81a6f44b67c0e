"""Some seconds of what `make fuzz` and `make fuzz-arm` do at length."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 8
ARM_CXX = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64"


def built(folder: str, *options: str) -> Path:
    """Return the program as configured with `options`, from the build that `make` would go on with."""
    tools = Path(sys.executable).parent
    cmake, ninja = (shutil.which(name, path=f"{tools}:{os.environ['PATH']}") for name in ("cmake", "ninja"))
    if cmake is None or ninja is None:
        pytest.skip("needs cmake and ninja")
    build = ROOT / "build" / folder
    options = ("-DCPU_ATTN_FUZZ=ON", f"-DCMAKE_MAKE_PROGRAM={ninja}", *options)
    for command in ([cmake, "-S", ROOT, "-B", build, "-G", "Ninja", *options], [cmake, "--build", build]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return build / "cpu_attn_fuzz"


def test_random_inputs_under_sanitizers() -> None:
    run = subprocess.run([built("fuzz"), str(SECONDS)], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "scalar" in run.stdout


@pytest.mark.skipif(platform.machine() == "aarch64", reason="the test above runs NEON as it is")
def test_random_inputs_through_neon_in_an_emulator() -> None:
    if shutil.which(ARM_CXX) is None:
        pytest.skip(f"needs {ARM_CXX} to compile for AArch64")
    program = built(
        "fuzz-arm",
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        f"-DCMAKE_CXX_COMPILER={ARM_CXX}",
    )
    if shutil.which(EMULATOR) is None:
        pytest.skip(f"compiled for AArch64, but not run: needs {EMULATOR}")
    # The leak checker traces its own process, which the emulator does not let it.
    run = subprocess.run(
        [EMULATOR, "-L", "/usr/aarch64-linux-gnu", program, str(SECONDS)],
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "scalar neon" in run.stdout
