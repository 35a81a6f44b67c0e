"""The examples that bring their own processes. The frontend program and the script run in test_server.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples.sparse_attention.sides import Record
from sparse_attn.compose import Placement

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


@pytest.mark.slow
def test_sparse_attention_demo(tmp_path: Path) -> None:
    """Checks for itself what is exact; here, that what it prints adds up."""
    tokens, steps, topk, policies, csa_layers = 1500, 12, 24, 4, (1, 3)
    picture = tmp_path / "picture.svg"
    command = [sys.executable, str(EXAMPLES / "sparse_attention_demo.py"), "--out", str(picture)]
    command += ["--tokens", str(tokens), "--steps", str(steps)]
    done = subprocess.run(
        command, env={**os.environ, **ENGINE_ENVIRONMENT}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) <= 30
    rows = [[cell.split() for cell in line.split("|")] for line in done.stdout.splitlines() if "|" in line]

    sides = [row for row in rows if row[0][-1] in ("swa", "csa", "hca")]
    assert [int(row[0][0]) for row in sides] == [0, 1, 2, 3]
    for (_, kind), (selected, *parts), _, (error,) in sides:
        assert sum(map(float, parts)) == pytest.approx(float(selected), abs=0.21)  # of tenths
        assert all((float(part) > 0) == (kind == "csa") for part in parts[1:])
        assert float(error) <= 1e-5
    attended = re.search(r"([\d,]+) entries selected .* each attended by one side, once", done.stdout)
    assert attended and int(attended[1].replace(",", "")) == len(csa_layers) * policies * steps * topk

    moved = {tuple(row[0]): row[1:] for row in rows if len(row[0]) == 2 and len(row) == 6}
    moved = {(int(layer), name): row for (layer, name), row in moved.items() if layer.isdigit()}
    assert set(moved) == {
        (layer, name) for layer in csa_layers for name in ("compute", "fetch", "split", "fewest_bytes")
    }
    full_kib = sum((tokens + step) // 4 for step in range(1, steps + 1)) * 64 * 4 / steps / 1024
    for (_, name), (parts, (total, full), _, _, (error,)) in moved.items():
        query, answer, fetched, homed = map(float, parts)
        assert query + answer + fetched + homed == pytest.approx(float(total), abs=0.03)
        assert (name == "fetch") == (query == 0) and (name == "compute") == (fetched == 0)
        assert float(full) == pytest.approx(full_kib, abs=0.006)
        assert 0 < float(total) < float(full) and float(error) <= 1e-5

    difference = re.search(r"largest difference of a logit (\S+) \(limit 0.0001", done.stdout)
    assert difference and float(difference[1]) <= 1e-4
    assert f"{steps} of {steps} tokens are transformers' greedy ones" in " ".join(done.stdout.split())
    drawn = picture.read_text(encoding="utf-8")
    assert drawn.count("decode step") == len(csa_layers) and "fewest_bytes" in drawn


def test_sparse_attention_demo_sees_an_entry_attended_twice() -> None:
    ids, nowhere = torch.tensor([[[5, 7, -1]]]), torch.full((1, 1, 3), -1)
    hot, cpu = torch.tensor([[[0, -1, -1]]]), torch.tensor([[[-1, 7, -1]]])
    record = Record()
    record.note("cmp", ids, Placement(hot, nowhere, cpu, torch.empty(0, dtype=torch.int64), 2, 1))
    assert (record.listed, record.count("hot"), record.count("fetched"), record.count("cpu")) == (2, 1, 0, 1)
    for wrong in (cpu.where(ids != 5, 5), nowhere):
        with pytest.raises(RuntimeError, match="cmp: 2 entries listed, [13] attended"):
            record.note("cmp", ids, Placement(hot, nowhere, wrong, torch.empty(0, dtype=torch.int64), 2, 1))


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
