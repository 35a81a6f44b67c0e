"""What `host_rates` measures, kept in a file a host and model, so that the next start has it at once."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import logging
import os
import platform
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import cpu_attn
from cpu_attn.library import ABI_VERSION
from sglang_inplacekv.cores import topology
from sglang_inplacekv.host_rates import (
    AttentionRates,
    TeamRates,
    best_team,
    measure_attention,
    measure_teams,
    team_sizes,
)
from sglang_inplacekv.planning import ModelKV
from sglang_inplacekv.queued_copies import QueuedCopies
from sglang_inplacekv.roofline import Line
from sglang_inplacekv.topology import cpu_model

logger = logging.getLogger(__name__)

_FORMAT = 2
_MOST_BYTES_S = 1e15
_LEAST_S, _MOST_S = 1e-14, 60.0
_GIB = 2**30
_TURN_S = 30.0  # more than a dozen servers take one after the other
_POLL_S = 0.05


class LinkError(RuntimeError):
    """The link to the GPU cannot be measured."""


@dataclass(frozen=True)
class HostRates:
    """How fast a host is, and for which team that was found."""

    teams: tuple[TeamRates, ...]  # of different sizes, the largest first
    link_bytes_s: float | None  # to the GPU, with nothing beside it; None without one
    attention: AttentionRates | None  # of the chosen team; None without a model
    kept: bool = False  # by an earlier start

    @property
    def team(self) -> TeamRates:
        return best_team(self.teams)

    def lines(self, model: ModelKV) -> tuple[Line, Line] | None:
        """CPU's and link's, of a layer of the model that was probed; None without a link."""
        if self.link_bytes_s is None:
            return None
        return self.cpu_line, self.link_line(model)

    @property
    def cpu_line(self) -> Line:
        """The CPU's time for a layer, beside copies where there is a link. Raises RuntimeError if no model was probed."""
        if self.attention is None:
            raise RuntimeError("no model was probed")
        return Line(self.team.hand_over_s + self.attention.fixed_s, self.attention.token_s)

    def link_line(self, model: ModelKV) -> Line:
        """The link's time for a layer of `model`, beside attention if one was probed. Raises RuntimeError if no link was."""
        rate = self.link_bytes_s if self.attention is None else self.attention.link_bytes_s
        if rate is None:
            raise RuntimeError("no link was probed")
        return Line(0.0, model.layer_token_bytes / rate)

    def attention_text(self, model: ModelKV) -> str:
        """Of the model that was probed."""
        line = self.cpu_line
        assert self.attention is not None and self.team.token_s is not None
        alone, usual = (model.layer_token_bytes / each / 1e9 for each in (self.team.token_s, line.token_s))
        beside = "with nothing beside it" if self.link_bytes_s is None else "beside copies"
        return (
            f"CPU attention {alone:.1f} GB/s alone at best; {usual:.1f} GB/s and {self.attention.fixed_s * 1e6:.0f} us a call "
            f"{beside}"
        )

    def __str__(self) -> str:
        team, largest = self.team, self.teams[0]
        all_read = "" if largest is team else f" (all: {largest.read_bytes_s / 1e9:.1f})"
        parts = [
            f"knee at {team.threads} of {largest.threads} threads",
            f"which read {team.read_bytes_s / 1e9:.1f} GB/s{all_read}",
            f"hand-over {team.hand_over_s * 1e6:.0f} us",
        ]
        if self.link_bytes_s is not None:
            beside = self.attention and self.attention.link_bytes_s
            parts.append(f"link {self.link_bytes_s / 1e9:.1f} GB/s alone")
            parts += [f"{beside / 1e9:.1f} beside attention"] if beside else []
        return ", ".join(parts) + (" (kept from before)" if self.kept else "")


def host_rates(
    model: ModelKV | None, device: str, threads: int | None = None, redo: bool = False
) -> HostRates:
    """Rates of a server on `device`, cuda or cpu: kept ones of this host and model, else, or if `redo`, measured and kept.

    threads: of the only team to consider; None tries several sizes up to what affinity and quota allow. Raises ConfigError on
    more than there are cores, LinkError where the link cannot be measured, RuntimeError where cpu_attn or the GPU does not run.
    """
    key = _key(model, device, threads)
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    path = cache_folder() / f"rates-{digest}.json"
    known = None if redo else _load(path, key)
    if known is not None:
        return known
    with _turn(path.parent) as waited:
        # Whoever was waited for may have kept the same.
        known = _load(path, key) if waited and not redo else None
        if known is not None:
            return known
        started = time.monotonic()
        sizes = team_sizes(topology(device).most_threads) if threads is None else [threads]
        found = measure_rates(sizes, model, device)
        logger.info(f"InplaceKV probes took {time.monotonic() - started:.1f} s")
        if len(found.teams) == 1 < len(sizes):
            logger.info(
                f"probed rates are not kept: on this busy host they are of one team, not of {len(sizes)}"
            )
        else:
            _store(path, key, found)
        return found


@contextmanager
def _turn(folder: Path) -> Iterator[bool]:
    """Servers that measured at once would measure each other. Gives whether another one was waited for.

    Where no lock can be had nothing is kept either, and nobody is waited for.
    """
    waited, file = False, None
    try:
        _make(folder)
        file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        end = time.monotonic() + _TURN_S
        while not _locked(file):
            waited = True
            if time.monotonic() >= end:
                logger.warning(
                    f"another server has been measuring this host for {_TURN_S:g} s: {folder}/lock"
                )
                break
            time.sleep(_POLL_S)
    except OSError as error:
        logger.info(f"probes of other servers are not waited for: {error}")
    try:
        yield waited
    finally:
        if file is not None:
            os.close(file)  # and with it the lock


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def measure_rates(sizes: Sequence[int], model: ModelKV | None, device: str) -> HostRates:
    """Rates of teams of these sizes, the largest first, and of both sides at once for the best. Nothing is kept.

    Raises as `host_rates` does.
    """
    teams = tuple(measure_teams(sizes, model, device))
    with ExitStack() as stack:
        copies = link = attention = None
        if device == "cuda":
            try:
                copies = _open_link(model)
                stack.callback(copies.close)
                link = copies.rate_alone()
            except RuntimeError as error:
                raise LinkError(str(error)) from error
        if model is not None:
            threads = best_team(teams).threads
            attention = measure_attention(threads, max(sizes), model, device, copies)
    return HostRates(teams, link, attention)


def _open_link(model: ModelKV | None) -> QueuedCopies:
    return QueuedCopies() if model is None else QueuedCopies(model.layer_token_bytes * model.shape.page_size)


def cache_folder() -> Path:
    """As the XDG base directory specification has it."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~/.cache"))) / "sglang-inplacekv"


def _key(model: ModelKV | None, device: str, threads: int | None) -> dict[str, Any]:
    """All that the rates depend on and that may differ between two starts."""
    here, shape = topology(device), None if model is None else model.shape
    try:
        release = version("sglang-inplacekv")
    except PackageNotFoundError:
        release = ""
    return {
        "format": _FORMAT,
        "release": release,
        "host": platform.node(),  # a home directory may be that of many
        "cpu_attn": [cpu_attn.isa(), ABI_VERSION],
        "cpu": cpu_model(),
        "cores": list(here.cores),
        "usable_cores": here.usable,
        "threads": threads,
        "memory_gib": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // _GIB,
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "model": None
        if model is None or shape is None
        else [
            model.q_heads,
            shape.kv_heads,
            shape.head_dim,
            shape.value_dim,
            str(shape.dtype),
            shape.page_size,
        ],
    }


def _load(path: Path, key: Mapping[str, Any]) -> HostRates | None:
    """None if there is no such file, or, with a warning, one that does not hold this host's rates."""
    try:
        data = json.loads(path.read_bytes())
        if data["key"] != key:
            raise ValueError("it is of another host or model")
        teams, attention = tuple(TeamRates(**each) for each in data["teams"]), data["attention"]
        attention = None if attention is None else AttentionRates(**attention)
        found = HostRates(teams, data["link_bytes_s"], attention, kept=True)
        _check(found, key)
        return found
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        logger.warning(f"{path} is measured again: {type(error).__name__}: {error}")
        return None


def _check(found: HostRates, key: Mapping[str, Any]) -> None:
    """Raises ValueError unless the numbers may be those of a host with this key."""
    teams, attention, has_model = found.teams, found.attention, key["model"] is not None
    possible = [_is_rate(each.read_bytes_s) and _is_time(each.hand_over_s) for each in teams]
    of_model, of_link = [(each.token_s, _is_time) for each in teams], [(found.link_bytes_s, _is_rate)]
    threads, cores = [each.threads for each in teams], range(1, len(key["cores"]) + 1)
    if attention is not None:
        of_model.append((attention.token_s, _is_time))
        of_link.append((attention.link_bytes_s, _is_rate))
        threads.append(attention.threads)
        possible.append(
            _is_time(attention.fixed_s) or (_is_number(attention.fixed_s) and not attention.fixed_s)
        )
    for numbers, measured in ((of_model, has_model), (of_link, key["gpu"] is not None)):
        possible += [is_possible(value) if measured else value is None for value, is_possible in numbers]
    if (
        not teams
        or has_model != (attention is not None)
        or not all(possible)
        or not all(type(n) is int and n in cores for n in threads)
    ):
        raise ValueError("its numbers are no rates of this host")
    if attention is not None and attention.threads != found.team.threads:
        raise ValueError("its attention is not that of the team it chooses")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_rate(value: Any) -> bool:
    return _is_number(value) and 0 < value < _MOST_BYTES_S


def _is_time(value: Any) -> bool:
    """Of a call, or of a token of a layer, which is tens of bytes at least."""
    return _is_number(value) and _LEAST_S < value < _MOST_S


def _make(folder: Path) -> None:
    if not folder.is_absolute():
        raise FileNotFoundError("this user has no home directory")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def _store(path: Path, key: Mapping[str, Any], found: HostRates) -> None:
    """All or nothing, since other servers may start at the same time. Not being able to is no error."""
    data = {
        "key": key,
        "teams": [dataclasses.asdict(each) for each in found.teams],
        "link_bytes_s": found.link_bytes_s,
        "attention": None if found.attention is None else dataclasses.asdict(found.attention),
    }
    name = None
    try:
        _make(path.parent)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            name = file.name
            json.dump(data, file, indent=1)
        os.replace(name, path)
    except OSError as error:
        logger.info(f"probed rates are not kept: {error}")
        if name is not None:
            Path(name).unlink(missing_ok=True)
