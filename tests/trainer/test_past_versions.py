"""Earlier versions come back bit for bit, within their bounds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.past_versions import PastVersions

GENEROUS = 1 << 30


def made(version: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Most of the first tensor stays from version to version, the second changes as a whole, the third is empty."""
    rng = torch.Generator().manual_seed(0)
    still = torch.randn(40, 5, generator=rng)
    still[version % 40] += version
    moving = torch.randn(7, generator=torch.Generator().manual_seed(version))
    return {"still": still.to(dtype), "moving": moving.to(dtype), "none": torch.zeros(0, dtype=dtype)}


def is_equal(found: object, version: int, dtype: torch.dtype = torch.float32) -> bool:
    assert isinstance(found, dict)
    return all(torch.equal(found[name], one) for name, one in made(version, dtype).items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=20, deadline=None)
@given(wanted=st.sets(st.integers(0, 6), min_size=1))
def test_every_version_comes_back_bit_for_bit_newest_first(wanted: set[int], dtype: torch.dtype) -> None:
    past = PastVersions(7, GENEROUS)
    for version in range(7):
        past.add(version, made(version, dtype))
    assert past.held == (6, 5, 4, 3, 2, 1, 0)
    seen = [version for version, weights in past.walk(wanted) if is_equal(weights, version, dtype)]
    assert seen == sorted(wanted, reverse=True)


def test_walking_changes_nothing_that_is_kept() -> None:
    past = PastVersions(3, GENEROUS)
    for version in range(3):
        past.add(version, made(version))
    for _ in range(2):
        assert [version for version, weights in past.walk([0, 1]) if is_equal(weights, version)] == [1, 0]
    assert is_equal(past.newest(), 2)


def test_the_oldest_goes_first_beyond_the_number_of_versions() -> None:
    past = PastVersions(3, GENEROUS)
    for version in (2, 3, 5, 9):
        past.add(version, made(version))
    assert past.held == (9, 5, 3)


def test_the_oldest_goes_first_beyond_the_memory() -> None:
    generous = PastVersions(9, GENEROUS)
    for version in range(4):
        generous.add(version, made(version))
    past = PastVersions(9, generous.num_bytes - 1)
    for version in range(4):
        past.add(version, made(version))
        assert past.num_bytes <= generous.num_bytes - 1
    assert past.held == (3, 2, 1)
    nothing = PastVersions(9, 1)
    for version in range(4):
        nothing.add(version, made(version))
    assert nothing.held == (3,)
    assert nothing.num_bytes == 0


def test_what_does_not_change_takes_no_memory() -> None:
    past = PastVersions(4, GENEROUS)
    for version in range(3):
        past.add(version, made(0))
    assert past.held == (2, 1, 0)
    assert past.num_bytes == 0
    assert all(is_equal(weights, 0) for _, weights in past.walk([0, 1, 2]))


def test_a_version_that_is_not_newer_begins_a_new_history() -> None:
    past = PastVersions(4, GENEROUS)
    assert past.held == ()
    for version in (3, 4, 4):
        past.add(version, made(version))
    assert past.held == (4,)
