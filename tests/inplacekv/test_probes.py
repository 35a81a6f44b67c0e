"""Rates of a host: which team is chosen, what is kept and when it is measured again, and where the share then starts."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import platform
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import cpu_attn
from sglang_inplacekv import cores, host_rates, probes
from sglang_inplacekv.build import make_control
from sglang_inplacekv.config import ConfigError
from sglang_inplacekv.host_rates import AttentionRates, TeamRates, best_team, knee, measure_teams, team_sizes
from sglang_inplacekv.layout import KVShape
from sglang_inplacekv.planning import ModelKV
from sglang_inplacekv.probes import HostRates
from sglang_inplacekv.roofline import Line, balanced_share
from sglang_inplacekv.write_scope import AUTO_START_SHARE, WriteScope
from tests.harness import Runner
from tests.inplacekv.exactness.support import model as checkpoint

GQA = ModelKV(KVShape(48, 4, 128, torch.bfloat16, 256), 32)
LATENT = ModelKV(KVShape(27, 1, 576, torch.bfloat16, 256, value_dim=512), 16)
TEAM = TeamRates(2, 40e9, 2e-5, 2048 / 30e9)
BESIDE = AttentionRates(2, 1e-4, 2048 / 25e9, 45e9)
BESIDE_NOTHING = dataclasses.replace(BESIDE, link_bytes_s=None)


class Measured:
    """Stands in for the measurements, which take their time."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.link_open = False
        patch.setattr(probes, "measure_teams", self.teams)
        patch.setattr(probes, "measure_attention", self.attention)
        patch.setattr(probes, "QueuedCopies", self.copies)

    def teams(self, sizes: list[int], model: ModelKV | None, device: str) -> list[TeamRates]:
        self.calls += 1
        token_s = TEAM.token_s if model else None
        return [dataclasses.replace(TEAM, threads=threads, token_s=token_s) for threads in sizes]

    def attention(self, threads: int, most: int, model: ModelKV, device: str, copies: object):
        assert self.link_open == (device == "cuda") == (copies is not None)
        link = None if copies is None else BESIDE.link_bytes_s
        return dataclasses.replace(BESIDE, threads=threads, link_bytes_s=link)

    def copies(self, *piece: int) -> SimpleNamespace:
        self.link_open = True
        return SimpleNamespace(rate_alone=lambda: 50e9, close=lambda: setattr(self, "link_open", False))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sglang-inplacekv"


def kept(cache: Path) -> list[Path]:
    return list(cache.glob("rates-*.json"))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    return Measured(monkeypatch)


@pytest.mark.parametrize(
    ("rates", "threads"),
    [
        ({1: 14.0, 4: 49.0, 8: 58.0, 12: 84.0, 15: 99.0}, 15),
        ({2: 20.0, 4: 39.0, 8: 40.0, 15: 40.0}, 4),
        ({2: 20.0, 4: 40.0, 8: 38.0, 15: 35.0}, 4),
        ({1: 5.0}, 1),
    ],
)
def test_knee(rates: dict[int, float], threads: int) -> None:
    assert knee(rates) == threads


def test_team_sizes() -> None:
    assert team_sizes(1) == [1] and team_sizes(2) == [2, 1]
    assert team_sizes(15) == [15, 14, 12, 10, 8, 6, 4]
    assert len(team_sizes(500)) == 7


def test_arithmetic_may_need_more_threads_than_reads_do() -> None:
    reads = {4: 39e9, 8: 40e9, 15: 40e9}

    def found(token_s: Callable[[int], float | None]) -> int:
        return best_team(TeamRates(n, rate, 1e-5, token_s(n)) for n, rate in reads.items()).threads

    assert found(lambda threads: None) == 4, "no model"
    assert found(lambda threads: 1e-7) == 4, "bound by memory"
    assert found(lambda threads: 1e-6 / threads) == 15, "bound by arithmetic"
    assert found(lambda threads: 1e-6 / min(threads, 8)) == 8


@pytest.mark.parametrize("model", [None, GQA, LATENT], ids=["reads alone", "gqa", "latent"])
def test_measuring(model: ModelKV | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_rates, "_MOST_BYTES", 2**26)
    monkeypatch.setattr(host_rates, "_TIMED_S", 0.0)
    monkeypatch.setattr(host_rates, "_SWEEP_S", 60.0)
    sizes = team_sizes(min(2, cpu_attn.default_threads()))
    found = measure_teams(sizes, model, "cpu")
    assert [each.threads for each in found] == sizes
    for each in found:
        assert each.read_bytes_s > 0 and each.hand_over_s > 0
        assert each.token_s is None if model is None else each.token_s > 0
    monkeypatch.setattr(host_rates, "_SWEEP_S", 0.0)
    assert len(measure_teams(sizes, model, "cpu")) == 1, "the largest team, and no time for others"


def test_measuring_takes_little_memory_where_there_is_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_rates, "_TIMED_S", 0.0)
    monkeypatch.setattr(host_rates, "host_memory_available", lambda: 2**20)
    with mock.patch.object(host_rates, "huge_buffer", wraps=host_rates.huge_buffer) as mapped:
        measure_teams([1], GQA, "cpu")
    assert mapped.call_args.args[0] == GQA.layer_token_bytes * 256, "one page"


@pytest.mark.parametrize("model", [GQA, LATENT], ids=["gqa", "latent"])
def test_the_line_of_the_team_that_is_chosen(model: ModelKV, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_rates, "_MOST_BYTES", 2**26)
    monkeypatch.setattr(host_rates, "_TIMED_S", 0.0)
    monkeypatch.setattr(host_rates, "_LINE_S", 0.0)
    found = probes.measure_rates(team_sizes(min(2, cpu_attn.default_threads())), model, "cpu")
    assert found.attention is not None and found.attention.threads == found.team.threads
    assert found.attention.link_bytes_s is found.link_bytes_s is None
    fixed_s = found.team.hand_over_s + found.attention.fixed_s
    assert found.cpu_line == Line(fixed_s, found.attention.token_s) and found.attention.token_s > 0


def test_kept_for_the_next_start(cache: Path, measured: Measured) -> None:
    first = probes.host_rates(GQA, "cpu")
    second = probes.host_rates(GQA, "cpu")
    assert measured.calls == 1 and not first.kept and second.kept
    assert dataclasses.replace(second, kept=False) == first and first.link_bytes_s is None
    assert len(kept(cache)) == 1 and len(list(cache.iterdir())) == 2, "and no temporary file is left"
    assert not probes.host_rates(GQA, "cpu", redo=True).kept and measured.calls == 2
    assert probes.host_rates(GQA, "cpu").kept


def test_other_hosts_models_and_teams_have_rates_of_their_own(
    cache: Path, measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_core = min(os.sched_getaffinity(0))
    for calls, (model, threads) in enumerate([(GQA, None), (LATENT, None), (None, None), (GQA, 1)], start=1):
        probes.host_rates(model, "cpu", threads)
        assert measured.calls == calls
    for calls, (owner, name, value) in enumerate(
        [
            (probes, "cpu_model", "another CPU"),
            (probes, "ABI_VERSION", 99),
            (cpu_attn, "isa", "another"),
            (platform, "node", "another host"),
            (os, "sysconf", 2**20),
            (os, "sched_getaffinity", {one_core}),
        ],
        start=5,
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value if name == "ABI_VERSION" else lambda *_, value=value: value)
            assert not probes.host_rates(GQA, "cpu").kept
        assert measured.calls == calls, name
    with mock.patch.object(torch.cuda, "get_device_name", return_value="another GPU"):
        with mock.patch.object(probes, "topology", return_value=cores.topology()):
            first = probes.host_rates(GQA, "cuda")
            second = probes.host_rates(GQA, "cuda")
            assert second.kept and dataclasses.replace(second, kept=False) == first
            assert (first.link_bytes_s, first.attention.link_bytes_s) == (50e9, 45e9)
            assert not measured.link_open
            assert probes.host_rates(None, "cuda").attention is None


def test_servers_that_start_together_measure_one_after_the_other(
    cache: Path, measured: Measured, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    began, go_on = threading.Event(), threading.Event()

    def slowly(*arguments) -> list[TeamRates]:
        began.set()
        assert go_on.wait(20)
        return measured.teams(*arguments)

    monkeypatch.setattr(probes, "measure_teams", slowly)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(probes.host_rates, GQA, "cpu")
        assert began.wait(20)
        same, other = (pool.submit(probes.host_rates, model, "cpu") for model in (GQA, None))
        time.sleep(3 * probes._POLL_S)
        assert not same.done() and not other.done() and measured.calls == 0
        go_on.set()
        assert [each.result(20).kept for each in (first, same, other)] == [False, True, False]
        assert measured.calls == 2
        # Nobody waits for ever, and whoever had to do without the lock says so.
        monkeypatch.setattr(probes, "_TURN_S", 0.1)
        began.clear()
        go_on.clear()
        stuck = pool.submit(probes.host_rates, LATENT, "cpu")
        assert began.wait(20)
        monkeypatch.setattr(probes, "measure_teams", measured.teams)
        assert not probes.host_rates(LATENT, "cpu").kept
        assert f"another server has been measuring this host for 0.1 s: {cache}/lock" in caplog.text
        go_on.set()
        assert not stuck.result(20).kept


def test_a_sweep_without_time_for_a_second_team_is_not_kept(
    cache: Path, measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "team_sizes", lambda most: [1, 1, 1])
    for count, found_kept in ((1, False), (2, False), (3, True)):
        monkeypatch.setattr(
            probes, "measure_teams", lambda sizes, *rest, count=count: measured.teams(sizes[:count], *rest)
        )
        assert probes.host_rates(GQA, "cpu").kept == found_kept
    assert measured.calls == 2, "once alone, and once with the second team"


def _change(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_text(""),
        lambda path: path.write_text('{"key": '),
        lambda path: path.write_bytes(b"\xff\x00"),
        lambda path: path.write_text("[]"),
        lambda path: path.write_text("[" * 100_000),
        lambda path: _change(path, key={"format": 0}),
        lambda path: _change(path, teams=[]),
        lambda path: _change(path, teams=[{"threads": 1}]),
        lambda path: _change(path, teams=[dataclasses.asdict(TEAM) | {"threads": 10**6}]),
        lambda path: _change(path, teams=[dataclasses.asdict(TEAM) | {"threads": 1.5}]),
        lambda path: _change(path, teams=[dataclasses.asdict(TEAM) | {"token_s": None}]),
        lambda path: _change(path, teams=[dataclasses.asdict(TEAM) | {"read_bytes_s": float("nan")}]),
        lambda path: _change(path, teams=[dataclasses.asdict(TEAM) | {"hand_over_s": -1}]),
        lambda path: _change(path, teams=[dataclasses.asdict(TEAM) | {"hand_over_s": 10**400}]),
        lambda path: _change(path, teams=[dataclasses.asdict(TEAM) | {"read_bytes_s": 1e300}]),
        lambda path: _change(path, link_bytes_s="x"),
        lambda path: _change(path, attention=None),
        lambda path: _change(path, attention=0),
        lambda path: _change(path, attention=[]),
        lambda path: _change(path, attention={"threads": 1}),
        *(
            lambda path, wrong=wrong: _change(
                path, attention=json.loads(path.read_text())["attention"] | wrong
            )
            for wrong in (
                {"threads": True},
                {"threads": 10**6},
                {"token_s": 0.0},
                {"token_s": None},
                {"token_s": float("inf")},
                {"token_s": 1e-300},
                {"token_s": 1e14},
                {"fixed_s": -1e-9},
                {"fixed_s": False},
                {"fixed_s": float("nan")},
                {"fixed_s": None},
                {"link_bytes_s": 45e9},
                {"more": 1},
            )
        ),
        lambda path: (path.unlink(), path.mkdir()),
    ],
)
def test_a_file_that_is_not_ours_is_measured_again_with_one_line(
    spoil: Callable[[Path], object], cache: Path, measured: Measured, caplog: pytest.LogCaptureFixture
) -> None:
    found = probes.host_rates(GQA, "cpu")
    (path,) = kept(cache)
    spoil(path)
    with caplog.at_level(logging.WARNING):
        assert probes.host_rates(GQA, "cpu") == found
    assert measured.calls == 2
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{path} is measured again: ") and "\n" not in record.getMessage()


def test_pages_that_memory_does_not_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    large = dataclasses.replace(GQA, shape=dataclasses.replace(GQA.shape, page_size=2**20))
    page = large.layer_token_bytes * 2**20
    monkeypatch.setattr(host_rates, "host_memory_available", lambda: page - 1)
    with pytest.raises(
        ConfigError, match=rf"^--page-size: .* a layer takes {page / 1e9:.2f} GB, and this host"
    ):
        probes.measure_rates([1], large, "cpu")


@pytest.mark.parametrize("folder", ["/proc/nowhere", "/dev/null"])
def test_a_cache_that_cannot_be_written(
    folder: str, measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", folder)
    assert not probes.host_rates(GQA, "cpu").kept
    assert not probes.host_rates(GQA, "cpu").kept


def test_where_it_is_kept(
    tmp_path: Path, measured: Measured, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    assert probes.cache_folder() == Path("/home/me/.cache/sglang-inplacekv")
    for value in ("", "relative"):  # which the specification says to ignore
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert probes.cache_folder() == Path("/home/me/.cache/sglang-inplacekv")
    monkeypatch.chdir(tmp_path)
    with mock.patch.object(os.path, "expanduser", lambda path: path), caplog.at_level(logging.INFO):
        probes.host_rates(GQA, "cpu")
    assert "not kept: this user has no home" in caplog.text and not list(tmp_path.iterdir())


def test_more_threads_than_cores(cache: Path) -> None:
    with pytest.raises(ConfigError, match="^--inplacekv-threads: asked 100000, possible are 1 to "):
        probes.host_rates(GQA, "cpu", threads=100_000)


def regions(cpu_share: float | None, host_pages: int = 1000) -> SimpleNamespace:
    sizes = SimpleNamespace(host_pages=host_pages, page_size=256)
    return SimpleNamespace(scope=WriteScope.from_config(cpu_share), sizes=sizes, team=None)


def test_the_share_starts_where_the_rates_of_both_sides_at_once_say() -> None:
    rates, own = HostRates((TEAM,), 50e9, BESIDE), regions(None)
    control = make_control(own, GQA, rates)
    cpu, link = Line(1.2e-4, 2048 / 25e9), Line(0.0, GQA.layer_token_bytes / 45e9)
    assert rates.lines(GQA) == (pytest.approx(cpu), link)
    assert own.scope.target_share == control.target == balanced_share(cpu, link, 256_000)
    assert own.scope.target_share == pytest.approx(25 / 70, abs=0.01)
    assert control.fixed_s == 2e-5, "since steps time attention with its own fixed part"
    assert control.share(100) == 0.0, "a step that does not pay the hand-over"
    assert (control.cpu, control.transfer) == (None, None), "which is no measurement of a step"


def test_without_a_link_the_share_starts_as_ever() -> None:
    own = regions(None)
    control = make_control(own, GQA, HostRates((TEAM,), None, BESIDE_NOTHING))
    assert own.scope.target_share == control.share(256_000) == AUTO_START_SHARE
    with mock.patch("cpu_attn.hand_over_seconds", return_value=1e-5) as measured_now:
        make_control(own, GQA, None)
    measured_now.assert_called_once()
    assert make_control(regions(0.3), GQA, None) is None
    empty = regions(None, host_pages=0)
    make_control(empty, GQA, HostRates((TEAM,), 50e9, BESIDE))
    assert empty.scope.target_share == AUTO_START_SHARE


def test_what_is_told_of_rates() -> None:
    rates = HostRates((TEAM,), 50e9, BESIDE)
    assert str(rates) == (
        "knee at 2 of 2 threads, which read 40.0 GB/s, hand-over 20 us, link 50.0 GB/s alone, 45.0 beside attention"
    )
    assert rates.attention_text(GQA) == (
        "CPU attention 30.0 GB/s alone at best; 25.0 GB/s and 100 us a call beside copies"
    )
    assert str(HostRates((TEAM,), 50e9, None)).endswith("hand-over 20 us, link 50.0 GB/s alone")
    without = HostRates((TEAM,), None, BESIDE_NOTHING)
    assert str(without).endswith("hand-over 20 us")
    assert without.attention_text(GQA).endswith("; 25.0 GB/s and 100 us a call with nothing beside it")
    with pytest.raises(RuntimeError, match="no link was probed"):
        without.link_line(GQA)
    with pytest.raises(RuntimeError, match="no model was probed"):
        _ = HostRates((TEAM,), 50e9, None).cpu_line
    assert HostRates((TEAM,), 50e9, None).link_line(GQA) == Line(0.0, GQA.layer_token_bytes / 50e9)


def test_a_server_probes_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second start finds what the first has kept, and no probe at all is made where none is wanted."""
    monkeypatch.setattr(host_rates, "_MOST_BYTES", 2**26)
    monkeypatch.setattr(host_rates, "_SWEEP_S", 60.0)
    settings = {"XDG_CACHE_HOME": str(cache.parent), "SGLANG_INPLACEKV_HOST_MEMORY": "64MB"}
    with mock.patch.object(probes, "measure_teams", wraps=measure_teams) as measuring:
        for probe, calls in (("off", 0), ("auto", 1), ("auto", 1), ("redo", 2)):
            env = settings | {"SGLANG_INPLACEKV_PROBE": probe}
            with Runner(checkpoint("qwen3_moe"), backend="inplacekv", env=env) as runner:
                runner.generate([list(range(5, 40))], max_new_tokens=4)
                assert runner.kv_pool.regions.team.threads in (1, 2)
            assert measuring.call_count == calls, probe
            assert len(kept(cache)) == min(calls, 1)
