"""The examples in docstrings give what they show."""

from __future__ import annotations

import doctest
import importlib

import pytest

MODULES = (
    "areal_like.packing",
    "areal_like.staleness",
    "areal_like.trajectory",
    "areal_like.verdict",
    "areal_like.weights.weight_store",
    "areal_like.wire.encoding",
    "controller.config.loading",
    "rollout.workflow",
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings_hold(name: str) -> None:
    flags = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    result = doctest.testmod(importlib.import_module(name), optionflags=flags)
    assert result.attempted > 0
    assert result.failed == 0
