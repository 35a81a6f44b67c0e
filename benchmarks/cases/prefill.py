"""Prefill speed: prompts of one chunk and of several, by where their pages have their homes."""

from __future__ import annotations

from ..stats import Spread


def run(context) -> None:
    server, scale = context.server, context.scale
    if server.ours is None:
        _all_lengths(context, "pool")
    elif server.ours.regions.sizes.device_pages:
        _all_lengths(context, "D")
    else:
        for share in scale.prefill_shares:
            server.set_share(share)
            _all_lengths(context, f"host, share {share:g}")


def _all_lengths(context, homes: str) -> None:
    for tokens in context.scale.prefill_tokens:
        context.part.attempt(f"{tokens}, {homes}", lambda n=tokens: _measure(context, n, homes), needs_s=20)


def _measure(context, tokens: int, homes: str) -> None:
    server = context.server
    repeats = context.scale.prefill_repeats[tokens]
    seconds = [_first_token_s(server, tokens) for _ in range(1 + repeats)]
    first_token_s = Spread.of(seconds[1:])
    # `serve` starts a new account: this is the last run's.
    transfers = {} if server.log is None else server.log.transfers("extend")
    context.part.row(
        tokens=tokens,
        homes=homes,
        first_token_ms=first_token_s.map(lambda s: s * 1e3),
        tokens_per_s=first_token_s.map(lambda s: tokens / s),
        **transfers,
    )


def _first_token_s(server, tokens: int) -> float:
    """Seconds to the first token of a prompt that nobody has sent before, with nothing else cached."""
    server.flush()
    return server.serve([server.streams.fresh(tokens)], 1).check().first_token_s[0]
