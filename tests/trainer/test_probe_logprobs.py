"""The trainer's log-probs of sampled answers: plain transformers', at the temperature, of the answers alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from areal_like.probe_files import LogprobSpec
from trainer import probe_logprobs
from trainer.probe_logprobs import logprobs_of

SEQUENCES = [(np.array([4, 9, 7]), np.array([11, 5])), (np.array([8]), np.array([3, 30, 12, 6]))]


def order_of(folder: Path, **changes: Any) -> LogprobSpec:
    facts: dict[str, Any] = {
        "model_dir": str(folder), "device": "cpu", "attention": "sdpa", "precision": "float32", "temperature": 0.7,
        "num_threads": torch.get_num_threads(), "sequences": [(p.tolist(), a.tolist()) for p, a in SEQUENCES],
    }  # fmt: skip
    return LogprobSpec(**{**facts, **changes})


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.2)])
def test_each_answers_logprobs_are_transformers_own_at_the_sampling_temperature(
    prepared: Path, tiny_model: Callable[..., PreTrainedModel], precision: str, tolerance: float
) -> None:
    found = logprobs_of(order_of(prepared, precision=precision))
    model, differences = tiny_model(), []
    for own, (prompt_P, answer_R) in zip(found, SEQUENCES, strict=True):
        ids = torch.from_numpy(np.concatenate([prompt_P, answer_R]).astype(np.int64))
        with torch.no_grad():
            logp_TV = torch.log_softmax(model(input_ids=ids[None]).logits[0] / 0.7, -1)
        expected_R = logp_TV[:-1].gather(-1, ids[1:, None])[len(prompt_P) - 1 :, 0].tolist()
        assert own == pytest.approx(expected_R, abs=tolerance)
        differences += [abs(a - b) for a, b in zip(own, expected_R, strict=True)]
    assert (max(differences) > 1e-4) is (precision == "bfloat16"), "the passes have the precision asked for"


def test_threads_and_kernel_are_those_of_the_order_and_no_entropies_are_computed(
    prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    asked: list[tuple[Any, ...]] = []
    honest = probe_logprobs.attention.choose
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(probe_logprobs.attention, "choose", lambda *args: asked.append(args) or honest(*args))
    right, entropies = probe_logprobs.token_logprobs, set[bool]()
    monkeypatch.setattr(
        probe_logprobs, "token_logprobs", lambda *a, **keys: entropies.add(keys["with_entropy"]) or right(*a, **keys)
    )
    logprobs_of(order_of(prepared, num_threads=3))
    assert entropies == {False}
    assert threads == [3]
    assert asked == [("sdpa", torch.device("cpu"), "float32")]
