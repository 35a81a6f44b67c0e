"""Differences between the results of two configurations."""

from __future__ import annotations

from dataclasses import dataclass

from .requests import Result


@dataclass(frozen=True)
class Comparison:
    max_difference: float
    first_divergence: tuple[int, int] | None  # (request, output position)


def compare(
    a: list[Result],
    b: list[Result],
    *,
    tolerance: float = 1e-4,
    allow_near_ties: bool = False,
) -> Comparison:
    """Compare logprobs of prompt and chosen tokens; raise AssertionError above `tolerance`.

    The first position where the chosen tokens differ is an error, or with `allow_near_ties`
    the end of that request's comparison: greedy choices that differ by a near tie still have
    the same logprob, which is checked.
    """
    assert len(a) == len(b), f"{len(a)} results against {len(b)}"
    worst, divergence = 0.0, None
    for request, (left, right) in enumerate(zip(a, b)):
        here = _first_difference(left.output_ids, right.output_ids)
        if here is not None:
            divergence = divergence or (request, here)
            assert allow_near_ties and here < min(len(left.output_ids), len(right.output_ids)), (
                _describe_divergence(request, here, left, right)
            )
        last = None if here is None else here + 1
        for where, x, y in (
            ("prompt token", left.prompt_logprobs, right.prompt_logprobs),
            ("output token", left.output_logprobs[:last], right.output_logprobs[:last]),
        ):
            worst = max(worst, _compare_logprobs(request, where, x, y, tolerance))
    return Comparison(worst, divergence)


def _first_difference(a: list[int], b: list[int]) -> int | None:
    for i, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def _compare_logprobs(
    request: int,
    where: str,
    a: list[float] | None,
    b: list[float] | None,
    tolerance: float,
) -> float:
    if a is None or b is None:
        return 0.0
    assert len(a) == len(b), f"request {request}: {len(a)} {where} logprobs against {len(b)}"
    if not a:
        return 0.0
    differences = [abs(x - y) for x, y in zip(a, b)]
    above = [i for i, d in enumerate(differences) if not d <= tolerance]
    assert not above, (
        f"request {request}: {len(above)} of {len(a)} {where} logprobs differ by more than "
        f"{tolerance:g}; first at {above[0]}: {a[above[0]]:.7f} against {b[above[0]]:.7f}, "
        f"largest difference {max(differences):.3g}"
    )
    return max(differences)


def _describe_divergence(request: int, here: int, a: Result, b: Result) -> str:
    def at(result: Result) -> str:
        if here >= len(result.output_ids):
            return f"nothing ({result.finish_reason})"
        return f"{result.output_ids[here]} at logprob {result.output_logprobs[here]:.7f}"

    return f"request {request}, output token {here}: {at(a)} against {at(b)}"
