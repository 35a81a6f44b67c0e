"""Decode step time with everything in host memory, at a range of CPU shares."""

from __future__ import annotations

from ..stats import Spread, step_windows, tokens_for


def run(context) -> None:
    server = context.server
    for share in context.scale.sweep_shares:
        server.set_share(share)
        for shape in context.scale.sweep:
            what = f"{shape} at {share}"
            context.part.attempt(what, lambda s=shape, r=share: _measure(context, s, r), needs_s=30)
    server.flush()


def _measure(context, shape, share: float) -> None:
    scale, server = context.scale, context.server
    steps = scale.sweep_warmup_steps + scale.sweep_steps
    served = server.serve(server.batch(shape), tokens_for(steps)).check()
    seconds = step_windows(served.decode_stamps_s, warmup_steps=scale.sweep_warmup_steps, window_steps=1)
    last, transfers = server.log.last_decode(), server.log.transfers("decode")
    attended = last.attended_tokens
    host_tokens = attended["C"] + attended["T"]
    context.part.row(
        case=str(shape),
        share=share,
        step_ms=Spread.of(s * 1e3 for s in seconds[: scale.sweep_steps]),
        effective_share=attended["C"] / max(1, host_tokens),
        host_bytes=host_tokens * server.ours.regions.shape.token_bytes,
        layers=server.ours.regions.shape.layers,
        attended_tokens=attended,
        **transfers,
    )
