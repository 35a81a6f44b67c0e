"""Checks of what a config.json holds. ValueError tells what it has and what is possible, on a short line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MOST = 10**6  # of any whole number in a config.json
MOST_REAL = 10**9  # of a number that need not be whole


def shown(value: object) -> str:
    """What a config has, on one line of bounded length."""
    return repr(value)[:40]


def check_number(
    config: Mapping[str, Any], name: str, least: int = 1, most: int = _MOST, *, whole: bool = True
) -> None:
    """Unless it is one, which no truth value is, nor NaN."""
    value: Any = config.get(name)
    kinds = (int,) if whole else (int, float)
    if type(value) not in kinds or not least <= value <= most:
        word = "whole number" if whole else "number"
        raise ValueError(f"{name} {shown(value)}, possible is a {word} from {least} to {most}")


def check_number_if_there(config: Mapping[str, Any], name: str, *possible: int, whole: bool = True) -> None:
    """As check_number; null is as good as missing."""
    if config.get(name) is not None:
        check_number(config, name, *possible, whole=whole)


def check_list(config: Mapping[str, Any], name: str) -> None:
    """Unless it is missing or a list of names or whole numbers."""
    found = config.get(name)
    if found is not None and not (isinstance(found, list) and all(type(one) in (str, int) for one in found)):
        raise ValueError(f"{name} {shown(found)}, possible is a list of names or whole numbers")


def object_of(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object of that name, an empty one if there is none."""
    found = config.get(name)
    if found is not None and not isinstance(found, dict):
        raise ValueError(f"{name} {shown(found)}, possible is an object")
    return found or {}
