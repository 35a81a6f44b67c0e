"""Find and load the compiled library, choose the instruction set, count usable cores."""

import functools
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

LIBRARY_NAME = "libcpu_attn.so"
ABI_VERSION = 1  # kAbiVersion in src/binding.cpp


def _candidates() -> list[Path]:
    override = os.environ.get("CPU_ATTN_LIBRARY")
    if override:
        return [Path(override)]
    import cpu_attn

    # An editable install spreads the package over the checkout and site-packages.
    return [Path(entry) / "lib" / LIBRARY_NAME for entry in cpu_attn.__path__]


@functools.cache
def library() -> Any:
    """Load the compiled library once and select the instruction set.

    Raises RuntimeError listing the paths tried when it is missing, when it was built from another
    version of the sources, or when CPU_ATTN_ISA asks for what the host cannot run.
    """
    import tvm_ffi  # loads libtvm_ffi.so, which the library refers to without a run path

    candidates = _candidates()
    found = [path for path in candidates if path.is_file()]
    if not found:
        tried = ", ".join(str(path) for path in candidates)
        raise RuntimeError(
            f"{LIBRARY_NAME} not found (tried {tried}); build it with cmake or set CPU_ATTN_LIBRARY"
        )
    # Of an in-tree build and an installed one, the newer matches the sources.
    path = max(found, key=lambda candidate: candidate.stat().st_mtime)
    module = tvm_ffi.load_module(str(path))
    version = module.abi_version()
    if version != ABI_VERSION:
        raise RuntimeError(f"{path} has ABI version {version}, this package needs {ABI_VERSION}; rebuild it")
    _select(module, os.environ.get("CPU_ATTN_ISA") or _default(module))
    return module


def _default(module: Any) -> str:
    """The last one that the system also grants: it may refuse amx its tiles."""
    return next(name for name in reversed(_supported(module)) if module.select_isa(name))


def _supported(module: Any) -> list[str]:
    names: list[str] = []
    while name := str(module.supported_isa(len(names))):
        names.append(name)
    return names


def _select(module: Any, name: str) -> None:
    global _isa
    if not module.select_isa(name):
        raise RuntimeError(
            f"CPU_ATTN_ISA={name}: this host and build support {', '.join(_supported(module))}"
        )
    _isa = name


_isa = ""


def select_isa(name: str) -> None:
    """Switch every later call to the instruction set `name`, for tests and benchmarks."""
    _select(library(), name)


def isa() -> str:
    """Return the instruction set in use: scalar, avx2, avx512, avx512bf16, amx or neon.

    The last one that the host supports and grants, unless the environment variable CPU_ATTN_ISA names another.
    """
    library()
    return _isa


def supported_isas() -> list[str]:
    """Return the instruction sets this host and build can run, slowest first."""
    return _supported(library())


MAX_THREADS = 1024


def check_threads(threads: int) -> int:
    """`threads`. Raises ValueError where no team has so many."""
    if not 1 <= threads <= MAX_THREADS:
        raise ValueError(f"threads must be 1 to {MAX_THREADS}, is {threads}")
    return threads


def default_threads(allowed: Collection[int] | None = None, root: Path = Path("/")) -> int:
    """Return how many of the cores `allowed` (default: the affinity) this process may keep busy, at least 1.

    min(allowed, cgroup quota) rounded down; /proc and /sys are those below `root`.
    """
    cores = os.sched_getaffinity(0) if allowed is None else allowed
    quota = _quota_cores(root / "proc/self/cgroup", root / "sys/fs/cgroup")
    return max(1, int(min(len(cores), quota)))


def _quota_cores(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float:
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return float("inf")
    cores = float("inf")
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        # A limit of any ancestor binds; inside a container the path may not exist below the root.
        relative = Path(path.lstrip("/"))
        # v1 mounts controllers by their joint name and, mostly, links the single ones to it.
        for base in {"cpu", controllers} if controllers else {"."}:
            for group in [relative, *relative.parents]:
                cores = min(cores, _group_cores(root / base / group))
    return cores


def _group_cores(group: Path) -> float:
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text().strip()
            period = (group / "cpu.cfs_period_us").read_text().strip()
        if quota in ("max", "-1"):
            return float("inf")
        return int(quota) / int(period)
    except OSError:
        return float("inf")
