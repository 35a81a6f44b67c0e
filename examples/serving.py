"""Start and stop an SGLang server from Python, for the demo and the tests: plain `sglang.launch_server` in a process group."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import requests

START_TIMEOUT_S = 300
# What a host without a GPU needs on any SGLang command line (float32 because the comparison is about exactness).
CPU_FLAGS = ["--device", "cpu", "--dtype", "float32", "--skip-server-warmup"]


_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    """In the child: a server must not outlive a program that was killed and could not close it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """One launch_server process. `post` and `get` speak to it; leaving the context ends it and its children."""

    def __init__(
        self,
        model: str | Path,
        *flags: str,
        env: dict[str, str] | None = None,
        launcher: Sequence[str] = (sys.executable, "-m", "sglang.launch_server", "--model-path"),
        on_wait: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._on_wait = on_wait
        log, name = tempfile.mkstemp(prefix="sglang-server-", suffix=".log")
        self._log_path = Path(name)
        command = [*launcher, str(model), "--host", "127.0.0.1", "--port", str(self.port), *CPU_FLAGS, *flags]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", **(env or {})}
        self.process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        os.close(log)

    @property
    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def wait_healthy(self) -> None:
        """Return once /health answers; raise RuntimeError with the end of the log if the server dies or takes too long."""
        started = time.monotonic()
        while (waited := time.monotonic() - started) < START_TIMEOUT_S:
            if self.process.poll() is not None:
                raise RuntimeError(
                    f"the server ended with code {self.process.returncode}:\n{self.log[-4000:]}"
                )
            try:
                if requests.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except requests.RequestException:
                pass  # not listening yet
            self._on_wait(waited)
            time.sleep(1)
        raise RuntimeError(f"the server was not healthy after {START_TIMEOUT_S} s:\n{self.log[-4000:]}")

    def post(self, path: str, payload: dict, timeout_s: float = 600) -> dict:
        reply = requests.post(self.url + path, json=payload, timeout=timeout_s)
        reply.raise_for_status()
        return reply.json()

    def get(self, path: str) -> str:
        reply = requests.get(self.url + path, timeout=30)
        reply.raise_for_status()
        return reply.text

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                pass  # the SIGKILL below
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # the whole group has ended

    def __enter__(self) -> Server:
        try:
            self.wait_healthy()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_) -> None:
        self.close()
        self._log_path.unlink(missing_ok=True)
