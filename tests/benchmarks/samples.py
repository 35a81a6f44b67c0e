"""Parts as a run on a GPU host leaves them, small."""

from __future__ import annotations

from pathlib import Path

from benchmarks.results import Budget, Part
from benchmarks.stats import Spread


def spread(median: float) -> Spread:
    return Spread(median, 0.95 * median, 1.1 * median, 5)


def write_parts(out: Path) -> None:
    def part(benchmark: str, server: str, side: str) -> Part:
        return Part(out / "parts" / f"{benchmark}.{server}.json", benchmark, server, side, Budget(60))

    transfer = part("transfer", "no_model", "none")
    for what, gbps in (
        ("H2D copy alone", 55.0),
        ("T stream, adjacent pages", 52.0),
        ("DRAM read alone", 99.0),
        ("DRAM read beside H2D", 84.0),
        ("H2D beside DRAM read", 52.0),
    ):
        transfer.row(what=what, gbps=spread(gbps))
    for server, side, factor in (("stock", "stock", 1.0), ("resident", "ours", 1.02)):
        fits = part("fits", server, side)
        fits.row(case="1 x 8K", step_ms=spread(4.6 * factor), tokens_per_s=spread(217.0))
        prefill = part("prefill", server, side)
        prefill.row(
            tokens=8192, homes="pool", tokens_per_s=spread(40000.0 / factor), first_token_ms=spread(0.2)
        )
    for benchmark in ("decode_sweep", "attention"):
        sweep = part(benchmark, "spilled", "ours")
        for share in (0.0, 0.6, 1.0):
            host_bytes = 25_769_803_776
            ms = max(share / 84, (1 - share) / 52) * host_bytes / 1e6
            sweep.row(
                case="32 x 8K",
                share=share,
                step_ms=spread(1.1 * ms + 20),
                effective_share=share,
                host_bytes=host_bytes,
                layers=48,
            )
    for server, side, seconds in (("spilled", "ours", 90.0), ("stock_small", "stock", 40.0)):
        part("million", server, side).row(
            case="32 x 32000",
            end_to_end_s=seconds,
            output_tokens_per_s=2048 / seconds,
            first_token_max_s=seconds / 2,
        )
    part("long", "spilled", "ours").row(
        tokens=65536, gpu_kv_bytes=1_300_000_000, outcome="runs", first_token_s=2.0, step_ms=spread(60.0)
    )
    failed = part("long", "stock_small", "stock")
    failed.attempt("one long sequence", lambda: 1 / 0)


LAYERS, LAYER_US, HEAD_US = 48, 1000.0, 9000.0  # HEAD_US: before the first layer the scheduler works alone


def timeline() -> dict:
    """A traced step: per layer, from its beginning in us, when each lane is busy."""
    busy = {
        "copy to GPU": [(20.0 * piece, 20.0 * piece + 18) for piece in range(45)],
        "GPU attention": [(60.0, 100.0)],
        "CPU attention": [(50.0, 750.0)],
        "other GPU work": [(0.0, 15.0), (20.0, 30.0), (780.0, 980.0)],
        "copy to host": [(32.0, 36.0)],
    }
    intervals = [
        {"lane": lane, "name": "x", "start_us": begin + start, "end_us": begin + end}
        for begin in (HEAD_US + layer * LAYER_US for layer in range(LAYERS))
        for lane, spans in busy.items()
        for start, end in spans
    ]
    step_us = HEAD_US + LAYERS * LAYER_US
    return {"step_us": step_us, "layers": LAYERS, "case": "4 x 16K", "share": 0.5, "intervals": intervals}
