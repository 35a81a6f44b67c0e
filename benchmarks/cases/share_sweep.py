"""The share that the controller arrives at, and the one that `inplacekv plan` foretells, against a sweep of shares.

All pages are T, so that every share comes about by stealing and the KV is the same at each.
"""

from __future__ import annotations

from functools import partial
from itertools import chain, pairwise

from ..decoder import Decoder
from ..experiments import distinct, rounds_ms, settle, settled, step_ms, sweep
from ..layers import PAGE_TOKENS
from ..planned import Planned, each_shape
from ..scale import Shape

_WARM_UP_STEPS = 2


def run(context) -> None:
    scale = context.scale.share
    for kind in scale.models:
        measure = partial(each_shape, context, kind, scale.layers, scale.shapes, compare)
        context.part.attempt(kind, measure, needs_s=30)


def compare(part, scale, decoder: Decoder, planned: Planned, shape: Shape) -> None:
    case, pages = f"{planned.name} {shape}", shape.batch * shape.context // PAGE_TOKENS
    predicted = planned.step(shape)
    decoder.fixed(0.0, steals=False)
    decoder.place(shape)
    auto, control = settle(decoder, scale.settle_steps, scale.settle_s), decoder.control
    assert control is not None
    asked = (*scale.grid, *(auto + offset for offset in scale.near), predicted.share)
    shares = distinct(asked, pages)
    found, controlled = sweep(decoder, shares, control, scale.rounds, scale.round_steps, scale.round_s)
    followed = list(chain.from_iterable(controlled))
    auto, lines = settled(followed), {"cpu": control.cpu, "link": control.transfer}
    for share, rounds in found.items():
        part.row(
            what="sweep",
            case=case,
            share=share,
            step_ms=step_ms(chain.from_iterable(rounds)),
            rounds_ms=rounds_ms(rounds),
            layers=scale.layers,
            host_bytes=predicted.host_bytes,
        )
    # As a server places pages: most of the CPU's share is C, in the layout and the memory made for it.
    decoder.fixed(auto, steals=True)
    decoder.place(shape)
    placed = decoder.steps(_WARM_UP_STEPS + scale.rounds * scale.round_steps)[_WARM_UP_STEPS:]
    part.row(
        what="controlled",
        case=case,
        auto_share=auto,
        auto_ms=step_ms(followed),
        auto_rounds_ms=rounds_ms(controlled),
        auto_moves=sum(one.share != other.share for steps in controlled for one, other in pairwise(steps)),
        auto_steps=sum(len(steps) - 1 for steps in controlled),
        predicted_share=distinct([predicted.share], pages)[0],
        predicted_ms=1e3 * predicted.step_s,
        placed_ms=step_ms(placed),
        placed_floor=placed[-1].floor,
        rates_gbps={name: planned.gbps(line) for name, line in lines.items() if line},
        plan_gbps={"cpu": planned.gbps(planned.cpu), "link": planned.gbps(planned.link)},
        auto_fixed_us=1e6 * lines["cpu"].fixed_s if lines["cpu"] else None,
        plan_fixed_us=1e6 * planned.fixed_s,
        resident_ms=1e3 * planned.rest_s,
    )
