"""Bad input at a real command line: the server ends with an error, and one line that says why is the last thing to read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.inplacekv.startup import write_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
BUDGETS = ["--inplacekv-gpu-memory", "512tok", "--inplacekv-host-memory", "16MB"]
COMMON = [
    *("--device", "cpu", "--dtype", "float32", "--load-format", "dummy", "--skip-tokenizer-init"),
    *("--skip-server-warmup", "--host", "127.0.0.1", "--attention-backend", "inplacekv"),
]
HOOK = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_token_to_kv_pool"
LAST_HOOK = "sglang.srt.server_args.ServerArgs.resolve_once"


@dataclass(frozen=True)
class Case:
    flags: list[str]
    says: str
    env: dict[str, str] = field(default_factory=dict)
    module: str = "sglang.launch_server"
    model: str = "good"


# Refused in the main process, before anything is loaded: the line is the last one and there is no traceback.
AT_THE_COMMAND_LINE = {
    "flag": Case(
        ["--inplacekv-cpu-share", "nan"],
        "error: --inplacekv-cpu-share: asked nan, possible are auto or a number from 0 to 1",
    ),
    "conflict": Case(
        ["--enable-mixed-chunk"],
        "error: --enable-mixed-chunk: asked True, possible with --attention-backend inplacekv is False",
    ),
    "gpu budget": Case(
        ["--inplacekv-gpu-memory", "1MB"],
        "error: --inplacekv-gpu-memory: asked 1000000 bytes, possible is at least [0-9]+ bytes = 40 windows .*",
    ),
    "host budget": Case(
        ["--inplacekv-host-memory", "900TB"],
        r"error: --inplacekv-host-memory: asked 8999\d+ bytes of system RAM \(not VRAM\), possible are at most .*",
    ),
    "threads": Case(
        [*BUDGETS, "--inplacekv-threads", "4097"],
        r"error: --inplacekv-threads: asked 4097, possible are 1 to \d+ on .*",
    ),
    "environment": Case(
        BUDGETS,
        "error: SGLANG_INPLACEKV_HOST_MEMROY is not a setting; possible are .*",
        env={"SGLANG_INPLACEKV_HOST_MEMROY": "1GB"},
    ),
    "model": Case(
        BUDGETS,
        "error: --attention-backend inplacekv: asked head_dim 48, possible are 64, 80, 96, 112, 128, 192, 256",
        model="head_dim 48",
    ),
    "hook": Case(
        BUDGETS,
        f"error: --attention-backend inplacekv: the hook on {re.escape(HOOK)} did not take, .*",
        env={"WITHOUT_HOOK": HOOK},
        module="tests.e2e.without_hook",
    ),
}
# Refused where the model is: SGLang says two lines more while it ends the server.
IN_THE_SCHEDULER = {
    "last hook": Case(
        [*BUDGETS, "--page-size", "16", "--max-running-requests", "2", "--chunked-prefill-size", "256"],
        f".* InplaceKV refuses to start: --attention-backend inplacekv: the hook on {LAST_HOOK} did not take, .*",
        env={"WITHOUT_HOOK": LAST_HOOK},
        module="tests.e2e.without_hook",
    ),
}
CASES = AT_THE_COMMAND_LINE | IN_THE_SCHEDULER


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Future]:
    """All cases, two at a time."""
    models = {
        "good": write_config(tmp_path_factory.mktemp("good")),
        "head_dim 48": write_config(tmp_path_factory.mktemp("head48"), head_dim=48),
    }

    def run(case: Case) -> tuple[int, str]:
        command = [
            sys.executable,
            "-m",
            case.module,
            "--model-path",
            str(models[case.model]),
            *COMMON,
            *case.flags,
        ]
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **case.env}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(command, cwd=ROOT, env=env, timeout=280, **pipes)
        return done.returncode, done.stdout

    with ThreadPoolExecutor(2) as pool:
        return {name: pool.submit(run, case) for name, case in CASES.items()}


@pytest.mark.parametrize("name", AT_THE_COMMAND_LINE)
def test_refused_at_the_command_line(ended: dict[str, Future], name: str) -> None:
    code, output = ended[name].result()
    assert code == 1, output[-3000:]
    assert "Traceback" not in output, output[-3000:]
    last = output.rstrip().splitlines()[-1]
    assert re.fullmatch(CASES[name].says, last), last


@pytest.mark.parametrize("name", IN_THE_SCHEDULER)
def test_refused_in_the_scheduler(ended: dict[str, Future], name: str) -> None:
    code, output = ended[name].result()
    assert code != 0
    assert "Traceback" not in output, output[-3000:]
    last = output.rstrip().splitlines()[-3:]
    assert re.fullmatch(CASES[name].says, last[0]), last


def test_flags_are_in_the_help() -> None:
    command = [sys.executable, "-m", "sglang_inplacekv.launch_server", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    section = done.stdout[done.stdout.index("\nInplaceKV:") :]
    for name in ("host-memory", "gpu-memory", "cpu-share", "policy", "threads", "admission"):
        assert f"--inplacekv-{name} " in section
        assert f"[SGLANG_INPLACEKV_{name.upper().replace('-', '_')}]" in " ".join(section.split())
