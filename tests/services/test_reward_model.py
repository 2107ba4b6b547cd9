"""Scorer `reward_model`: a classifier loaded from a folder, its batches, its steps; in this process and in its own."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_classifier import save_classifier
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

from areal_like.errors import UserError
from services.reward.classifier import Classifier
from services.reward.composition import WeightedSum
from services.reward.config import ScorerSettings
from services.reward.job import Job, Outcome
from services.reward.make_scorer import make_scorer
from services.reward.model_wire import Item, Scores
from services.reward.scorer_options import RewardModelOptions
from services.reward.scorers.port import ScorerInput
from services.reward.scorers.reward_model import RewardModelScorer, reduced

ROW = {"prompt": "2+2? "}


@pytest.fixture(scope="module")
def one_class(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier(tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def two_classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier(tmp_path_factory.mktemp("two"), num_labels=2)


@pytest.fixture(scope="module")
def per_token(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier(tmp_path_factory.mktemp("tokens"), num_labels=2, per_token=True)


def score(folder: Path, response: str, row: dict[str, Any] = ROW, **options: Any) -> Outcome:
    settings = ScorerSettings(kind="reward_model", options={"path": str(folder), **options})
    job = Job(job_id=1, scorer="", row=row, response=response, finish_reason="stop", num_tokens=3)
    return WeightedSum.from_settings((settings,)).score(job, lambda name: None)


def logits(folder: Path, text: str, kind: Any = AutoModelForSequenceClassification) -> torch.Tensor:
    """Straight through transformers, one text at a time."""
    tokenizer, model = loaded(folder, kind)
    with torch.inference_mode():
        return model(input_ids=tokenizer(text, return_tensors="pt").input_ids).logits[0].double()


@cache
def loaded(folder: Path, kind: Any) -> tuple[Any, Any]:
    return AutoTokenizer.from_pretrained(folder), kind.from_pretrained(folder)


def test_the_score_is_the_models_logit(one_class: Path) -> None:
    outcome = score(one_class, "it is 4")
    assert outcome.value == pytest.approx(logits(one_class, "2+2? it is 4").item(), abs=1e-5)
    assert score(one_class, "it is 5").value != outcome.value


def test_a_text_scores_the_same_in_any_company(one_class: Path) -> None:
    texts = ["a", "some words", "x" * 100, "2+2? it is 4", "z" * 7, "some words"]
    classifier = Classifier(RewardModelOptions(path=str(one_class), max_batch=4))
    together = [scores.values[0] for scores in classifier.score([Item(text=text) for text in texts])]
    alone = [logits(one_class, text).item() for text in texts]
    assert together == pytest.approx(alone, abs=1e-5)


def test_a_probability_of_a_class_by_number_or_name(two_classes: Path, one_class: Path) -> None:
    wanted = logits(two_classes, "2+2? 4").softmax(-1)[1].item()
    assert score(two_classes, "4", label=1, output="probability").value == pytest.approx(wanted, abs=1e-5)
    assert score(two_classes, "4", label="LABEL_1", output="probability").value == pytest.approx(wanted, abs=1e-5)
    wanted = logits(one_class, "2+2? 4").sigmoid().item()
    assert score(one_class, "4", output="probability").value == pytest.approx(wanted, abs=1e-5)


def test_the_text_is_the_templates(one_class: Path) -> None:
    row = {"prompt": "2+2?", "answer": "4"}
    outcome = score(one_class, "so: 4", row, template="{{ response }} vs {{ row.answer }}")
    assert outcome.value == pytest.approx(logits(one_class, "so: 4 vs 4").item(), abs=1e-5)
    assert score(one_class, "4", {"answer": "4"}, template="{{ prompt }}{{ response }}").kind == "invalid"
    assert score(one_class, "4", {"answer": "4"}).kind == "invalid"


def test_a_conversation_goes_through_the_chat_template(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path, chat=True)
    wanted = logits(folder, "[user]2+2?[end][assistant]it is 4[end]").item()
    assert score(folder, "it is 4", {"prompt": "2+2?"}).value == pytest.approx(wanted, abs=1e-5)
    row = {"messages": [{"role": "user", "content": "2+2?"}]}
    assert score(folder, "it is 4", row).value == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("how", ["min", "mean", "last", "prod"])
def test_steps_are_scored_up_to_their_end_and_kept(one_class: Path, how: str) -> None:
    outcome = score(one_class, "one\n\ntwo\n\nthree\n\n", step_separator="\n\n", reduce=how, output="probability")
    texts = ["2+2? one\n\n", "2+2? one\n\ntwo\n\n", "2+2? one\n\ntwo\n\nthree\n\n"]
    wanted = [logits(one_class, text).sigmoid().item() for text in texts]
    steps = [outcome.components[f"reward_model.step_{number}"] for number in (1, 2, 3)]
    assert steps == pytest.approx(wanted, abs=1e-5)
    assert outcome.value == pytest.approx(reduced(wanted, how), abs=1e-5)
    assert outcome.components["reward_model.num_steps"] == 3


def test_a_token_classifier_scores_each_step_at_its_last_token(per_token: Path) -> None:
    outcome = score(per_token, "one;two;", step_separator=";", label=1, reduce="mean", output="probability")
    probabilities = logits(per_token, "2+2? one;two;", AutoModelForTokenClassification).softmax(-1)[:, 1]
    begin = len("2+2? ")
    wanted = [probabilities[begin + 3].item(), probabilities[begin + 7].item()]
    assert [outcome.components[f"reward_model.step_{number}"] for number in (1, 2)] == pytest.approx(wanted, abs=1e-5)
    assert outcome.value == pytest.approx(sum(wanted) / 2, abs=1e-5)


@pytest.mark.parametrize(
    ("response", "ends"),
    [
        ("", [0]), ("abc", [3]), ("a;b", [2, 3]), ("a;b;", [2, 4]), ("a; ;b", [2, 5]), (";;a", [3]), (" ; ", [3]),
        ("a;b;c;d;e", [2, 4, 6, 9]),
    ],
)  # fmt: skip
def test_where_steps_end(one_class: Path, response: str, ends: list[int]) -> None:
    scorer = make_scorer(
        ScorerSettings(kind="reward_model", options={"path": str(one_class), "step_separator": ";", "max_steps": 4})
    )
    assert isinstance(scorer, RewardModelScorer)
    assert scorer._ends_of_steps(response) == ends


def test_a_long_text_is_cut_at_its_start_or_invalid(one_class: Path) -> None:
    outcome = score(one_class, "x" * 50 + "0123456789", max_tokens=10)
    assert outcome.value == pytest.approx(logits(one_class, "0123456789").item(), abs=1e-5)
    assert "the first 55 tokens were omitted" in outcome.reason
    assert "more than max_tokens 10" in score(one_class, "x" * 60, max_tokens=10, on_long="invalid").reason


def test_another_model_in_the_folder_is_another_version(tmp_path: Path) -> None:
    settings = ScorerSettings(kind="reward_model", options={"path": str(save_classifier(tmp_path / "m"))})
    before = make_scorer(settings).version
    assert make_scorer(settings).version == before
    (tmp_path / "m" / "model.safetensors").touch()
    assert make_scorer(settings).version != before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"path": "/nowhere/model"}, "there is no folder /nowhere/model"),
        ({"label": 2}, "no class 2"),
        ({"label": "good"}, "no class 'good'"),
        ({"template": "{{ prompt }}"}, "does not contain the answer"),
        ({"template": "{{ response"}, "not a valid Jinja template"),
        ({"step_separator": ";", "reduce": "prod"}, "product of logits"),
        ({"device": "tpu"}, "device"),
    ],
)
def test_what_cannot_work_is_reported_at_the_start(one_class: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        make_scorer(ScorerSettings(kind="reward_model", options={"path": str(one_class), **options}))
    assert words in str(caught.value)


def test_folders_that_are_no_classifiers_are_refused(tmp_path: Path, two_classes: Path, per_token: Path) -> None:
    def refusal(path: Path, **options: Any) -> str:
        settings = ScorerSettings(kind="reward_model", options={"path": str(path), **options})
        with pytest.raises(UserError) as caught:
            make_scorer(settings).warm_up()
        return str(caught.value)

    causal = save_classifier(tmp_path / "causal", causal=True)
    assert "Qwen3ForCausalLM, which is not a classifier" in refusal(causal)
    assert "but no class is chosen as the reward" in refusal(two_classes)
    assert "step_separator" in refusal(per_token, label=0)
    (tmp_path / "empty").mkdir()
    assert "no config.json" in refusal(tmp_path / "empty")
    # a language model whose config only says that it is a classifier: its head would be drawn at random
    config = json.loads((causal / "config.json").read_text())
    (causal / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForSequenceClassification"]}))
    assert "lacks weights (score.weight)" in refusal(causal, label=0)
    (causal / "model.safetensors").write_bytes(b"nothing")
    assert "cannot be loaded" in refusal(causal, label=0)
    (causal / "model.safetensors").unlink()
    assert "contains no weights" in refusal(causal, label=0)


def test_half_precision_is_the_same_score_but_for_rounding(one_class: Path) -> None:
    wanted = logits(one_class, "2+2? it is 4").item()
    assert score(one_class, "it is 4", dtype="bfloat16").value == pytest.approx(wanted, abs=0.02)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_gpu_gives_the_same_score_but_for_rounding(one_class: Path) -> None:
    wanted = logits(one_class, "2+2? it is 4").item()
    outcome = score(one_class, "it is 4", device="cuda", dtype="bfloat16")
    assert outcome.value == pytest.approx(wanted, abs=0.02)


@pytest.mark.parametrize(("how", "value"), [("min", 0.25), ("mean", 0.5), ("last", 0.5), ("prod", 0.09375)])
def test_steps_become_one_value(how: str, value: float) -> None:
    assert reduced([0.75, 0.25, 0.5], how) == value


def test_the_remark_names_the_most_tokens_that_were_left_out_of_a_step(one_class: Path) -> None:
    options = RewardModelOptions(path=str(one_class), step_separator="|", reduce="mean")
    scorer = RewardModelScorer(options)
    scorer._model = SimpleNamespace(
        score=lambda items: [Scores(values=[float(n)], num_cut=cut) for n, cut in zip(range(3), (0, 7, 2), strict=True)]
    )
    sample = ScorerInput(row=ROW, response="a|b|c", finish_reason="stop", num_tokens=3)
    assert scorer.score(sample)["remark"] == "the first 7 tokens were omitted"
