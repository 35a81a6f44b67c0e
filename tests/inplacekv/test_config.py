"""Flags and environment: what is understood, and that everything else is refused by name."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_inplacekv.config import (
    ADMISSIONS,
    ENV_PREFIX,
    FLAGS,
    TEST_KNOBS,
    ConfigError,
    InplaceConfig,
    refuses_in_one_line,
)

FLAG = {flag.name: flag for flag in FLAGS}


def config(**values: str) -> InplaceConfig:
    """The configuration of an environment with only these settings: host_memory="1GB"."""
    env = {ENV_PREFIX + name.upper(): value for name, value in values.items()}
    return InplaceConfig.from_env({"PATH": "/bin", **env})


def test_nothing_set_is_all_auto() -> None:
    assert config() == InplaceConfig()
    assert config(**{flag.name.replace("-", "_"): flag.default for flag in FLAGS}) == InplaceConfig()


def test_public_names() -> None:
    """Other people's scripts use these."""
    names = ("host-memory", "gpu-memory", "cpu-share", "policy", "threads", "probe", "admission", "trace")
    assert tuple(FLAG) == names
    assert FLAG["host-memory"].option == "--inplacekv-host-memory"
    assert [flag.env for flag in FLAGS] == [
        "SGLANG_INPLACEKV_" + name.upper().replace("-", "_") for name in names
    ]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("96GB", 96 * 10**9),
        ("96gb", 96 * 10**9),
        ("4GiB", 4 * 2**30),
        ("2TB", 2 * 10**12),
        ("1TiB", 2**40),
        ("512MB", 512 * 10**6),
        ("512 MiB", 512 * 2**20),
        ("1.5GB", 1_500_000_000),
        ("64kb", 64_000),
        ("64KiB", 65_536),
        ("12345", 12345),
        ("12345B", 12345),
        (" 1GB ", 10**9),
        ("0", 0),
        ("auto", None),
        ("AUTO", None),
    ],
)
def test_sizes(text: str, size: int | None) -> None:
    assert config(host_memory=text).host_memory_bytes == size
    assert config(gpu_memory=text).gpu_memory_bytes == size


@pytest.mark.parametrize("text", ["4096tok", "4096 tok", "4096TOK", "4096tokens"])
def test_gpu_memory_in_tokens(text: str) -> None:
    found = config(gpu_memory=text)
    assert (found.gpu_memory_tokens, found.gpu_memory_bytes) == (4096, None)


@pytest.mark.parametrize("text", ["0", "1", "0.25", "1e-3", "0.0", "1.0"])
def test_share(text: str) -> None:
    assert config(cpu_share=text).cpu_share == float(text)


def test_other_flags() -> None:
    assert config(threads="7").threads == 7
    assert config(policy="writescope").policy == "writescope"
    assert [config(trace=text).trace for text in ("off", "OFF", "")] == [None] * 3
    assert config(trace="x/t.jsonl").trace == Path("x/t.jsonl")
    assert [config(probe=text).probe for text in ("auto", "redo", "off")] == ["auto", "redo", "off"]
    assert [config(admission=text).admission for text in ADMISSIONS] == list(ADMISSIONS)


def test_test_knobs() -> None:
    found = config(tile_tokens="128", jitter_seed="3", poison="1", wait_timeout_s="2.5")
    assert (found.tile_tokens, found.jitter_seed, found.poison, found.wait_timeout_s) == (128, 3, True, 2.5)
    assert config(jitter_seed="-1").jitter_seed is None
    assert config(jitter_seed="0").jitter_seed == 0
    for text, value in (("0", False), ("", False), ("off", False), ("yes", True), ("TRUE", True)):
        assert config(poison=text).poison is value


SIZE_HELP = "possible are auto or a size such as 512MB, 96GB, 4GiB"
SHARE_HELP = "possible are auto or a number from 0 to 1"
REFUSED = [
    *[("host_memory", text, SIZE_HELP) for text in ("lots", "-1GB", "1PB", "96G", "GB", "1e9", "４GB", "96 G B", "4096tok")],
    *[("gpu_memory", text, SIZE_HELP) for text in ("lots", "-4096tok", "1.5tok", "tok", "nan")],
    *[("cpu_share", text, SHARE_HELP) for text in ("1.01", "-0.1", "nan", "NaN", "inf", "-inf", "half", "50%")],
    *[("policy", text, "possible is 'writescope'") for text in ("lru", "WriteScope")],
    *[("threads", text, "possible is a whole number") for text in ("many", "1.5", "1_0", "٢")],
    *[("threads", text, "possible are auto or a number from 1") for text in ("0", "-2")],
    *[("probe", text, "possible are 'auto', 'redo', 'off'") for text in ("on", "never")],
    *[("admission", text, "possible are auto, spill, queue") for text in ("never", "Queue", "spill,queue")],
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "possible"), REFUSED)
def test_refused_in_one_line_with_flag_asked_and_possible(name: str, text: str, possible: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        config(**{name: text})
    line = str(refusal.value)
    assert line.startswith(f"--inplacekv-{name.replace('_', '-')}: asked "), line
    assert possible in line and "\n" not in line
    asked = re.search(r"asked (.*?), possible", line)[1].strip("'")
    assert asked.lower() == text.lower() or float(asked) == float(text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tile_tokens", "0"),
        ("tile_tokens", "x"),
        ("jitter_seed", "-2"),
        ("jitter_seed", "x"),
        ("poison", "maybe"),
        ("wait_timeout_s", "0"),
        ("wait_timeout_s", "-1"),
        ("wait_timeout_s", "nan"),
        ("wait_timeout_s", "inf"),
        ("wait_timeout_s", "soon"),
    ],
)
def test_refused_test_knobs(name: str, text: str) -> None:
    with pytest.raises(
        ConfigError, match=f"^{ENV_PREFIX}{name.upper()}: asked .*{re.escape(text)}.*possible"
    ):
        config(**{name: text})


def test_set_but_empty_is_unset() -> None:
    assert InplaceConfig.from_env({flag.env: " " for flag in FLAGS}) == InplaceConfig()


def test_absurd_size_is_a_size() -> None:
    assert (
        InplaceConfig.from_env({"SGLANG_INPLACEKV_HOST_MEMORY": "9" * 400 + "GB"}).host_memory_bytes > 10**400
    )


@pytest.mark.parametrize("name", ["HOST_MEMROY", "R", "", "HOST-MEMORY", "host_memory"])
def test_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        InplaceConfig.from_env({ENV_PREFIX + name: "1"})
    line = str(refusal.value)
    assert line.startswith(f"{ENV_PREFIX}{name} is not a setting; possible are ")
    for known in [flag.env for flag in FLAGS] + [ENV_PREFIX + knob for knob in TEST_KNOBS]:
        assert known in line


def test_other_variables_are_not_ours() -> None:
    assert InplaceConfig.from_env({"SGLANG_INPLACE": "1", "INPLACEKV_MODELS": "/x"}) == InplaceConfig()


def test_reads_the_process_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_INPLACEKV_CPU_SHARE", "0.75")
    assert InplaceConfig.from_env().cpu_share == 0.75


@refuses_in_one_line
def refuse() -> None:
    raise ConfigError("--inplacekv-x: asked 1, possible is 2")


@refuses_in_one_line
def fail() -> None:
    raise RuntimeError("boom")


@refuses_in_one_line
def answer(value: int) -> int:
    return value + 1


def test_refusal_is_raised_where_there_is_no_parent_process() -> None:
    with pytest.raises(ConfigError, match="^--inplacekv-x: asked 1, possible is 2$"):
        refuse()
    assert answer(1) == 2


def _as_scheduler(call: Callable[[], None], log_path: str) -> None:
    logging.basicConfig(filename=log_path, format="%(message)s", force=True)
    try:
        call()
    except Exception as error:
        logging.error(f"caught {error}")


@pytest.mark.parametrize(
    ("call", "code", "said", "quits"),
    [
        (refuse, 1, "InplaceKV refuses to start: --inplacekv-x: asked 1, possible is 2\n", 1),
        (fail, 0, "caught boom\n", 0),
    ],
)
def test_refusal_in_a_scheduler_process(tmp_path, call, code: int, said: str, quits: int) -> None:
    """One line, past SGLang's `except Exception`, and the signal by which SGLang ends a server."""
    signals: list[int] = []
    before = signal.signal(signal.SIGQUIT, lambda number, frame: signals.append(number))
    try:
        log = tmp_path / "log"
        child = multiprocessing.get_context("fork").Process(target=_as_scheduler, args=(call, os.fspath(log)))
        child.start()
        child.join(60)
        assert child.exitcode == code
        assert log.read_text() == said
        assert len(signals) == quits
    finally:
        signal.signal(signal.SIGQUIT, before)
