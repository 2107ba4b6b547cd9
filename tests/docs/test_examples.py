"""Code of a user's own, as the pages show it, is used as a run would use it: imported by its path, checked, called."""

from __future__ import annotations

import ast
import asyncio
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from shown_commands import DOCS, PAGES, texts

from areal_like.environment import as_step
from areal_like.import_path import import_object
from areal_like.trajectory import Segment
from areal_like.verdict import Verdict
from areal_like.weights.transfer import TransferDescriptor
from controller.config.data_settings import DataSource
from controller.data.sources import read_source
from controller.telemetry.callbacks import open_callbacks
from rollout.check_workflow import check as check_workflow
from rollout.transcript import Answer
from rollout.workflow import load_workflow
from services.environment.loading import check_environment, find_environment
from services.reward.scorers.port import ScorerInput
from services.reward.scorers.user_function import UserFunctionScorer
from trainer.check_objectives import check_objective
from trainer.config import AdvantageSettings, LossSettings
from trainer.objectives.advantage import advantages, advantages_of, rewarded, targets_of
from trainer.objectives.own_code import own_advantage, own_correction, own_objective
from trainer.objectives.port import Sequences, TokenInputs
from trainer.objectives.registry import loss_of

EXTENDING = DOCS / "extending.md"
LENGTHS = [2, 3]
NUM = sum(LENGTHS)


def python_of(page: Path, words: str) -> str:
    """The one example of the page with these words in it."""
    (found,) = [text for text in texts(page, "python") if words in text]
    return found


def yaml_of(page: Path, words: str) -> Any:
    """The one configuration of the page with these words in it."""
    (found,) = [text for text in texts(page, "yaml") if words in text]
    return yaml.safe_load(found)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's folder, which the job is started from."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in [name for name in sys.modules if name not in before and name.startswith("my_")]:
        del sys.modules[name]
    for cached in (own_objective, own_correction, own_advantage):
        cached.cache_clear()


def tokens() -> tuple[torch.Tensor, TokenInputs, dict[str, np.ndarray]]:
    """Five tokens of two sequences: current log-probs, the inputs of a loss, and the same as arrays."""
    rng = np.random.default_rng(0)
    x = {"c": rng.normal(-2, 1, NUM), "p": rng.normal(-2, 1, NUM), "b": rng.normal(-2, 1, NUM)}
    x |= {"A": np.repeat([1.0, -0.5], LENGTHS)}
    c, p, b, a = (torch.from_numpy(one) for one in x.values())
    sequences = Sequences(torch.repeat_interleave(torch.arange(2), torch.tensor(LENGTHS)), 2)
    inputs = TokenInputs(b, a, 0 * a, a * 0 + 0.2, proximal_N=p, sequences=sequences, current_N=c, drift_N=p - b)
    return c, inputs, x


def means(values: np.ndarray) -> np.ndarray:
    """The mean of each sequence, at each of its tokens."""
    return np.repeat([part.mean() for part in np.split(values, np.cumsum(LENGTHS)[:-1])], LENGTHS)


# ---------------------------------------------------------------- docs/extending.md


def test_the_loss_of_the_page_is_truncated_importance_sampling(folder: Path) -> None:
    (folder / "my_losses.py").write_text(python_of(EXTENDING, "def my_loss("))
    section = yaml_of(EXTENDING, '"my_losses:my_loss"')["trainer"]["loss"]
    check_objective(section["kind"], {"of": "loss", **LossSettings.model_validate(section).model_dump(mode="json")})
    chosen = loss_of(LossSettings.model_validate({**section, "options": {"bound": 1.2}}))
    c, inputs, x = tokens()
    found = chosen.objective.loss(c, inputs, chosen.options).policy_N
    expected = -np.minimum(np.exp(x["c"] - x["p"]), 1.2) * x["A"] * x["c"]
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_the_objective_of_the_page_reports_its_metrics(folder: Path) -> None:
    (folder / "my_losses.py").write_text(python_of(EXTENDING, "my_loss = Objective("))
    section = yaml_of(EXTENDING, '"my_losses:my_loss"')["trainer"]["loss"]
    check_objective(section["kind"], {"of": "loss", **LossSettings.model_validate(section).model_dump(mode="json")})
    chosen = loss_of(LossSettings.model_validate({**section, "options": {"bound": 1.1}}))
    assert chosen.needs.sequences
    c, inputs, x = tokens()
    found = chosen.objective.loss(c, inputs, chosen.options)
    ratio = np.exp(means(x["c"] - x["p"]))
    np.testing.assert_allclose(found.policy_N, -np.minimum(ratio, 1.1) * x["A"], rtol=1e-9)
    assert found.token_metrics["clip_fraction"].tolist() == (ratio > 1.1).tolist()
    np.testing.assert_allclose(found.sequence_metrics["sequence_ratio"], ratio[[0, LENGTHS[0]]], rtol=1e-9)


def test_the_correction_of_the_page_keeps_near_sequences(folder: Path) -> None:
    (folder / "my_losses.py").write_text(python_of(EXTENDING, "def near("))
    section = yaml_of(EXTENDING, '"my_losses:near"')["trainer"]["loss"]
    settings = LossSettings.model_validate(section)
    check_objective(settings.corrections[0].kind, {"of": "loss", **settings.model_dump(mode="json")})
    ((correction, options),) = loss_of(settings).corrections
    _, inputs, x = tokens()
    kept = correction.factor(inputs, options)
    bound = section["corrections"][0]["options"]["bound"]
    assert kept.tolist() == (np.abs(means(x["p"] - x["b"])) <= bound).tolist()


def test_the_advantage_of_the_page_is_discounted_backwards(folder: Path) -> None:
    (folder / "my_advantages.py").write_text(python_of(EXTENDING, "def discounted("))
    settings = AdvantageSettings.model_validate(
        yaml_of(EXTENDING, '"my_advantages:discounted"')["trainer"]["advantage"]
    )
    check_objective(settings.kind, {"of": "advantage", **settings.model_dump(mode="json")})
    found = advantages(np.array([1.0, 0.0]), np.array([0, 0]), LENGTHS, settings)
    np.testing.assert_allclose(found, [0.5 * 0.99, 0.5, -0.5 * 0.99**2, -0.5 * 0.99, -0.5], rtol=1e-6)


def test_the_advantage_with_targets_of_the_page_is_one_step_ahead(folder: Path) -> None:
    (folder / "my_advantages.py").write_text(python_of(EXTENDING, '"one_step"'))
    settings = AdvantageSettings(kind="my_advantages:mine")
    check_objective(settings.kind, {"of": "advantage", "has_critic": True, **settings.model_dump(mode="json")})
    values = np.array([0.5, 0.4, 0.1, 0.3, 0.6])
    samples = replace(rewarded(np.array([1.0, 2.0]), np.array([0, 0]), LENGTHS, settings), values_N=values)
    targets = np.array([0.4, 1.0, 0.3, 0.6, 2.0])  # the next value, and at the end the reward
    np.testing.assert_allclose(targets_of(samples, settings), targets, rtol=1e-6)
    np.testing.assert_allclose(advantages_of(samples, settings), targets - values, rtol=1e-6)


def test_the_descriptor_of_the_page_is_one(folder: Path) -> None:
    (folder / "my_transfer").mkdir()
    (folder / "my_transfer" / "descriptor.py").write_text(python_of(EXTENDING, "MINE = TransferDescriptor("))
    kind = yaml_of(EXTENDING, '"my_transfer.descriptor:MINE"')["trainer"]["weights"]["kind"]
    found = import_object(kind, "trainer.weights.kind")
    assert isinstance(found, TransferDescriptor)
    assert found.name == "mine"
    assert found.cannot_send_deltas is not None
    assert found.cannot_send_deltas.remedy == "delta: null"


def test_the_callback_of_the_page_adds_a_number(folder: Path) -> None:
    (folder / "my_module.py").write_text(python_of(EXTENDING, "class MyCallback"))
    assert 'callbacks: ["my_module:MyCallback"]' in EXTENDING.read_text()
    (callback,) = open_callbacks(["my_module:MyCallback"], timeout_s=300.0)
    callback.write({"kind": "step", "time_s": 5.0, "step": 3, "reward_mean": 0.5, "tokens": 4})
    (row,) = callback.take_rows()
    assert row["callback/MyCallback/reward_per_token"] == 0.125
    callback.write({"kind": "eval", "time_s": 5.0, "version": 3})
    assert (callback.take_rows(), callback.end({}), callback.refusal()) == ([], "", "")


# ---------------------------------------------------------------- the other pages


@pytest.mark.parametrize(
    ("words", "options", "expected"),
    [
        ("# my_rewards.py", {}, {"value": 1.0}),
        ('"brevity": brief', {"max_tokens": 10}, {"value": 1.05, "correct": 1.0, "brevity": 0.5}),
    ],
)
def test_the_scorers_of_the_page_give_what_they_say(
    folder: Path, words: str, options: dict[str, Any], expected: dict[str, float]
) -> None:
    (folder / "my_rewards.py").write_text(python_of(DOCS / "rewards.md", words))
    scorer = UserFunctionScorer("my_rewards:score", options)
    sample = ScorerInput(row={"answer": "4"}, response="so it is 4", finish_reason="stop", num_tokens=5)
    assert scorer.score(sample) == pytest.approx(expected)


class Guessing:
    """The tools of a sample whose policy says these lines."""

    def __init__(self, *lines: str) -> None:
        self.lines = list(lines)
        self.tokens = SimpleNamespace(
            prompt=lambda row: self.encode(row["prompt"]), encode=self.encode,
            decode=lambda ids: "".join(chr(one) for one in ids), max_context=100,
        )  # fmt: skip

    def encode(self, text: str) -> np.ndarray:
        return np.array([ord(one) for one in text], np.int32)

    async def generate(self, transcript: Any, *, max_new_tokens: int, stop_token_ids: Any) -> Answer:
        ids = self.encode(self.lines.pop(0))
        assert len(ids) <= max_new_tokens
        segment = Segment(ids, np.full(len(ids), -1.0, np.float32), np.zeros(len(ids), np.int32))
        ended_by: Any = "stop_token" if ids[-1] == stop_token_ids[0] else "length"
        return Answer(segment=segment, finish_reason="stop", ended_by=ended_by, stop_token=int(ids[-1]))

    def verdict(self, value: float, *, components: dict[str, float]) -> Verdict:
        return Verdict(kind="scored", value=value, components=components)


@pytest.mark.parametrize(
    ("lines", "text", "value"),
    [(("9?", "4?", "7?"), "N=9?>4?<7?=", 1 / 3), (("9?", "1234"), "N=9?>1234", 0.0), (("x?",) * 2, "N=x?!x?!", 0.0)],
)
def test_the_workflow_of_the_page_plays_its_game(folder: Path, lines: tuple[str, ...], text: str, value: float) -> None:
    (folder / "my_workflow.py").write_text(python_of(DOCS / "api" / "workflows.md", "class GuessTheNumber"))
    options = {"most_guesses": len(lines)}
    check_workflow("my_workflow:GuessTheNumber", {"options": options, "models": []})
    workflow = load_workflow("my_workflow:GuessTheNumber", options)
    tools, task = Guessing(*lines), SimpleNamespace(row={"prompt": "N=", "secret": 7})
    sample = asyncio.run(workflow.run(task, tools))  # type: ignore[arg-type]
    assert (sample.response_text, sample.verdict.value) == (text, value)
    sampled = "".join(lines)
    assert tools.tokens.decode(sample.trajectory.tokens_T[sample.trajectory.loss_mask_T]) == sampled


def test_the_environment_of_the_page_ends_at_its_end(folder: Path) -> None:
    (folder / "my_env.py").write_text(python_of(DOCS / "api" / "environments.md", "class Corridor"))
    check_environment("my_env:Corridor", {"length": 2})
    episode = find_environment("my_env:Corridor", {"length": 2})()
    first = as_step(episode.reset({}, 1), is_reset=True, max_bytes=100)
    steps = [as_step(episode.step(one), is_reset=False, max_bytes=100) for one in ("forward", "?", "forward")]
    assert [one.observation for one in (first, *steps)] == [
        " You are at 0 of 2.", "You are at 1.", "You are at 1.", "You are at 2.",
    ]  # fmt: skip
    assert [(one.reward, one.is_done) for one in steps] == [(-0.01, False), (-0.01, False), (1.0, True)]


def test_the_generator_of_the_page_gives_the_same_rows_again(folder: Path) -> None:
    (folder / "my_rows.py").write_text(python_of(DOCS / "data.md", "# my_rows.py"))
    section = yaml_of(DOCS / "data.md", '"my_rows:rows"')["data"]["train"]
    source = DataSource.model_validate({**section, "limit": 3})
    found = [list(read_source(source, key="data.train", split="train", seed=seed)) for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]
    for row in found[0]:
        assert sum(int(one) for one in row["prompt"].removesuffix("=").split("+")) == int(row["answer"])
    assert len(found[0]) == 3


@pytest.mark.parametrize("page", [page for page in PAGES if any(texts(page, "python"))], ids=lambda page: page.stem)
def test_every_example_in_python_compiles(page: Path) -> None:
    for text in texts(page, "python"):
        compile(text, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
