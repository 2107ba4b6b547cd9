"""Mistakes about SGLang, as a user sees them."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("rollout.engine.sglang.arguments={enable-metric: true}", "SGLang 0.5.23 has no argument `enable-metric`"),
        ("rollout.engine.python=/nowhere/python", "there is no interpreter /nowhere/python"),
    ],
)
def test_mistakes_are_one_sentence(areal, quickstart, short, sglang_python, given, said):
    run = areal(
        "train", quickstart, *short, "rollout.engine.kind=sglang", f"rollout.engine.python={sglang_python}", given
    )
    assert run.wait() == 2, run.output
    assert said in " ".join(run.output.split())
    assert "Traceback" not in run.output
