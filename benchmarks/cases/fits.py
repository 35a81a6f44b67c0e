"""Decode step time when everything fits the GPU."""

from __future__ import annotations

from ..stats import Spread, step_windows, tokens_for


def run(context) -> None:
    for shape in context.scale.fits:
        context.part.attempt(str(shape), lambda s=shape: _measure(context, s), needs_s=10)


def _measure(context, shape) -> None:
    scale, server = context.scale, context.server
    steps = scale.warmup_steps + scale.windows * scale.window_steps
    served = server.serve(server.batch(shape), tokens_for(steps)).check()
    windows_s = step_windows(
        served.decode_stamps_s, warmup_steps=scale.warmup_steps, window_steps=scale.window_steps
    )
    step_ms = Spread.of(s * 1e3 for s in windows_s[: scale.windows])
    context.part.row(
        case=str(shape),
        step_ms=step_ms,
        tokens_per_s=step_ms.map(lambda ms: shape.batch * 1e3 / ms),
        **_regions(server),
    )


def _regions(server) -> dict:
    """What the last decode attended in each region: all of it should be D."""
    last = None if server.ours is None else server.log.last_decode()
    return {} if last is None else {"attended_tokens": last.attended_tokens}
