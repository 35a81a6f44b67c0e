"""One spilled decode step, traced: copies, GPU attention and CPU attention at once."""

from __future__ import annotations

from ..results import write_json
from ..trace import TRACE_FILE, StepTrace

_SHARE = 0.5
_STEPS_BEFORE = 6


def run(context) -> None:
    context.part.attempt("trace", lambda: _measure(context), needs_s=20)


def _measure(context) -> None:
    server, shape = context.server, context.scale.timeline
    server.set_share(_SHARE)
    # Arrivals before the steps: the first tokens, one message or several.
    trace = StepTrace(first_step=shape.batch + _STEPS_BEFORE)
    with trace.watching_cpu_attention():
        server.serve(server.batch(shape), 2 * shape.batch + _STEPS_BEFORE + 8, trace.on_poll).check()
    if not trace.intervals:
        raise RuntimeError("no decode step was traced")
    result = trace.as_json() | {
        "case": str(shape),
        "share": _SHARE,
        "layers": server.ours.regions.shape.layers,
    }
    write_json(context.out / TRACE_FILE, result)
    context.part.row(
        case=str(shape),
        share=_SHARE,
        step_us=result["step_us"],
        **{f"{lane}, us": busy for lane, busy in result["busy_us"].items()},
        **{f"{pair} at once, us": together for pair, together in result["at_once_us"].items()},
    )
