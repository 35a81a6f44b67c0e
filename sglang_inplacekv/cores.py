"""The CPU attention team, and the cores it is pinned to."""

from __future__ import annotations

import os

import cpu_attn
from sglang_inplacekv.config import ConfigError

# Longer than what lies between two layers' jobs in a step that waits for the CPU.
_SPIN_S = 2e-3


def spin_s(team_threads: int) -> float:
    """How long to spin before sleeping, beside a GPU: not at all where the team has every core and would be kept from one."""
    return _SPIN_S if team_threads < cpu_attn.default_threads() else 0.0


def team_cores(threads: int | None) -> list[int]:
    """One core for each CPU attention thread: the last ones, since SGLang's own threads tend to start on the first.

    `auto` leaves a core to the scheduler where there are more than two.
    """
    allowed = sorted(os.sched_getaffinity(0))
    usable = cpu_attn.default_threads()
    wanted = threads or (usable - 1 if usable > 2 else usable)
    if wanted > len(allowed):
        raise ConfigError(
            f"--inplacekv-threads: asked {wanted}, possible are 1 to {len(allowed)} on this process's cores"
        )
    return allowed[-wanted:]


def make_team(threads: int | None, device: str) -> cpu_attn.Executor:
    """The team of a server on `device`, cuda or cpu. Without a GPU nobody spins: the torch executor needs the cores."""
    cores = team_cores(threads)
    return cpu_attn.Executor(cores=cores, spin_s=spin_s(len(cores)) if device == "cuda" else 0.0)
