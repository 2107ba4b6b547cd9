"""Types for argparse: numbers on a command line, each with its limits."""

from __future__ import annotations

import argparse
import math

from areal_like import limits


def seconds(text: str) -> float:
    """A duration above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 < value <= limits.SECONDS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of seconds greater than 0 and at most {limits.SECONDS:,.0f}"
        )
    return value


def price(text: str) -> float:
    """A price, 0 or more."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value <= limits.PRICE:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to {limits.PRICE:,.0f}")
    return value


def whole(text: str) -> int:
    """A whole number, 0 or more, that fits every counter of a run."""
    if not text.isascii() or not text.isdecimal() or len(text) > 15:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 999,999,999,999,999")
    return int(text)


def processes(text: str) -> int:
    """A number of processes to start, from 1 to 1024."""
    number = whole(text)
    if not 0 < number <= 1024:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 1024")
    return number


def whole_or_all(text: str) -> int | None:
    """A whole number, or None for `all`."""
    if text == "all":
        return None
    try:
        return whole(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is neither `all` nor a whole number of at least 0") from error


def sample_name(text: str) -> tuple[int, int | None]:
    """A sample as (group, index in its group) from `12.3` or `g12.3`; `12` names all samples of a group."""
    group, dot, index = text.removeprefix("g").partition(".")
    try:
        return whole(group), whole(index) if dot else None
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not the name of a sample; write GROUP.SAMPLE, for example 12.3"
        ) from error


def share(text: str) -> float:
    """A share above 0 and at most 1."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a fraction greater than 0 and at most 1")
    return value
