"""What the metrics add up to, when they appear, and that the dashboard shows every one of them."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from sglang_inplacekv import metrics
from sglang_inplacekv.feedback import Costs
from sglang_inplacekv.metrics import NAMES, PREFIX, StepMetrics
from sglang_inplacekv.step_plan import Reads, Span, StepPlan
from tests.inplacekv.simulation import Simulation

DASHBOARD = Path(__file__).resolve().parents[2] / "docs/grafana.json"
NONE = np.empty(0, np.int64)
GATE = SimpleNamespace(waiting_requests=0, queued_requests=0, spilled_requests=0)
COSTS = Costs(
    cpu_s=0.25, cpu_tokens=96, transfer_s=0.5, transfer_tokens=64, transfer_bytes=4096, exposed_s=0.125
)


@pytest.fixture
def sim() -> Iterator[Simulation]:
    """Two layers of fp32 K and V, two heads of 64, pages of 4 tokens: 2 KiB for a token of both layers."""
    own = Simulation(share=0.5, device_pages=0, host_pages=40, seed=1)
    yield own
    own.close()


def decode(computed: int, transferred: int, stolen: int) -> StepPlan:
    pages = [np.arange(count) for count in (computed, transferred, stolen)]
    return StepPlan([Span("r", NONE, 0, 1)], True, 4, reads=[Reads(NONE, 0, *pages)])


def test_totals_of_costs(sim: Simulation) -> None:
    own = StepMetrics(sim.regions, None, GATE)
    own.end_step(COSTS, 0.0)
    sim.regions.windows.flushed_pages = 3
    own.end_step(COSTS, 0.0)
    assert own.totals == {
        "cpu_attended_bytes": 2 * 96 / sim.shape.layers * sim.shape.token_bytes,
        "transferred_bytes": 2 * 4096,
        "flushed_bytes": 3 * sim.shape.page_bytes,
        "cpu_attention_seconds": 0.5,
        "hidden_transfer_seconds": 0.75,
        "exposed_transfer_seconds": 0.25,
    }


def test_hidden_is_never_negative() -> None:
    """A wait may begin before its copy does."""
    assert Costs(transfer_s=1.0, exposed_s=1.5).hidden_s == 0.0


def test_effective_share_is_that_of_the_last_decode(sim: Simulation) -> None:
    own = StepMetrics(sim.regions, None, GATE)
    own.observe(decode(computed=1, transferred=2, stolen=1), 0.0)
    assert own.effective_share == 0.5
    own.observe(StepPlan([], False, 4), 0.0)
    assert own.effective_share == 0.5
    own.observe_device_decode([], 0.0)
    assert own.effective_share == 0.0


def test_log_tells_how_much_was_hidden_since_the_last_line(
    sim: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    own = StepMetrics(sim.regions, None, GATE)
    with caplog.at_level(logging.INFO, metrics.__name__):
        for costs in (COSTS, Costs(), Costs(transfer_s=1.0)):
            own.end_step(costs, 0.0)
            for _ in range(metrics._LOG_INTERVAL_STEPS):
                own.observe(decode(1, 1, 0), 0.0)
    hidden = [re.search(r"transfer hidden: ([^,]+),", record.message)[1] for record in caplog.records]
    assert hidden == ["0.75", "-", "1.00"]


def test_decodes_report_what_crossed_and_what_that_held_up(sim: Simulation) -> None:
    """Two requests that share a prefix of T: its pages cross once, and both attend them."""
    sim.regions.scope.target_share = 0.0
    first = sim.admit()
    assert sim.grow(first, 8)
    sim.forward([(first, 8)], is_decode=False)
    sim.finish(first, keep=True)
    pair = [sim.admit(sim.cache[0]) for _ in range(2)]
    for request in pair:
        assert sim.grow(request, 1)
    plan = sim.planner.build([Span(r.name, np.array(r.pages), r.length, r.length + 1) for r in pair], True)
    sim.executor.begin_forward(plan)
    sim.executor.drain()
    costs = sim.executor.take_costs()
    assert costs.transfer_bytes == 2 * sim.shape.page_bytes
    assert costs.transfer_tokens == 2 * 2 * 4 * sim.shape.layers


PROGRAM = """
import sys
from types import SimpleNamespace
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from sglang_inplacekv.feedback import Costs
from sglang_inplacekv.metrics import StepMetrics
from tests.inplacekv.simulation import Simulation

def page():
    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    return generate_latest(registry).decode()

sim = Simulation(share=0.0, device_pages=0, host_pages=40, seed=1)
gate = SimpleNamespace(waiting_requests=0, queued_requests=0, spilled_requests=0)
own = StepMetrics(sim.regions, None, gate)
print(page())
print("====")
gate.waiting_requests, gate.queued_requests, gate.spilled_requests = 1, 2, 3
for _ in range(2):
    own.end_step(Costs(cpu_s=0.5, transfer_s=1.0, exposed_s=0.25), 0.0)
    own.export()
print(page())
sim.close()
"""


def test_all_are_there_at_zero_from_the_start(tmp_path: Path) -> None:
    """In a process of its own: prometheus_client picks its kind of values when it is imported."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"},
        cwd=Path(__file__).resolve().parents[2],
    )
    assert done.returncode == 0, done.stderr
    before, after = (samples(page) for page in done.stdout.split("===="))
    assert {name.partition("{")[0] for name in before} == {PREFIX + name for name in NAMES}
    assert not any(before.values()), before
    assert after[PREFIX + "cpu_attention_seconds_total"] == 1.0
    assert after[PREFIX + "hidden_transfer_seconds_total"] == 1.5
    assert after[PREFIX + "exposed_transfer_seconds_total"] == 0.5
    assert [after[f"{PREFIX}{name}_requests"] for name in ("waiting", "queued", "spilled")] == [1, 2, 3]
    kinds = dict(re.findall(r"^# TYPE (\S+) (\w+)$", done.stdout, re.MULTILINE))
    assert {name for name, kind in kinds.items() if kind == "counter"} == {
        PREFIX + name for name in NAMES if name.endswith("_total")
    }


def samples(page: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"^(sglang:\S+) (\S+)$", page, re.MULTILINE)}


# The dashboard


@pytest.fixture(scope="module")
def dashboard() -> dict:
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))


def queries(dashboard: dict) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def test_dashboard_shows_what_there_is_and_nothing_else(dashboard: dict) -> None:
    shown = {name for expr in queries(dashboard) for name in re.findall(r"sglang:\w+", expr)}
    assert shown == {PREFIX + name for name in NAMES}


def test_dashboard_is_laid_out(dashboard: dict) -> None:
    """Grafana repairs overlapping panels as it likes, and drops panels of one id."""
    panels, taken = dashboard["panels"], set()
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["title"] and panel["description"] and panel["fieldConfig"]["defaults"]["unit"]
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)


def test_dashboard_asks_the_chosen_source_and_servers(dashboard: dict) -> None:
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert (
        variables["datasource"]["type"] == "datasource" and variables["datasource"]["query"] == "prometheus"
    )
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    assert variables["instance"]["datasource"] == chosen
    for panel in dashboard["panels"]:
        assert panel["datasource"] == chosen
        assert all(target["datasource"] == chosen for target in panel["targets"])
    for expr in queries(dashboard):
        assert expr.count("$instance") == len(re.findall(r"sglang:\w+", expr)), expr


def test_dashboard_shows_rates_of_what_only_grows(dashboard: dict) -> None:
    grown = ("_total", "_pages", "_evicted_tokens", "queued_requests", "spilled_requests")
    grows = {name for name in NAMES if name.endswith(grown)}
    for expr in queries(dashboard):
        for rate, name in re.findall(rf"(rate\()?{PREFIX}(\w+)", expr):
            assert bool(rate) == (name in grows), expr
        assert expr.count("(") == expr.count(")") and expr.count("{") == expr.count("}")
