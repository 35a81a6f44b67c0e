"""A million tokens of requests at once, end to end, beside stock queueing them through a GPU budget."""

from __future__ import annotations

import statistics

from ..footprint import gpu_kv_bytes
from ..scale import Shape
from ..stats import Spread, percentile, step_windows

_WARM_UP_STEPS = 2


def run(context) -> None:
    context.part.attempt("all requests at once", lambda: _measure(context), needs_s=90)


def _measure(context) -> None:
    scale, server = context.scale, context.server
    if server.ours is None:
        server.flush()
        shape = scale.million
    else:
        server.set_share(scale.million_share)
        shape = _largest(server, scale)
    fields = serve_all(server, shape, scale.million_new_tokens)
    context.part.row(asked=str(scale.million), **fields)


def serve_all(server, shape: Shape, new_tokens: int) -> dict:
    """Submit `shape` at once. Returns what came of it, end to end."""
    prompts = [server.streams.fresh(shape.context) for _ in range(shape.batch)]
    served = server.serve(prompts, new_tokens).check()
    first_s = served.first_token_s
    together = step_windows(served.decode_stamps_s, warmup_steps=_WARM_UP_STEPS, window_steps=1)
    return {
        "case": str(shape),
        "new_tokens": new_tokens,
        "gpu_kv_bytes": gpu_kv_bytes(server),
        "end_to_end_s": served.end_to_end_s,
        "output_tokens_per_s": served.output_tokens / served.end_to_end_s,
        "all_tokens_per_s": (shape.batch * shape.context + served.output_tokens) / served.end_to_end_s,
        "first_token_mean_s": statistics.mean(first_s),
        "first_token_p50_s": percentile(first_s, 0.5),
        "first_token_max_s": max(first_s),
        "retractions": served.retractions,
        **({"step_ms": Spread.of(s * 1e3 for s in together)} if together else {}),
    }


def _largest(server, scale) -> Shape:
    """As many of the requests as our capacity holds at once, with what they will generate."""
    page = server.ours.page_size
    each = -(-(scale.million.context + scale.million_new_tokens) // page) * page
    possible = server.runner.scheduler.max_total_num_tokens // each
    return Shape(min(scale.million.batch, possible), scale.million.context)
