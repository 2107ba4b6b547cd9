"""Ten set-ups with one planted fault each, and a sound one: a tiny model, the embedded engine, the trainer's passes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from areal_like.config import ModelSettings
from areal_like.probe_files import LogprobSpec, ProbeAnswers, ProbeSpec, TryVerdict
from areal_like.weights.weight_store import WeightStore
from areal_like.wire.messages import Sampling
from controller.data.gold_answers import gold_answers
from controller.probe.finding import GoldTry, Seen
from controller.probe.findings import find
from controller.probe.page import as_json, as_text
from rollout.probe_answers import answers_to
from services.reward.composition import Part, WeightedSum
from services.reward.job import Job
from services.reward.scorers.port import ScorerInput
from trainer.config import SftSettings
from trainer.model.tokenizers import byte_tokenizer
from trainer.prepare import prepare
from trainer.prepare_spec import PrepareSpec
from trainer.probe_logprobs import logprobs_of

INIT: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
PROMPTS = [f"{a}+{b}=" for a in range(10) for b in range(10)]
ROWS = [{"prompt": prompt, "answer": "7", "origin": "3+3"} for prompt in PROMPTS[:4]]
SAMPLING = Sampling(max_new_tokens=6)
SETTINGS = {"engine": {"device": "cpu", "num_slots": 32, "max_context": 64}}


class Function:
    """A scorer made of a function of row and response."""

    version = "1"

    def __init__(self, function: Callable[[Mapping[str, Any], str], float]) -> None:
        self._function = function

    def warm_up(self) -> None:
        """Nothing to load."""

    def score(self, sample: ScorerInput) -> Mapping[str, Any]:
        return {"value": self._function(sample.row, sample.response)}


def right(row: Mapping[str, Any], response: str) -> float:
    return float(response.strip() == row["answer"])


@dataclass(frozen=True)
class Model:
    """A prepared model and its version 0."""

    folder: Path
    manifest: Path


def make(root: Path, responses: tuple[str, ...], *, seed: int = 1, tokenizer: str = "characters:running_sum") -> Model:
    """A model that answers every prompt with one of `responses`, with equal probability."""
    rows = [{"prompt": prompt, "response": text} for prompt in PROMPTS for text in responses]
    root.mkdir()
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare(
        PrepareSpec(
            run_id="t",
            parent_pid=os.getpid(),
            seed=seed,
            model=ModelSettings(init=INIT, tokenizer=tokenizer),
            out_dir=str(root / "model"),
            publish_to=str(root / "weights"),
            sft_rows=str(root / "rows.jsonl"),
            sft=SftSettings.model_validate(
                {
                    "device": "cpu",
                    "steps": 80,
                    "batch_size": 32,
                    "optimizer": {"lr": 0.01, "warmup_steps": 0, "schedule": "constant"},
                }
            ),
        )
    )
    manifest = WeightStore(root / "weights", "disk", keep=2).newest()
    assert manifest is not None
    return Model(root / "model", manifest)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make(tmp_path_factory.mktemp("probe") / "halves", ("7", "8"))


def copy_of(model: Model, folder: Path) -> Path:
    return Path(shutil.copytree(model.folder, folder))


def order_of(model: Model, folder: Path, **changes: Any) -> ProbeSpec:
    """folder: of config and tokenizer."""
    return ProbeSpec(
        model_dir=str(folder), tokenizer="from_model", dtype="float32", manifest=str(model.manifest), rows=ROWS, seed=1,
        num_threads=1, startup_timeout_s=60.0, **changes,
    )  # fmt: skip


def look(
    model: Model,
    score: Callable[[Mapping[str, Any], str], float] = right,
    *,
    folder: Path | None = None,
    trained: Path | None = None,
    sampling: Sampling = SAMPLING,
    template: str | None = None,
    **seen: Any,
) -> Seen:
    """What a probe sees. folder: of config and tokenizer; trained: of the trainer's weights; both the model's."""
    settings = {**SETTINGS, "prompt_template": template}
    order = order_of(model, folder or model.folder, settings=settings, sampling=sampling, num_samples=8)
    assert msgspec.json.decode(msgspec.json.encode(order), type=ProbeSpec) == order
    sampled = asyncio.run(answers_to(order))
    scorers = WeightedSum((Part("mine", 1.0, Function(score)),))
    verdicts = [verdict(scorers, ROWS[one.row], one.text) for one in sampled.answers]
    gold = [GoldTry(*one, verdict(scorers, ROWS[one[0]], one[2])) for one in gold_answers(ROWS)]
    logprobs = logprobs_of(
        LogprobSpec(
            model_dir=str(trained or model.folder),
            device="cpu",
            precision="float32",
            attention="auto",
            temperature=sampling.temperature,
            num_threads=1,
            sequences=[(one.prompt_P, one.tokens_R) for one in sampled.answers[:8]],
        )
    )
    return Seen(ROWS, sampled, sampling, verdicts, gold, logprobs, prompt_template=template, **seen)


def verdict(scorers: WeightedSum, row: dict[str, Any], response: str) -> TryVerdict:
    job = Job(job_id=1, scorer="", row=row, response=response, finish_reason="stop", num_tokens=1)
    outcome = scorers.score(job, lambda name: None)
    return TryVerdict(kind=outcome.kind, value=outcome.value, correct=None, reason=outcome.reason)


def kinds(seen: Seen) -> list[str]:
    return [finding.kind for finding in find(seen)]


# ---------------------------------------------------------------- sound


def test_sound_setup_has_no_finding_and_its_numbers_are_right(model: Model) -> None:
    seen = look(model)
    assert kinds(seen) == []
    assert seen.pass_rate is not None
    assert 0.2 < seen.pass_rate < 0.8
    assert seen.signal_share == 1.0
    assert seen.cut_share == 0.0
    assert seen.gold_values["answer"] == [1.0, 1.0, 1.0]
    assert seen.logprob_difference is not None
    assert seen.logprob_difference[1] < 1e-4


def test_model_before_its_warm_start_is_not_called_too_hard(model: Model) -> None:
    seen = look(model, lambda row, response: float(response == "7" * 6))
    gold = GoldTry(0, "answer", "7", TryVerdict(kind="scored", value=1.0, correct=None, reason=""))
    assert kinds(replace(seen, gold=[gold])) == ["too_hard"]
    assert "has random weights" in find(replace(seen, gold=[gold], is_untrained=True))[0].sentence
    assert kinds(replace(seen, gold=[gold], is_untrained=True, warm_start_follows=True)) == []


# ---------------------------------------------------------------- one planted fault each


def test_template_of_another_model_is_named(tmp_path: Path) -> None:
    spelled = make(tmp_path / "bytes", ("7", "8"), tokenizer="bytes")
    found = find(look(spelled, template="<|user|>{prompt}<|assistant|>"))
    assert [one.kind for one in found] == ["template"]
    assert "<|assistant|> <|user|>" in found[0].sentence


def test_template_that_replaces_the_chat_template_is_named_where_nothing_ends(model: Model) -> None:
    seen = look(model, template="{prompt}", sampling=replace_sampling(max_new_tokens=1))
    sampled = replace_struct(seen.sampled, has_chat_template=True)
    assert kinds(replace(seen, sampled=sampled)) == ["template"]


def test_end_of_sequence_that_does_not_end_is_named(model: Model, tmp_path: Path) -> None:
    folder = copy_of(model, tmp_path / "model")
    for name in ("generation_config.json", "config.json"):
        config = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**config, "eos_token_id": 0}))
    found = find(look(model, folder=folder))
    assert [one.kind for one in found] == ["end_of_sequence"]
    assert "<eos>" in found[0].sentence


def test_reward_that_is_always_zero_is_named(model: Model) -> None:
    assert kinds(look(model, lambda row, response: 0.0)) == ["reward_zero"]


def test_reward_on_the_wrong_column_is_named_with_the_column(model: Model) -> None:
    found = find(look(model, lambda row, response: float(response == row["origin"])))
    assert [one.kind for one in found] == ["reward_column"]
    assert "`origin`" in found[0].sentence


def test_column_that_the_samples_agree_with_is_named(model: Model) -> None:
    seen = look(model, lambda row, response: float(response == "9"))
    gold = GoldTry(0, "answer", "9", TryVerdict(kind="scored", value=1.0, correct=None, reason=""))
    rows = [{**row, "answer": "9", "final": 7, "note": None} for row in ROWS]
    found = find(replace(seen, rows=rows, gold=[gold]))
    assert [one.kind for one in found] == ["reward_column"]
    assert "`final`" in found[0].sentence


def test_column_that_is_missing_is_named_by_the_scorers_words(model: Model) -> None:
    found = find(look(model, lambda row, response: float(response == row["target"])))
    assert [one.kind for one in found] == ["reward_column"]
    assert "target" in found[0].sentence


def test_answers_cut_at_length_are_named(tmp_path: Path) -> None:
    long = make(tmp_path / "long", ("1234567", "7654321"))
    found = find(look(long))
    assert [one.kind for one in found] == ["length"]
    assert "6 tokens" in found[0].sentence


def test_groups_of_equal_rewards_are_named(model: Model) -> None:
    assert kinds(look(model, lambda row, response: 1.0)) == ["equal_groups"]


def test_greedy_sampling_is_named(model: Model) -> None:
    found = find(look(model, sampling=replace_sampling(temperature=0.01)))
    assert [one.kind for one in found] == ["greedy"]
    assert "temperature" in found[0].sentence


def test_tokenizer_of_another_model_is_named(model: Model, tmp_path: Path) -> None:
    folder = copy_of(model, tmp_path / "model")
    byte_tokenizer().save_pretrained(str(folder))
    assert kinds(look_at_prompts(model, folder)) == ["tokenizer"]


def test_tokenizer_in_which_the_end_of_sequence_is_an_ordinary_token_is_named(model: Model, tmp_path: Path) -> None:
    folder = copy_of(model, tmp_path / "model")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    words["<eos>"], words["7"] = words["7"], words["<eos>"]
    for token in tokenizer["added_tokens"]:
        token["id"] = words[token["content"]]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("added_tokens_decoder", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    found = find(look(model, folder=folder))
    assert found[0].kind == "tokenizer"
    assert "token is 7, which is an ordinary token" in found[0].sentence


def test_prompts_that_are_too_hard_are_named(model: Model) -> None:
    def score(row: Mapping[str, Any], response: str) -> float:
        return float(response == "\\boxed{7}")

    assert kinds(look(model, score)) == ["too_hard"]


def test_engine_and_trainer_with_different_weights_are_named(model: Model, tmp_path: Path) -> None:
    other = make(tmp_path / "other", ("7", "8", "1", "2"), seed=2)
    assert kinds(look(model, trained=other.folder)) == ["logprobs"]


def look_at_prompts(model: Model, folder: Path) -> Seen:
    """As `look`, where no prompt reaches the engine."""
    order = order_of(model, folder, settings=SETTINGS, sampling=SAMPLING, num_samples=2)
    return Seen(ROWS, asyncio.run(answers_to(order)), SAMPLING)


def replace_sampling(**changes: Any) -> Sampling:
    return msgspec.structs.replace(SAMPLING, **changes)


def replace_struct(sampled: ProbeAnswers, **changes: Any) -> ProbeAnswers:
    return msgspec.structs.replace(sampled, **changes)


# ---------------------------------------------------------------- what is shown


def test_page_and_json_show_the_same_cause_with_samples(model: Model) -> None:
    seen = look(model, lambda row, response: 0.0)
    found = find(seen)
    text, page = as_text("mine", seen, found, ["a remark"]), json.loads(as_json("mine", seen, found, ["a remark"]))
    assert found[0].sentence in text
    assert found[0].remedy in text
    assert "note: a remark" in text
    assert page["findings"][0]["kind"] == "reward_zero"
    assert len(page["samples"]) == 5
    assert page["pass_rate"] == 0.0
