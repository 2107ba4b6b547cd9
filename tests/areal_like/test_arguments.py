"""Numbers on a command line: what is taken and what is refused with the text that was given."""

from __future__ import annotations

import argparse

import pytest

from areal_like import limits
from areal_like.arguments import processes, seconds, whole, whole_or_all


@pytest.mark.parametrize(("text", "value"), [("0.001", 0.001), ("2", 2.0), (f"{limits.SECONDS}", limits.SECONDS)])
def test_durations_are_above_0_and_bounded(text: str, value: float) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "", "1s", f"{limits.SECONDS + 1}"])
def test_other_durations_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="number of seconds greater than 0"):
        seconds(text)


@pytest.mark.parametrize(("text", "value"), [("0", 0), ("007", 7), ("9" * 15, 10**15 - 1)])
def test_whole_numbers_fit_every_counter(text: str, value: int) -> None:
    assert whole(text) == value
    assert whole_or_all(text) == value


@pytest.mark.parametrize("text", ["", "-1", "1.0", "1e3", "9" * 16, "²", "٣", " 1"])
def test_other_numbers_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number from 0 to 999,999,999,999,999"):
        whole(text)
    with pytest.raises(argparse.ArgumentTypeError, match="neither `all` nor a whole number of at least 0"):
        whole_or_all(text)


def test_all_stands_for_no_number() -> None:
    assert whole_or_all("all") is None


@pytest.mark.parametrize(("text", "value"), [("1", 1), ("1024", 1024)])
def test_processes_are_1_to_1024(text: str, value: int) -> None:
    assert processes(text) == value
    for wrong in ("0", "1025"):
        with pytest.raises(argparse.ArgumentTypeError, match="from 1 to 1024"):
            processes(wrong)
