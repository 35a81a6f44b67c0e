"""What `inplacekv` prints, and what may end it early."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TextIO
from unittest import mock

import pytest

from sglang_inplacekv import cli
from sglang_inplacekv.models import write_config


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A command that prints a few lines."""
    model = write_config("qwen3_30b_a3b", tmp_path_factory.mktemp("model") / "qwen3")
    return ["plan", "--model", str(model), "--cpu-gbps", "84", "--link-gbps", "52"]


def test_what_the_parser_refuses_gets_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["plan"], ["plan", "--model", ".", "--gpu-memory", "-4GB"], ["grow"]):
        assert cli.main(arguments) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: ") and "--help tells what is possible" in err and err.count("\n") == 1


def test_an_interrupt_says_nothing(
    plan: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "read_model", mock.Mock(side_effect=KeyboardInterrupt))
    assert cli.main(plan) == 130
    assert capsys.readouterr() == ("", "")


@pytest.fixture
def gone() -> Iterator[TextIO]:
    """A pipe whose reader has gone."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w", encoding="utf-8") as file:
        yield file


def test_a_reader_that_has_gone_is_no_error(
    plan: list[str], gone: TextIO, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", gone)
    assert cli.main(plan) == 0
    gone.flush()
    assert capsys.readouterr().err == ""


def test_a_full_disk_behind_standard_output(
    plan: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main(plan) == 2
    line = "error: standard output cannot be written: No space left on device\n"
    assert capsys.readouterr().err == line


def test_no_standard_output(
    plan: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", None)
        assert cli.main(plan) == 0
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", None)
        assert cli.main(["plan"]) == 2
    assert capsys.readouterr() == ("", "")
