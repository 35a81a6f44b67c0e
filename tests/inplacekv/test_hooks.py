"""Hooks into SGLang: all of them are live, or the server does not start."""

from __future__ import annotations

import functools
import json
import pkgutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from sglang.srt.plugins import load_plugins

from sglang_inplacekv import compat, hooks, launch_server
from sglang_inplacekv.config import ConfigError
from tests.inplacekv.startup import resolve, restored_environment, write_config

ROOT = Path(__file__).resolve().parents[2]
TARGETS = [hook.target for hook in hooks.HOOKS]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def starts(model: Path) -> dict[tuple[str, str], str]:
    """(what was done to the plugin, to which hook) -> what the start said."""
    command = [sys.executable, "-m", "tests.inplacekv.deleted_hook", str(model)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    return {(change, subject): said for change, subject, said in lines}


def refusal(target: str) -> str:
    return (
        f"--attention-backend inplacekv: the hook on {target} did not take, so SGLang would run without it; "
        "see the plugin errors above in the log"
    )


def test_starts_with_all_hooks(starts) -> None:
    assert starts["load_only", "inplacekv"] == "started with InplaceMHAPool"


@pytest.mark.parametrize("target", TARGETS)
def test_does_not_start_without_this_hook(starts, target: str) -> None:
    assert starts["delete", target] == f"ConfigError: {refusal(target)}"


def test_does_not_start_when_a_target_is_gone(starts) -> None:
    assert starts["misspell", TARGETS[0]] == f"ConfigError: {refusal(TARGETS[0])}"


@pytest.mark.parametrize(("change", "subject"), [("pretend_version", "0.5.22"), ("load_only", "another")])
def test_is_never_silently_stock(starts, change: str, subject: str) -> None:
    assert starts[change, subject] == "ValueError: Invalid attention backend: inplacekv"


def test_declared_and_verified_hooks_are_the_same() -> None:
    assert {hook.function.__name__: hook.target for hook in hooks.HOOKS} == hooks._EXPECTED
    assert len(set(TARGETS)) == len(TARGETS)
    assert all(len(hook.why) > 20 for hook in hooks.HOOKS)


def replaced(monkeypatch: pytest.MonkeyPatch, target: str, wrapper) -> None:
    owner, name = target.rsplit(".", 1)
    monkeypatch.setattr(pkgutil.resolve_name(owner), name, wrapper)


def test_hook_that_another_plugin_overwrote_is_missed(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    load_plugins()
    hooks.verify()
    target = "sglang.srt.utils.common.support_triton"
    replaced(monkeypatch, target, lambda backend: True)
    with pytest.raises(ConfigError, match=f"the hook on {target} did not take"):
        hooks.verify()
    with restored_environment(), pytest.raises(ConfigError, match=f"the hook on {target} did not take"):
        resolve(model)


def test_hook_under_the_wrapper_of_another_plugin_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    load_plugins()
    target = "sglang.srt.models.utils.enable_fused_set_kv_buffer"
    ours = pkgutil.resolve_name(target)

    @functools.wraps(ours)
    def theirs(*args):
        return ours(*args)

    replaced(monkeypatch, target, theirs)
    hooks.verify()


def test_other_backends_pass_through() -> None:
    assert hooks._support_triton(lambda backend: ("original", backend), "triton") == ("original", "triton")


@pytest.mark.parametrize("found", ["0.5.22", "0.5.23.post1", "0.6.0"])
def test_another_sglang_version_is_named(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(compat, "version", lambda name: found)
    message = f"sglang=={found} is installed, this extension supports exactly sglang==0.5.23"
    with pytest.raises(RuntimeError, match=f"^{message}$"):
        compat.check_sglang_version()
    with pytest.raises(SystemExit) as ended:
        launch_server.main()
    assert ended.value.code == f"error: {message}"


def test_no_sglang_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(compat, "version", missing)
    with pytest.raises(RuntimeError, match="not installed: this extension needs sglang==0.5.23"):
        compat.check_sglang_version()


def test_launcher_refuses_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    load_plugins()
    target = "sglang.srt.utils.common.support_triton"
    replaced(monkeypatch, target, lambda backend: True)
    with pytest.raises(SystemExit) as ended:
        launch_server.main()
    assert ended.value.code == f"error: {refusal(target)}"
