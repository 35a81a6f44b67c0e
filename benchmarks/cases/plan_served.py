"""The decode step that `inplacekv plan` foretells against a server's, whole models, the share its own.

As a user would: rates as the server's start has kept them, its D as --gpu-memory, and as --step-ms a step with all KV in D.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from sglang_inplacekv.planning import read_model
from sglang_inplacekv.probes import host_rates

from ..planned import Planned, device_name, lines_of
from ..scale import Shape
from ..stats import Spread, step_windows, tokens_for


def run(context) -> None:
    scale, server = context.scale.share, context.server
    rest = _step_ms(context, scale.resident)
    attended = server.log.last_decode().attended_tokens
    if attended["C"] or attended["T"]:
        raise RuntimeError(f"{scale.resident} does not fit D: it reads {attended}")
    pool = server.ours
    config = Path(server.runner.scheduler.server_args.model_path)
    # In the dtype that is served, which need not be the checkpoint's.
    model = replace(read_model(config, pool.page_size), shape=pool.regions.shape)
    lines = lines_of(host_rates(model, device_name()), model)
    planned = Planned(context.setting.kind, model, *lines, rest.median / 1e3)
    for shape in scale.served_shapes:
        context.part.attempt(str(shape), partial(_compare, context, planned, shape), needs_s=20)


def _compare(context, planned: Planned, shape: Shape) -> None:
    regions = context.server.ours.regions
    predicted = planned.step(shape, regions.sizes.device_pages * regions.shape.page_bytes)
    step_ms = _step_ms(context, shape)
    attended = context.server.log.last_decode().attended_tokens
    host_tokens = attended["C"] + attended["T"] + attended["stolen"]
    context.part.row(
        what="served",
        case=f"{planned.name} {shape}",
        layers=planned.model.shape.layers,
        host_bytes=host_tokens * planned.model.shape.token_bytes,
        predicted_host_bytes=predicted.host_bytes,
        predicted_share=predicted.share,
        share=(attended["C"] + attended["stolen"]) / max(1, host_tokens),
        predicted_ms=1e3 * predicted.step_s,
        step_ms=step_ms,
        resident_ms=1e3 * planned.rest_s,
    )


def _step_ms(context, shape: Shape) -> Spread:
    """Of a decode whose controller has had as many steps before to arrive."""
    server, steps = context.server, context.scale.share.plan_steps
    server.flush()
    served = server.serve(server.batch(shape), tokens_for(2 * steps)).check()
    seconds = step_windows(served.decode_stamps_s, warmup_steps=steps, window_steps=1)
    return Spread.of(1e3 * s for s in seconds[:steps])
