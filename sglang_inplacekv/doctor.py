"""What a host has that decides how fast, or whether, this extension serves."""

from __future__ import annotations

import re
import resource
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

import torch

import cpu_attn
from sglang_inplacekv.arena import host_memory_available
from sglang_inplacekv.compat import SGLANG_VERSION
from sglang_inplacekv.cores import team_cores

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_BATCHED_COPIES_SINCE = (13, 0)


@dataclass(frozen=True)
class Finding:
    what: str
    found: str
    advice: str | None = None  # None: as it should be


def examine() -> list[Finding]:
    has_gpu = torch.cuda.is_available()
    return [
        sglang(),
        plugin(),
        instruction_set(),
        cores(len(team_cores(None)), cpu_attn.default_threads(), has_gpu),
        huge_pages(_HUGE_PAGES),
        Finding("host memory", f"{host_memory_available() / 1e9:.1f} GB that host and cgroup still allow"),
        *(gpu() if has_gpu else [Finding("GPU", "none: the torch executor plays its part")]),
    ]


def sglang() -> Finding:
    try:
        found = version("sglang")
    except PackageNotFoundError:
        found = "not installed"
    advice = f"install sglang=={SGLANG_VERSION}: hooks are bound to that release"
    return Finding("SGLang", found, None if found == SGLANG_VERSION else advice)


def plugin() -> Finding:
    names = [entry.value for entry in entry_points(group="sglang.srt.plugins")]
    found = "sglang_inplacekv.plugin:register" in names
    return Finding(
        "plugin",
        "registered" if found else "not registered with SGLang",
        None if found else "install this package (pip install .), so that SGLang finds its entry point",
    )


def instruction_set() -> Finding:
    try:
        found, supported = cpu_attn.isa(), cpu_attn.supported_isas()
    except RuntimeError as error:
        return Finding("CPU attention", "does not run", str(error))
    advice = None if found != "scalar" else "this CPU has no AVX2: attention on it will be slow"
    return Finding("CPU attention", f"{found}, possible are {', '.join(supported)}", advice)


def cores(team: int, usable: int, has_gpu: bool) -> Finding:
    """Beside a GPU a core should be left to whoever feeds the team."""
    found = f"{team} attention threads of {usable} cores that affinity and cgroup quota allow"
    advice = "no core is left beside the team: --inplacekv-threads below that lets it spin between layers"
    return Finding("cores", found, advice if has_gpu and team >= usable else None)


def huge_pages(path: Path) -> Finding:
    """`always [madvise] never`: the chosen one stands in brackets."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    chosen = re.search(r"\[(\w+)\]", text)
    found = chosen.group(1) if chosen else "unknown"
    advice = f"echo madvise > {path}: without huge pages the CPU reads its KV more slowly"
    return Finding("huge pages", found, None if found in ("always", "madvise") else advice)


def gpu() -> list[Finding]:
    properties = torch.cuda.get_device_properties(0)
    found = [Finding("GPU", f"{properties.name}, {properties.total_memory / 1e9:.0f} GB")]
    runtime = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    advice = "13.0 or newer copies a tile in one call; before, each run of pages is a call of its own"
    found.append(
        Finding("CUDA", str(torch.version.cuda), None if runtime >= _BATCHED_COPIES_SINCE else advice)
    )
    return [*found, locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])]


def locked_memory(limit_bytes: int) -> Finding:
    """The T region is pinned: the process may need to lock as much as --inplacekv-host-memory."""
    if limit_bytes == resource.RLIM_INFINITY:
        return Finding("locked memory", "no limit")
    return Finding(
        "locked memory",
        f"at most {limit_bytes} bytes by ulimit -l, which some drivers heed: raise it if pinning fails",
    )
