"""Claims about direct preference optimisation: it prefers what it is shown, against the starting model alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_offline import make_spec, rows_of_kind, run_until, write_rows

from trainer.model.model import load_causal_lm
from trainer.offline.loop import OfflineTraining
from trainer.offline.tasks import prepare_task


def preferences(num: int, first: int = 0) -> list[dict[str, str]]:
    """The right digit, followed by a wrong one or not at all."""
    rows = [(str(n % 10), n) for n in range(first, first + num)]
    return [{"prompt": f"{d}+{n // 10}=", "chosen": d, "rejected": str((n + 3) % 10)} for d, n in rows]


def made_data(tmp_path: Path) -> dict[str, str]:
    return {
        "train": write_rows(tmp_path / "train.jsonl", preferences(10)),
        "eval": write_rows(tmp_path / "eval.jsonl", preferences(6, 20)),
    }


def train(tmp_path: Path, **changes: Any) -> Path:
    if "data" not in changes:
        changes["data"] = made_data(tmp_path)
    spec = make_spec(tmp_path, objective="dpo", **changes)
    OfflineTraining(spec).run()
    return Path(spec.run_dir)


@pytest.mark.parametrize(("loss", "start"), [("sigmoid", math.log(2.0)), ("ipo", 0.25)])
def test_preferences_are_learnt_and_the_start_is_indifferent(tmp_path: Path, loss: str, start: float) -> None:
    run_dir = train(tmp_path, dpo={"loss": loss, "beta": 1.0}, epochs=6)
    before, after = rows_of_kind(run_dir, "eval")
    assert before["loss"] == pytest.approx(start)
    assert (before["accuracy"], before["margin"]) == (0.5, 0.0)
    assert after["accuracy"] > 0.9
    assert after["margin"] > 0.2
    assert after["loss"] < before["loss"]
    first = rows_of_kind(run_dir, "step")[0]
    assert first["loss"] == pytest.approx(start, abs=1e-4)


def test_loss_is_that_of_single_answers_under_both_models(tmp_path: Path) -> None:
    run_dir = train(tmp_path, dpo={"beta": 0.5}, epochs=3)
    policy, start = load_causal_lm(run_dir / "final"), load_causal_lm(run_dir / "start")
    prepared = prepare_task(make_spec(tmp_path, objective="dpo", data=made_data(tmp_path)), run_dir / "start")
    assert prepared.eval is not None
    losses, margins = [], []
    with torch.no_grad():
        for item in prepared.eval.items:
            rewards = []
            for tokens_T, mask_T in zip(item.tokens_S, item.masks_S, strict=True):
                ids = torch.from_numpy(tokens_T).long()
                sums = []
                for model in (policy, start):
                    logp_TV = torch.log_softmax(model(input_ids=ids[None], use_cache=False).logits[0].double(), -1)
                    logp_T = logp_TV[:-1].gather(-1, ids[1:, None])[:, 0]
                    sums.append(float(logp_T[torch.from_numpy(mask_T[1:])].sum()))
                rewards.append(0.5 * (sums[0] - sums[1]))
            margins.append(rewards[0] - rewards[1])
            losses.append(math.log1p(math.exp(-margins[-1])))
    row = rows_of_kind(run_dir, "eval")[-1]
    assert row["loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    assert row["margin"] == pytest.approx(sum(margins) / len(margins), abs=1e-5)
    assert row["accuracy"] == sum(margin > 0 for margin in margins) / len(margins)


def test_a_resumed_run_keeps_the_starting_model_as_reference(tmp_path: Path) -> None:
    import hashlib

    digests = []
    for name, stops in (("whole", ()), ("parts", (1, 4))):
        (tmp_path / name).mkdir()
        data = {"train": write_rows(tmp_path / "rows.jsonl", preferences(10))}
        spec = make_spec(tmp_path / name, objective="dpo", data=data, dpo={"beta": 1.0})
        for step in stops:
            run_until(spec, step)
        OfflineTraining(spec).run()
        weights = Path(spec.run_dir) / "final" / "model.safetensors"
        digests.append(hashlib.sha256(weights.read_bytes()).hexdigest())
    assert digests[0] == digests[1]


def test_ipo_counts_tokens_so_that_length_alone_is_no_margin(tmp_path: Path) -> None:
    rows = [{"prompt": "1=", "chosen": "2" * length, "rejected": "3"} for length in (1, 9)]
    data = {"train": write_rows(tmp_path / "rows.jsonl", rows), "eval": write_rows(tmp_path / "eval.jsonl", rows)}
    run_dir = train(tmp_path, data=data, dpo={"loss": "ipo", "beta": 1.0}, max_steps=1, epochs=1)
    assert rows_of_kind(run_dir, "eval")[0]["loss"] == pytest.approx(0.25)
