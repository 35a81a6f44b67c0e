"""One sequence that is larger than the GPU's KV budget."""

from __future__ import annotations

from ..footprint import gpu_kv_bytes
from ..stats import Spread, step_windows

_WARM_UP_STEPS = 2


def run(context) -> None:
    context.part.attempt("one long sequence", lambda: _measure(context), needs_s=20)


def _measure(context) -> None:
    scale, server = context.scale, context.server
    if server.ours is not None:
        server.set_share(scale.million_share)
    served = server.serve([server.streams.fresh(scale.long_tokens)], scale.long_new_tokens)
    fields = {"tokens": scale.long_tokens, "gpu_kv_bytes": gpu_kv_bytes(server)}
    if served.refusals:
        context.part.row(**fields, outcome=f"refused: {served.refusals[0]}")
        return
    seconds = step_windows(served.decode_stamps_s, warmup_steps=_WARM_UP_STEPS, window_steps=1)
    context.part.row(
        **fields,
        outcome="runs",
        first_token_s=served.first_token_s[0],
        step_ms=Spread.of(s * 1e3 for s in seconds),
    )
