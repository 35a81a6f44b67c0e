"""What the four regions did: Prometheus under `sglang:inplacekv_*`, a log line now and then, and a trace where one is asked."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from sglang_inplacekv.feedback import Costs, ShareController
from sglang_inplacekv.regions import Regions
from sglang_inplacekv.roofline import Line
from sglang_inplacekv.step_plan import Span, StepPlan
from sglang_inplacekv.trace import TracedStep, TraceWriter

if TYPE_CHECKING:
    from prometheus_client import Counter, Gauge

    from sglang_inplacekv.gate import AdmissionGate

logger = logging.getLogger(__name__)
PREFIX = "sglang:inplacekv_"
_LOG_INTERVAL_STEPS = 40
_UNMEASURED = Line(0.0, 0.0)
_REGIONS = ("D", "C", "T", "window")
_TOKENS = "tokens"  # by region
_GAUGES = {
    "share_target": "Share of host tokens that the CPU should attend.",
    "share_effective": "Share of host tokens that the CPU attended in the last decode step.",
    "cpu_token_seconds": "Moving average of the CPU's time for a token of a layer; 0 if not measured.",
    "cpu_fixed_seconds": "Moving average of a layer's time beside the CPU's attention; 0 if not measured.",
    "transfer_token_seconds": "Moving average of the time in which a token of a layer crosses; 0 if not measured.",
    "region_fallback_pages": "Pages that got the other role for want of room, since start.",
    "stolen_pages": "T pages that the CPU attended in place, summed over steps and requests, since start.",
    "flushed_pages": "Windows copied home, since start.",
    "device_evicted_tokens": "Cached tokens evicted to make room in D, since start.",
    "waiting_requests": "Requests that wait for D; those behind them in the queue not counted.",
    "queued_requests": "Requests that had to wait for D, since start.",
    "spilled_requests": "Requests that admission started though D had no room for all of them, since start.",
}
# Prometheus adds _total to a counter's name. All but the flushes are of decodes.
_COUNTERS = {
    "cpu_attended_bytes": "KV that the CPU attended in place, in C and in T.",
    "transferred_bytes": "KV of T that crossed to P.",
    "flushed_bytes": "KV of windows copied home.",
    "cpu_attention_seconds": "Time in which the CPU attended.",
    "hidden_transfer_seconds": "Time of transfers behind other work.",
    "exposed_transfer_seconds": "Time in which attention stood still for transfers.",
}
NAMES = (_TOKENS, *_GAUGES, *(f"{name}_total" for name in _COUNTERS))


class StepMetrics:
    """Observes every forward. All metrics exist from the start when SGLang's metrics are on.

    A decode's costs come with the next forward or when the server idles; on a GPU those of its transfers, whose clocks are
    never waited for, by the second forward after it.
    """

    def __init__(
        self,
        regions: Regions,
        control: ShareController | None,
        gate: AdmissionGate,
        trace: TraceWriter | None = None,
    ) -> None:
        """control: None where the share is given."""
        self._regions, self._control, self._gate, self._trace = regions, control, gate, trace
        self._decode_steps = 0
        self.effective_share = 0.0
        self.totals = dict.fromkeys(_COUNTERS, 0.0)
        self._exported = dict(self.totals)
        self._logged = dict(self.totals)
        self._tokens: Gauge | None = None
        self._gauges: dict[str, Gauge] = {}
        self._counters: dict[str, Counter] = {}
        # SGLang sets this directory before it spawns the scheduler, and only with --enable-metrics.
        if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
            self._create_metrics()
            self.export()

    def _create_metrics(self) -> None:
        from prometheus_client import Counter, Gauge

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(PREFIX + name, text, labels, multiprocess_mode="mostrecent")

        text = "Tokens of allocated pages by region; 'window' counts those of C and T that are still on the device."
        self._tokens = gauge(_TOKENS, text, ("region",))
        self._gauges = {name: gauge(name, text) for name, text in _GAUGES.items()}
        self._counters = {name: Counter(PREFIX + name, text) for name, text in _COUNTERS.items()}

    def end_step(self, costs: Costs, now_s: float) -> None:
        """A forward begins, or the server idles: `costs` have become known, and a decode that was under way ended at `now_s`.

        now_s, and began_s below, are by time.perf_counter.
        """
        shape = self._regions.shape
        for name, value in (
            ("cpu_attended_bytes", costs.cpu_tokens * shape.token_bytes // shape.layers),
            ("transferred_bytes", costs.transfer_bytes),
            ("cpu_attention_seconds", costs.cpu_s),
            ("hidden_transfer_seconds", costs.hidden_s),
            ("exposed_transfer_seconds", costs.exposed_s),
        ):
            self.totals[name] += value
        self.totals["flushed_bytes"] = self._regions.windows.flushed_pages * shape.page_bytes
        if self._trace is not None:
            self._trace.end(costs, now_s)
            if self._trace.closed:
                self._trace = None

    def observe(self, plan: StepPlan, began_s: float) -> None:
        if plan.is_decode:
            read = plan.attended_tokens(self._regions.sizes.page_tokens)
            computed = read["C"] + read["stolen"]
            host = computed + read["T"]
            self.effective_share = computed / host if host else 0.0
            self._count_decode()
            self._trace_decode(plan.spans, host, read["stolen"], began_s)
        self.export()

    def observe_device_decode(self, spans: list[Span], began_s: float) -> None:
        """A decode step over D alone."""
        self.effective_share = 0.0
        if self._count_decode():
            self.export()
        self._trace_decode(spans, 0, 0, began_s)

    def idle(self) -> None:
        """Show where things stand."""
        self.export()
        if self._trace is not None:
            self._trace.flush()

    def _count_decode(self) -> bool:
        """Whether this step is one to report."""
        self._decode_steps += 1
        due = self._decode_steps % _LOG_INTERVAL_STEPS == 0
        if due:
            self._log()
        return due

    def _trace_decode(self, spans: list[Span], host_tokens: int, stolen_tokens: int, began_s: float) -> None:
        if self._trace is None:
            return
        held = self._regions.tokens_by_region()
        self._trace.begin(
            TracedStep(
                step=self._decode_steps,
                requests=len(spans),
                tokens=sum(span.length for span in spans) * self._regions.sizes.row_tokens,
                host_tokens=host_tokens,
                target=self._regions.scope.target_share,
                effective=self.effective_share,
                stolen=stolen_tokens,
                **{region: held[region] for region in _REGIONS},
            ),
            began_s,
        )

    def _log(self) -> None:
        scope, held = self._regions.scope, self._regions.tokens_by_region()
        regions = ", ".join(f"{region} {held[region]}" for region in _REGIONS)
        hidden_s, exposed_s = (
            self.totals[name] - self._logged[name]
            for name in ("hidden_transfer_seconds", "exposed_transfer_seconds")
        )
        self._logged = dict(self.totals)
        hidden = f"{hidden_s / (hidden_s + exposed_s):.2f}" if hidden_s + exposed_s else "-"
        logger.info(
            f"InplaceKV decode, share target: {scope.target_share:.2f}, effective: {self.effective_share:.2f}, "
            f"transfer hidden: {hidden}, #tokens: {regions}, #fallback pages: {scope.fallback_pages}, "
            f"#stolen pages: {scope.stolen_pages}"
        )

    def export(self) -> None:
        if self._tokens is None:
            return
        held = self._regions.tokens_by_region()
        for region in _REGIONS:
            self._tokens.labels(region).set(held[region])
        control = self._control
        cpu, transfer = (control.cpu, control.transfer) if control else (None, None)
        cpu, transfer = cpu or _UNMEASURED, transfer or _UNMEASURED
        values = {
            "share_target": self._regions.scope.target_share,
            "share_effective": self.effective_share,
            "cpu_token_seconds": cpu.token_s,
            "cpu_fixed_seconds": cpu.fixed_s,
            "transfer_token_seconds": transfer.token_s,
            "region_fallback_pages": self._regions.scope.fallback_pages,
            "stolen_pages": self._regions.scope.stolen_pages,
            "flushed_pages": self._regions.windows.flushed_pages,
            "device_evicted_tokens": self._regions.homes.device_evicted_tokens,
            "waiting_requests": self._gate.waiting_requests,
            "queued_requests": self._gate.queued_requests,
            "spilled_requests": self._gate.spilled_requests,
        }
        for name, value in values.items():
            self._gauges[name].set(value)
        for name, total in self.totals.items():
            if total > self._exported[name]:
                self._counters[name].inc(total - self._exported[name])
                self._exported[name] = total
