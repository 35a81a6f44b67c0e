"""The examples that bring their own processes. The frontend program and the script run in test_server.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ENGINE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_INPLACEKV_JITTER_SEED": "3",
    "SGLANG_INPLACEKV_POISON": "1",
}


@pytest.mark.slow
def test_offline_engine() -> None:
    """Checks for itself that repeated, batched and streamed answers are equal, and that the prefix cache was hit."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "offline_engine.py")],
        env={**os.environ, **ENGINE_ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^== \d+ tokens fit, 512tok of them in the GPU budget$", done.stdout, re.MULTILINE)
    assert re.search(r"^== a long prompt: 1\d{3} prompt tokens, 0 from", done.stdout, re.MULTILINE)
    assert re.search(r"^== done in \d+ s$", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_offline_engine_fails_aloud() -> None:
    """Engine has no command line: the refusal is the exception's text."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "offline_engine.py")],
        env={**os.environ, **ENGINE_ENVIRONMENT, "SGLANG_INPLACEKV_CPU_SHARE": "2"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 1
    last = done.stderr.rstrip().splitlines()[-1]
    assert last.endswith(
        "ConfigError: --inplacekv-cpu-share: asked 2.0, possible are auto or a number from 0 to 1"
    )


def serve(*arguments: str, **env: str) -> subprocess.CompletedProcess:
    """What examples/serve.sh would run: its interpreter is `echo`."""
    command = ["bash", str(EXAMPLES / "serve.sh"), *arguments]
    return subprocess.run(
        command, env={**os.environ, "PYTHON": "echo", **env}, capture_output=True, text=True, timeout=60
    )


def test_serve_passes_the_model_and_the_users_flags_last() -> None:
    done = serve("some/model", "--page-size", "16", HOST_MEMORY="96GB", GPU_MEMORY="4GB", PORT="31234")
    assert done.returncode == 0, done.stderr
    command = done.stdout.strip()
    assert command.startswith(
        "-m sglang.launch_server --model-path some/model --attention-backend inplacekv "
    )
    assert command.endswith(" --page-size 16")
    for given in ("--inplacekv-host-memory 96GB", "--inplacekv-gpu-memory 4GB", "--port 31234"):
        assert f" {given} " in command


def test_serve_without_a_model_explains_itself() -> None:
    done = serve()
    assert done.returncode == 2
    assert done.stdout.startswith("Serve a model") and "examples/serve.sh MODEL" in done.stdout
