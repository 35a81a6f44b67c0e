"""Flags and their environment variables.

Every flag `--inplacekv-x` has a twin `SGLANG_INPLACEKV_X`. The command line is copied into the environment, because that
is what reaches both the spawned scheduler process and `sglang.Engine`, which takes no foreign keyword.
"""

from __future__ import annotations

import functools
import logging
import math
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

logger = logging.getLogger(__name__)

ENV_PREFIX = "SGLANG_INPLACEKV_"
_UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}
_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off", ""}


class ConfigError(ValueError):
    """A flag that was asked for something impossible; the text names flag, asked and possible."""


def refuses_in_one_line(function: Callable) -> Callable:
    """Decorate what SGLang calls at start-up in its scheduler process, where it would bury a ConfigError in a traceback.

    There the error becomes one log line, and the server is ended as SGLang ends it for any failure of that process. In
    every other process, a program that embeds the scheduler included, the error is raised as usual.
    """

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except ConfigError as error:
            server = multiprocessing.parent_process()
            if server is None:
                raise
            logger.error(f"InplaceKV refuses to start: {error}")
            if server.is_alive() and server.pid:
                os.kill(server.pid, signal.SIGQUIT)
            # SGLang catches Exception around this call; SystemExit passes.
            sys.exit(1)

    return wrapper


@dataclass(frozen=True)
class Flag:
    """One public flag. `default` is the text a user would have typed."""

    name: str
    default: str
    values: str
    help: str

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper().replace("-", "_")

    @property
    def option(self) -> str:
        return "--inplacekv-" + self.name


FLAGS = (
    Flag(
        "host-memory",
        "auto",
        "SIZE|auto",
        "Host memory for the C and T regions, whole server (for example 96GB).",
    ),
    Flag(
        "gpu-memory",
        "auto",
        "SIZE|NNNtok|auto",
        "GPU budget per GPU for D homes, windows, P tiles, staging and workspaces (for example 4GB); "
        "as tokens (4096tok) it counts D homes alone.",
    ),
    Flag("cpu-share", "auto", "auto|0..1", "Share of host-resident tokens that the CPU attends."),
    Flag("policy", "writescope", "writescope", "Placement policy."),
    Flag(
        "threads",
        "auto",
        "auto|N",
        "CPU attention threads; auto is what affinity and cgroup quota allow, and no more than raise the probed rates.",
    ),
    Flag(
        "probe",
        "auto",
        "auto|redo|off",
        "Rates of this host, by which threads and CPU share start: kept from an earlier start if there are any (auto), "
        "measured again, or neither.",
    ),
    Flag(
        "admission",
        "auto",
        "auto|spill|queue",
        "Whether a request that does not fit D now starts in host memory at once (spill), waits (queue), or does what is "
        "predicted to give more tokens/s.",
    ),
    Flag(
        "trace",
        "off",
        "FILE|off",
        "Write a line of JSON for each decode step to this file, which `inplacekv trace` plots.",
    ),
)

TRANSFERS = ("dma", "zero-copy")
PROBES = ("auto", "redo", "off")
ADMISSIONS = ("auto", "spill", "queue")

# Knobs for tests and measurements: environment only, no compatibility promise.
TEST_KNOBS = {
    "TILE_TOKENS": "tokens of one P tile",
    "TRANSFER": "how the GPU gets T in a decode: dma, or zero-copy, by kernels that read host memory",
    "JITTER_SEED": "seed of random delays on the copy, flush, write and compute queues; -1 is off",
    "VERIFY": "compare what the host believes about page ids with SGLang's table in each decode step",
    "POISON": "overwrite P tiles, released windows and freed pages with NaN",
    "WAIT_TIMEOUT_S": "seconds after which any internal wait fails",
}


@dataclass(frozen=True)
class InplaceConfig:
    """What the user asked for. Sizes are bytes; None means 'auto'."""

    host_memory_bytes: int | None = None
    gpu_memory_bytes: int | None = None
    gpu_memory_tokens: int | None = None
    cpu_share: float | None = None
    policy: str = "writescope"
    threads: int | None = None
    probe: str = "auto"
    admission: str = "auto"
    trace: Path | None = None
    tile_tokens: int | None = None
    transfer: str = "dma"
    jitter_seed: int | None = None
    poison: bool = False
    verify: bool = False
    wait_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        share = self.cpu_share
        if share is not None and not 0.0 <= share <= 1.0:
            raise ConfigError(
                f"--inplacekv-cpu-share: asked {share}, possible are auto or a number from 0 to 1"
            )
        if self.policy != "writescope":
            raise ConfigError(f"--inplacekv-policy: asked {self.policy!r}, possible is 'writescope'")
        if self.transfer not in TRANSFERS:
            raise ConfigError(
                f"{ENV_PREFIX}TRANSFER: asked {self.transfer!r}, possible are {' and '.join(TRANSFERS)}"
            )
        if self.probe not in PROBES:
            raise ConfigError(
                f"--inplacekv-probe: asked {self.probe!r}, possible are {', '.join(map(repr, PROBES))}"
            )
        if self.admission not in ADMISSIONS:
            raise ConfigError(
                f"--inplacekv-admission: asked {self.admission!r}, possible are {', '.join(ADMISSIONS)}"
            )
        if self.threads is not None and self.threads < 1:
            raise ConfigError(
                f"--inplacekv-threads: asked {self.threads}, possible are auto or a number from 1"
            )

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> InplaceConfig:
        """Read every flag from `env` (default os.environ); unknown SGLANG_INPLACEKV_* names are refused."""
        env = os.environ if env is None else env
        known = {flag.env for flag in FLAGS} | {ENV_PREFIX + knob for knob in TEST_KNOBS}
        unknown = sorted(name for name in env if name.startswith(ENV_PREFIX) and name not in known)
        if unknown:
            raise ConfigError(f"{unknown[0]} is not a setting; possible are {', '.join(sorted(known))}")
        # Set but empty is unset: that is what deployment templates leave behind.
        text = {flag.name: env.get(flag.env, "").strip() or flag.default for flag in FLAGS}
        knob = {name: env.get(ENV_PREFIX + name, "").strip() for name in TEST_KNOBS}
        gpu_tokens = _parse_tokens(text["gpu-memory"])
        seed = _parse_int("SGLANG_INPLACEKV_JITTER_SEED", knob["JITTER_SEED"] or "-1", least=-1)
        tile = knob["TILE_TOKENS"]
        timeout = knob["WAIT_TIMEOUT_S"]
        return cls(
            host_memory_bytes=parse_size("--inplacekv-host-memory", text["host-memory"]),
            gpu_memory_bytes=None
            if gpu_tokens is not None
            else parse_size("--inplacekv-gpu-memory", text["gpu-memory"]),
            gpu_memory_tokens=gpu_tokens,
            cpu_share=_parse_share(text["cpu-share"]),
            policy=text["policy"],
            threads=None
            if text["threads"].lower() == "auto"
            else _parse_int("--inplacekv-threads", text["threads"]),
            probe=text["probe"],
            admission=text["admission"],
            trace=None if text["trace"].lower() == "off" else Path(text["trace"]),
            transfer=knob["TRANSFER"].lower() or "dma",
            tile_tokens=_parse_int("SGLANG_INPLACEKV_TILE_TOKENS", tile, least=1) if tile else None,
            jitter_seed=None if seed < 0 else seed,
            verify=_parse_bool("SGLANG_INPLACEKV_VERIFY", knob["VERIFY"]),
            poison=_parse_bool("SGLANG_INPLACEKV_POISON", knob["POISON"]),
            wait_timeout_s=_parse_seconds("SGLANG_INPLACEKV_WAIT_TIMEOUT_S", timeout) if timeout else 120.0,
        )


def parse_size(option: str, text: str) -> int | None:
    """Bytes, or None for auto. Raises ConfigError naming `option`."""
    return None if text.lower() == "auto" else parse_bytes(option, text, "are auto or a size")


def parse_bytes(option: str, text: str, possible: str = "is a size") -> int:
    """Raises ConfigError naming `option` and what is `possible`."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", text.lower())
    if not match or match.group(2) not in _UNITS:
        raise ConfigError(f"{option}: asked {text!r}, possible {possible} such as 512MB, 96GB, 4GiB")
    return int(Decimal(match.group(1)) * _UNITS[match.group(2)])


def _parse_tokens(text: str) -> int | None:
    match = re.fullmatch(r"([0-9]+)\s*tok(?:ens)?", text.lower())
    return int(match.group(1)) if match else None


def _parse_share(text: str) -> float | None:
    if text.lower() == "auto":
        return None
    try:
        return float(text)
    except ValueError:
        raise ConfigError(
            f"--inplacekv-cpu-share: asked {text!r}, possible are auto or a number from 0 to 1"
        ) from None


def _parse_int(option: str, text: str, least: int | None = None) -> int:
    if not re.fullmatch(r"-?[0-9]+", text):
        raise ConfigError(f"{option}: asked {text!r}, possible is a whole number")
    value = int(text)
    if least is not None and value < least:
        raise ConfigError(f"{option}: asked {value}, possible is a whole number from {least}")
    return value


def _parse_seconds(option: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise ConfigError(f"{option}: asked {text!r}, possible is a number of seconds above 0")
    return value


def _parse_bool(option: str, text: str) -> bool:
    if text.lower() not in _TRUE | _FALSE:
        raise ConfigError(f"{option}: asked {text!r}, possible are 0 and 1")
    return text.lower() in _TRUE
