"""Claims about a run from files: it learns, it ends as if it had never been interrupted, and it says what it did."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import pytest
import torch
from tiny_offline import digits, make_spec, rows_of_kind, run_until, write_rows

from areal_like.errors import PolicyDiverged, UserError
from trainer.checkpoints.checkpoint import all_checkpoints, read_state
from trainer.model.attention import attach, choose, register
from trainer.model.model import load_causal_lm
from trainer.offline import loop
from trainer.offline.loop import OfflineTraining
from trainer.offline.packing import packed
from trainer.offline.tasks import prepare_task
from trainer.optimizer import UpdateResult


def digest(run_dir: Path) -> str:
    return hashlib.sha256((run_dir / "final" / "model.safetensors").read_bytes()).hexdigest()


def train(tmp_path: Path, stop_at: tuple[int, ...] = (), **changes: object) -> Path:
    """A whole run, resumed after each step of `stop_at`; returns its folder."""
    tmp_path.mkdir(exist_ok=True)
    spec = make_spec(tmp_path, **changes)
    for step in stop_at:
        run_until(spec, step)
    OfflineTraining(spec).run()
    return Path(spec.run_dir)


def test_supervised_training_learns_its_rows(tmp_path: Path) -> None:
    run_dir = train(tmp_path, epochs=25, trainer={"device": "cpu", "optimizer": {"lr": 2e-2, "warmup_steps": 3}})
    before, after = rows_of_kind(run_dir, "eval")
    steps = rows_of_kind(run_dir, "step")
    assert before["version"] == 0
    assert after["version"] == len(steps) == 75
    assert after["loss"] < 0.5 * before["loss"]
    assert steps[-1]["loss"] < 0.3 * steps[0]["loss"]
    assert before["num_scored"] == 4


def test_a_stopped_and_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole")
    parts = train(tmp_path / "parts", stop_at=(1, 4))
    assert digest(whole) == digest(parts)
    assert [row["step"] for row in rows_of_kind(parts, "step")] == [1, 2, 3, 4, 5, 6]
    assert [version for version, _ in all_checkpoints(whole)] == [4, 6]
    for run_dir in (whole, parts):
        counters = read_state(all_checkpoints(run_dir)[-1][1]).counters
        tokens = sum(row["tokens"] for row in rows_of_kind(run_dir, "step"))
        assert counters == {"steps": 6.0, "tokens": tokens, "skipped_updates": 0.0}


def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole")
    spec = make_spec(tmp_path)
    run_until(spec, 4)
    newest = all_checkpoints(Path(spec.run_dir))[-1][1]
    (newest / "optimizer.safetensors").write_bytes(b"cut")
    OfflineTraining(spec).run()
    assert [row["step"] for row in rows_of_kind(Path(spec.run_dir), "step")] == [1, 2, 3, 4, 3, 4, 5, 6]
    assert digest(whole) == digest(Path(spec.run_dir))


def test_metrics_do_not_depend_on_micro_batches(tmp_path: Path) -> None:
    losses = []
    for budget in (16, 999):
        run_dir = train(tmp_path / str(budget), epochs=1, trainer={"device": "cpu", "micro_batch_tokens": budget})
        losses.append([row["loss"] for row in rows_of_kind(run_dir, "step")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_evaluation_is_loss_per_token_and_exact_match(tmp_path: Path) -> None:
    run_dir = train(tmp_path, epochs=6)
    row = rows_of_kind(run_dir, "eval")[-1]
    model = load_causal_lm(run_dir / "final")
    spec = make_spec(tmp_path)
    prepared = prepare_task(spec, run_dir / "start")
    assert prepared.eval is not None
    nats, num_targets, num_exact = 0.0, 0, 0
    with torch.no_grad():
        for item in prepared.eval.items:
            ids = torch.from_numpy(item.tokens_S[0]).long()[None]
            logp = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].double(), -1)
            places = [place for place, is_trained in enumerate(item.masks_S[0]) if is_trained]
            nats -= sum(float(logp[place - 1, ids[0, place]]) for place in places)
            num_targets += len(places)
            num_exact += all(int(logp[place - 1].argmax()) == int(ids[0, place]) for place in places)
    assert row["loss"] == pytest.approx(nats / num_targets, abs=1e-5)
    assert row["accuracy"] == num_exact / 4
    register()
    attach(model, choose("sdpa", torch.device("cpu")))
    assert packed(prepared.eval.items).num_predictions == num_targets


def test_left_out_rows_are_reported_in_the_metrics(tmp_path: Path) -> None:
    rows = [*digits(5), {"prompt": "1", "completion": "2" * 60}]
    data = {"train": write_rows(tmp_path / "long.jsonl", rows)}
    run_dir = train(tmp_path, data=data, epochs=1)
    opening, (note,) = rows_of_kind(run_dir, "offline")[0], rows_of_kind(run_dir, "note")
    assert (opening["train_rows"], opening["train_rows_too_long"]) == (5, 1)
    assert "1 of 6 rows" in note["text"]
    assert not rows_of_kind(run_dir, "eval")


def test_evaluations_and_checkpoints_come_when_they_are_due(tmp_path: Path) -> None:
    run_dir = train(tmp_path, eval={"at_start": False, "every_steps": 4}, max_steps=5)
    assert [row["version"] for row in rows_of_kind(run_dir, "eval")] == [4, 5]
    assert [row["version"] for row in rows_of_kind(run_dir, "checkpoint")] == [2, 4, 5]


def test_gradients_that_stay_infinite_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer.optimizer import PolicyOptimizer

    bad = UpdateResult(math.inf, 1.0, is_applied=False)
    monkeypatch.setattr(PolicyOptimizer, "update", lambda self, step, **_: bad)
    with pytest.raises(PolicyDiverged, match="3 steps in a row, up to step 3"):
        train(tmp_path)


def test_a_model_without_an_end_of_sequence_token_is_refused(tmp_path: Path) -> None:
    import json

    run_dir = train(tmp_path, max_steps=1)
    folder = run_dir / "final"
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        file = folder / name
        if file.is_file():
            known = json.loads(file.read_text())
            known.pop("eos_token", None)
            file.write_text(json.dumps(known))
    (tmp_path / "next").mkdir()
    spec = make_spec(tmp_path / "next", model={"path": str(folder)})
    with pytest.raises(UserError, match=r"final: the tokenizer has no end-of-sequence token"):
        OfflineTraining(spec).run()


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    from tiny_offline import INIT

    train(tmp_path, max_steps=2)
    other = {"init": {**INIT, "hidden_size": 32}, "tokenizer": "characters:running_sum"}
    (tmp_path / "run" / "start").rename(tmp_path / "old")
    with pytest.raises(UserError, match="the checkpoint has a different architecture"):
        OfflineTraining(make_spec(tmp_path, model=other)).run()


def test_the_port_counts_skipped_updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "MAX_BAD_UPDATES", 99)
    from trainer.optimizer import PolicyOptimizer

    plain = PolicyOptimizer.update
    bad = UpdateResult(math.inf, 1.0, is_applied=False)
    monkeypatch.setattr(
        PolicyOptimizer, "update", lambda self, step, **options: bad if step == 2 else plain(self, step, **options)
    )
    run_dir = train(tmp_path)
    assert [row["skipped_updates"] for row in rows_of_kind(run_dir, "step")] == [0, 1, 0, 0, 0, 0]
