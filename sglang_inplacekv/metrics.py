"""Counters of the four regions: Prometheus under `sglang:inplacekv_*`, and one log line now and then."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from sglang_inplacekv.feedback import ShareController
from sglang_inplacekv.regions import Regions
from sglang_inplacekv.roofline import Line
from sglang_inplacekv.step_plan import StepPlan

if TYPE_CHECKING:
    from prometheus_client import Gauge

logger = logging.getLogger(__name__)
_LOG_INTERVAL_STEPS = 40
_REGIONS = ("D", "C", "T", "window")
_GAUGES = {
    "share_target": "Share of host tokens that the CPU should attend.",
    "share_effective": "Share of host tokens that the CPU attended in the last decode step.",
    "cpu_token_seconds": "Moving average of the CPU's time for a token of a layer; 0 if not measured.",
    "transfer_token_seconds": "Moving average of the time in which a token of a layer crosses; 0 if not measured.",
    "region_fallback_pages": "Pages that got the other role for want of room, since start.",
    "stolen_pages": "T pages that the CPU attended in place, summed over steps and requests, since start.",
    "flushed_pages": "Windows copied home, since start.",
    "device_evicted_tokens": "Cached tokens evicted to make room in D, since start.",
}


class StepMetrics:
    """Observes every forward. All gauges exist from the start when SGLang's metrics are on."""

    def __init__(self, regions: Regions, control: ShareController | None) -> None:
        """control: None where the share is given."""
        self._regions, self._control = regions, control
        self._decode_steps = 0
        self.effective_share = 0.0
        self._tokens: Gauge | None = None
        self._gauges: dict[str, Gauge] = {}
        # SGLang sets this directory before it spawns the scheduler, and only with --enable-metrics.
        if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
            self._create_gauges()
            self.export()

    def _create_gauges(self) -> None:
        from prometheus_client import Gauge

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"sglang:inplacekv_{name}", text, labels, multiprocess_mode="mostrecent")

        text = "Tokens of allocated pages by region; 'window' counts those of C and T that are still on the device."
        self._tokens = gauge("tokens", text, ("region",))
        self._gauges = {name: gauge(name, text) for name, text in _GAUGES.items()}

    def observe(self, plan: StepPlan) -> None:
        if plan.is_decode:
            read = plan.attended_tokens(self._regions.sizes.page_size)
            computed = read["C"] + read["stolen"]
            host = computed + read["T"]
            self.effective_share = computed / host if host else 0.0
            self._count_decode()
        self.export()

    def observe_device_decode(self) -> None:
        """A decode step over D alone."""
        self.effective_share = 0.0
        if self._count_decode():
            self.export()

    def _count_decode(self) -> bool:
        """Whether this step is one to report."""
        self._decode_steps += 1
        due = self._decode_steps % _LOG_INTERVAL_STEPS == 0
        if due:
            self._log()
        return due

    def _log(self) -> None:
        scope, held = self._regions.scope, self._regions.tokens_by_region()
        regions = ", ".join(f"{region} {held[region]}" for region in _REGIONS)
        logger.info(
            f"InplaceKV decode, share target: {scope.target_share:.2f}, effective: {self.effective_share:.2f}, "
            f"#tokens: {regions}, #fallback pages: {scope.fallback_pages}, #stolen pages: {scope.stolen_pages}"
        )

    def export(self) -> None:
        if self._tokens is None:
            return
        held = self._regions.tokens_by_region()
        for region in _REGIONS:
            self._tokens.labels(region).set(held[region])
        values = {
            "share_target": self._regions.scope.target_share,
            "share_effective": self.effective_share,
            "cpu_token_seconds": _token_seconds(self._control.cpu if self._control else None),
            "transfer_token_seconds": _token_seconds(self._control.transfer if self._control else None),
            "region_fallback_pages": self._regions.scope.fallback_pages,
            "stolen_pages": self._regions.scope.stolen_pages,
            "flushed_pages": self._regions.windows.flushed_pages,
            "device_evicted_tokens": self._regions.homes.device_evicted_tokens,
        }
        for name, value in values.items():
            self._gauges[name].set(value)


def _token_seconds(line: Line | None) -> float:
    return 0.0 if line is None else line.token_s
