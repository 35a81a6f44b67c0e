"""The decode step that `inplacekv plan` foretells against a server's, whole models, the share its own.

As a user would: rates as the server's start has kept them, its D as --gpu-memory, and as --step-ms a step with all KV in D.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from sglang_inplacekv.planning import read_model
from sglang_inplacekv.probes import host_rates

from ..layers import device_type
from ..planned import Planned, lines_of
from ..scale import Shape
from ..stats import Spread, step_windows, tokens_for


def run(context) -> None:
    scale, server = context.scale.share, context.server
    rest = _step_ms(context, scale.resident)
    attended = server.log.last_decode().attended_tokens
    if _host_tokens(attended):
        raise RuntimeError(f"{scale.resident} does not fit D: it reads {attended}")
    pool = server.ours
    config = Path(server.runner.scheduler.server_args.model_path)
    # In the dtype that is served, which need not be the checkpoint's.
    model = replace(read_model(config, pool.page_size), shape=pool.regions.shape)
    rates = host_rates(model, device_type())
    planned = Planned(context.setting.kind, model, *lines_of(rates, model), rest.median / 1e3)
    for shape in scale.served_shapes:
        measure = partial(_compare, context, planned, shape, rates.kept)
        context.part.attempt(str(shape), measure, needs_s=20)


def _compare(context, planned: Planned, shape: Shape, rates_kept: bool) -> None:
    regions, log = context.server.ours.regions, context.server.log
    predicted = planned.step(shape, regions.sizes.device_pages * regions.shape.page_bytes)
    step_ms = _step_ms(context, shape)
    decodes = [forward.attended_tokens for forward in log.forwards if forward.is_decode]
    settled = decodes[-max(1, len(decodes) // 4) :]
    context.part.row(
        what="served",
        case=f"{planned.name} {shape}",
        layers=planned.model.shape.layers,
        host_bytes=_host_tokens(settled[-1]) * planned.model.shape.token_bytes,
        predicted_host_bytes=predicted.host_bytes,
        predicted_share=predicted.share,
        controlled_share=statistics.median(map(_share, settled)),
        predicted_ms=1e3 * predicted.step_s,
        step_ms=step_ms,
        resident_ms=1e3 * planned.rest_s,
        plan_gbps={"cpu": planned.gbps(planned.cpu), "link": planned.gbps(planned.link)},
        plan_fixed_us=1e6 * planned.fixed_s,
        rates_kept=rates_kept,  # else measured just now, beside the server
    )


def _step_ms(context, shape: Shape) -> Spread:
    """Of a decode whose controller has had as many steps before to arrive."""
    server, steps = context.server, context.scale.share.plan_steps
    server.flush()
    served = server.serve(server.batch(shape), tokens_for(2 * steps)).check()
    seconds = step_windows(served.decode_stamps_s, warmup_steps=steps, window_steps=1)
    return Spread.of(1e3 * s for s in seconds[:steps])


def _host_tokens(attended: Mapping[str, int]) -> int:
    return attended["C"] + attended["T"] + attended["stolen"]


def _share(attended: Mapping[str, int]) -> float:
    """Of host tokens, the CPU's."""
    return (attended["C"] + attended["stolen"]) / _host_tokens(attended)
