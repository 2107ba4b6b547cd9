"""A loss of the user's is loaded by import path, trained with, and checked before a run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from trainer.check_loss import check_loss
from trainer.objectives.user_loss import load_loss

from areal_like.errors import UserError
from trainer.config import LossSettings, WeightClip
from trainer.objectives.loss import TokenInputs, policy_loss

TOY = "def toy(logprobs_N, tokens, *, scale=1.0):\n    return -scale * tokens.advantage_N * logprobs_N\n"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "toy_losses", raising=False)
    load_loss.cache_clear()


def test_toy_loss_takes_the_place_of_the_clipped_term() -> None:
    Path("toy_losses.py").write_text(TOY)
    clip = WeightClip(mode="off")
    settings = LossSettings(kind="toy_losses:toy", options={"scale": 2.0}, proximal="behaviour", weight=clip)
    current_N = torch.tensor([-0.5, -1.5], requires_grad=True)
    advantage_N, coefficient_N = torch.tensor([1.0, -3.0]), torch.tensor([0.25, 0.75])
    inputs = TokenInputs(torch.tensor([-0.4, -1.0]), advantage_N, torch.zeros(2), coefficient_N)
    loss, _ = policy_loss(current_N, torch.zeros(2), inputs, settings)
    loss.backward()
    assert torch.equal(current_N.grad, -2.0 * advantage_N * coefficient_N)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import no_such_thing", "cannot be imported"),
        ("", "has no function toy"),
        ("toy = 3", "cannot be called"),
        ("def toy(x): return x", "failed on four tokens"),
        ("def toy(x, t): return x.mean()", "returned [] for 4 tokens"),
        ("def toy(x, t): return t.advantage_N", "no gradient"),
        ("def toy(x, t): return x / 0.0", "not finite"),
    ],
)
def test_mistake_in_a_loss_is_one_clear_error(source: str, words: str) -> None:
    Path("toy_losses.py").write_text(source)
    with pytest.raises(UserError) as caught:
        check_loss("toy_losses:toy", {})
    assert words in caught.value.what


def test_toy_loss_passes_the_check() -> None:
    Path("toy_losses.py").write_text(TOY)
    check_loss("toy_losses:toy", {"scale": 2.0})
