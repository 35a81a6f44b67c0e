"""Many requests of which D, or stock's pool, holds a few at a time: neither is told what to do with the others."""

from __future__ import annotations

from .million import serve_all


def run(context) -> None:
    context.part.attempt("many requests", lambda: _measure(context), needs_s=40)


def _measure(context) -> None:
    scale, server = context.scale, context.server
    server.flush()
    fields = serve_all(server, scale.queueing, scale.queueing_new_tokens)
    if server.ours is not None:
        gate = server.ours.gate
        fields |= {"queued": gate.queued_requests, "spilled": gate.spilled_requests}
    context.part.row(**fields)
