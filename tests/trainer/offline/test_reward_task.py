"""Claims about reward models: they learn preferences, and scorer `reward_model` gives the trained score."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from tiny_offline import CHATML, INIT, make_spec, rows_of_kind, run_until, write_rows

from areal_like.errors import UserError
from services.reward.scorer_options import RewardModelOptions
from services.reward.scorers.port import ScorerInput
from services.reward.scorers.reward_model import RewardModelScorer
from trainer.model.tokenizers import build_tokenizer
from trainer.offline.loop import OfflineTraining
from trainer.offline.reward_task import TextEncoder
from trainer.offline.rows import Demonstration, Pair
from trainer.sft import SequenceTooLong


def preferences(num: int, first: int = 0) -> list[dict[str, str]]:
    return [
        {"prompt": f"{n % 10}+{n // 10}=", "chosen": str(n % 10), "rejected": str((n + 3) % 10)}
        for n in range(first, first + num)
    ]


def train(tmp_path: Path, **changes: Any) -> Path:
    if "data" not in changes:
        changes["data"] = {
            "train": write_rows(tmp_path / "train.jsonl", preferences(10)),
            "eval": write_rows(tmp_path / "eval.jsonl", preferences(6, 20)),
        }
    spec = make_spec(tmp_path, objective="reward_model", **changes)
    OfflineTraining(spec).run()
    return Path(spec.run_dir)


def sample(row: dict[str, Any], response: str) -> ScorerInput:
    return ScorerInput(row=row, response=response, finish_reason="stop", num_tokens=len(response))


def score(folder: Path, row: dict[str, Any], response: str) -> float:
    scorer = RewardModelScorer(RewardModelOptions(path=str(folder)))
    return float(scorer.score(sample(row, response))["value"])


def test_preferences_are_learnt_from_an_indifferent_start(tmp_path: Path) -> None:
    run_dir = train(tmp_path, epochs=10)
    before, after = rows_of_kind(run_dir, "eval")
    assert before["loss"] == pytest.approx(0.6931, abs=1e-4)
    assert (before["accuracy"], before["margin"]) == (0.5, 0.0)
    assert after["accuracy"] > 0.9
    assert after["loss"] < 0.5


def test_the_scorer_gives_the_scores_of_the_last_evaluation(tmp_path: Path) -> None:
    run_dir = train(tmp_path, epochs=4)
    scorer = RewardModelScorer(RewardModelOptions(path=str(run_dir / "final")))
    margins = []
    for row in preferences(6, 20):
        answers = (row["chosen"], row["rejected"])
        chosen, rejected = (scorer.score(sample({"prompt": row["prompt"]}, one)) for one in answers)
        margins.append(chosen["value"] - rejected["value"])
    after = rows_of_kind(run_dir, "eval")[-1]
    assert sum(margins) / 6 == pytest.approx(after["margin"], abs=1e-5)
    assert sum(margin > 0 for margin in margins) / 6 == after["accuracy"]


def test_a_conversation_is_scored_as_the_scorer_reads_it(tmp_path: Path) -> None:
    tokenizer = build_tokenizer("bytes", None)
    tokenizer.chat_template = CHATML
    folder = tmp_path / "tokenizer"
    tokenizer.save_pretrained(str(folder))
    user = {"role": "user", "content": "q"}
    texts = (("ab", "ba"), ("cd", "dc"), ("ef", "fe"))
    answers = [[{"role": "assistant", "content": text} for text in pair] for pair in texts]
    rows = [{"prompt": [user], "chosen": [chosen], "rejected": [rejected]} for chosen, rejected in answers]
    data = {name: write_rows(tmp_path / f"{name}.jsonl", rows) for name in ("train", "eval")}
    model = {"init": {**INIT, "max_position_embeddings": 64}, "tokenizer": str(folder)}
    run_dir = train(tmp_path, data=data, model=model, epochs=3)
    margin = sum(
        score(run_dir / "final", {"messages": [user]}, c) - score(run_dir / "final", {"messages": [user]}, r)
        for c, r in texts
    )
    assert margin != 0.0
    assert margin / 3 == pytest.approx(rows_of_kind(run_dir, "eval")[-1]["margin"], abs=1e-5)


def test_a_resumed_reward_model_ends_with_the_same_bits(tmp_path: Path) -> None:
    digests = []
    for name, stops in (("whole", ()), ("parts", (1, 4))):
        (tmp_path / name).mkdir()
        data = {"train": write_rows(tmp_path / "rows.jsonl", preferences(10))}
        spec = make_spec(tmp_path / name, objective="reward_model", data=data)
        for step in stops:
            run_until(spec, step)
        OfflineTraining(spec).run()
        weights = Path(spec.run_dir) / "final" / "model.safetensors"
        digests.append(hashlib.sha256(weights.read_bytes()).hexdigest())
    assert digests[0] == digests[1]


def test_a_tokenizer_that_is_not_the_trained_one_is_refused(tmp_path: Path) -> None:
    folder = train(tmp_path, max_steps=1) / "final"
    build_tokenizer("characters:tool_sum", None).save_pretrained(str(folder))
    with pytest.raises(
        UserError, match=r"final: the tokenizer differs from the one that the reward model was trained with"
    ):
        RewardModelScorer(RewardModelOptions(path=str(folder)))


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    folder = train(tmp_path, max_steps=1) / "final"
    build_tokenizer("bytes", None).save_pretrained(str(folder))
    (folder / "reward_model.json").unlink()  # as of a reward model from elsewhere
    with pytest.raises(UserError, match=r"has 259 tokens, but the vocabulary of the model has only 18"):
        RewardModelScorer(RewardModelOptions(path=str(folder))).warm_up()


def test_an_answer_the_tokenizer_cannot_express_is_not_judged(tmp_path: Path) -> None:
    from services.reward.scorers.port import CannotJudge

    folder = train(tmp_path, max_steps=1) / "final"
    with pytest.raises(CannotJudge, match="the tokenizer cannot encode the text"):
        score(folder, {"prompt": "1="}, "x")


def test_an_exported_checkpoint_is_the_reward_model(tmp_path: Path) -> None:
    from trainer.checkpoints.checkpoint import latest
    from trainer.checkpoints.convert import export_checkpoint

    run_dir = train(tmp_path, epochs=1)
    newest = latest(run_dir)
    assert newest is not None
    export_checkpoint(newest, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]
    row = {"prompt": "1="}
    assert score(tmp_path / "out", row, "1") == score(run_dir / "final", row, "1")


def pair(chosen: str, rejected: str) -> Pair:
    answers = (Demonstration("f:3", {"prompt": "1", "response": one}) for one in (chosen, rejected))
    return Pair("f:3", *answers)


def test_rows_that_cannot_be_scored_are_named(tmp_path: Path) -> None:
    tokenizer = build_tokenizer("characters:running_sum", None)
    encoder = TextEncoder(tokenizer, max_tokens=5)
    assert [tokens.tolist() for tokens in encoder.item(pair("23", "4")).tokens_S] == [[1, 4, 5, 6], [1, 4, 7]]
    with pytest.raises(SequenceTooLong, match=r"f:3: prompt and answer have 6 tokens, but the limit is 5"):
        encoder.item(pair("2345", "6"))
    with pytest.raises(UserError, match=r"f:3: the tokenizer cannot encode the row"):
        encoder.item(pair("x", "1"))
    with pytest.raises(UserError, match=r"f:3: `chosen` and `rejected` have the same tokens"):
        encoder.item(pair("2<pad>", "2"))
    turns = Demonstration("f:3", {"messages": [{"role": "assistant", "content": "1"}]})
    with pytest.raises(UserError, match=r"f:3: the row has messages but the tokenizer has no chat template"):
        encoder.item(Pair("f:3", turns, turns))
