"""A backend of the user's, named by import path, trains: nothing of ours was edited for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from areal_like.config import ModelSettings, ProcessSpec, SamplingSettings, StalenessSettings
from areal_like.errors import UserError
from areal_like.weights.weight_store import open_payload
from trainer.backends.choice import choose_backend, make_backend
from trainer.backends.port import Setup
from trainer.config import TrainerSettings
from trainer.data.batch import PreparedBatch
from trainer.export import write_model
from trainer.model.attention import AttentionChoice
from trainer.model.tokenizers import build_tokenizer
from trainer.ranks import Ranks
from trainer.step import TrainStep, ready_model
from trainer.training import Training

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
TOY: dict[str, Any] = {"backend": "toy_backend.descriptor:TOY", "backend_options": {"lr": 0.25}}


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FIXTURES))


def step_of(model: PreTrainedModel, **settings: Any) -> TrainStep:
    config = TrainerSettings(**{"mini_batches": 1, **settings})
    setup = Setup(config, 1.0, num_steps=10, attention=AttentionChoice("sdpa", "test"), ranks=Ranks.alone())
    ready_model(model, setup)
    chosen = choose_backend(config, 1, torch.device("cpu"))
    return TrainStep(make_backend(chosen.descriptor, model, setup), setup, groups_per_step=3)


def gradient_of(step: TrainStep, prepared: PreparedBatch) -> dict[str, torch.Tensor]:
    step.policy.zero_grad()
    for micro_batch in prepared.mini_batches[0]:
        step._backward(micro_batch, None, is_last=False)
    return {name: p.grad.clone() for name, p in step.policy.model.named_parameters() if p.grad is not None}


def test_a_step_takes_the_gradient_that_plain_torch_takes_and_the_updates_of_its_own(
    tiny_model: Callable[..., PreTrainedModel], make_samples: Any
) -> None:
    plain, toy = step_of(tiny_model()), step_of(tiny_model(), **TOY)
    samples = make_samples((4, 4, 4))
    gradient = gradient_of(plain, plain.prepare(samples, version=3))
    metrics = toy.run(toy.prepare(samples, version=3))
    assert metrics["lr"] == 0.25
    before = dict(plain.policy.model.named_parameters())
    moved = 0.0
    for name, after in toy.policy.model.named_parameters():
        wanted = before[name].detach() - 0.25 * gradient[name]
        assert torch.equal(after.detach(), wanted), name
        moved += float(gradient[name].abs().sum())
    assert moved > 0


def test_a_whole_training_publishes_saves_and_resumes_with_it(
    tmp_path: Path, tiny_model: Callable[..., PreTrainedModel], make_samples: Any
) -> None:
    prepared = tmp_path / "prepared"
    prepared.mkdir()
    write_model(tiny_model(), prepared, dtype="float32")
    build_tokenizer("characters:running_sum", None).save_pretrained(prepared)

    def opened(**changes: Any) -> Training:
        training = Training(
            ProcessSpec(
                role="trainer",
                name="trainer",
                run_id="t",
                run_dir=str(tmp_path / "run"),
                parent_pid=1,
                seed=1,
                hub_address="tcp://127.0.0.1:1",
                model=ModelSettings(path=str(prepared)),
                sampling=SamplingSettings(),
                staleness=StalenessSettings(),
                groups_per_step=3,
                group_size=4,
                num_steps=6,
                weight_dir=str(tmp_path / "weights"),
                settings={"device": "cpu", **TOY},
                **changes,
            )
        )
        training.open()
        return training

    training = opened()
    assert json.loads((tmp_path / "run" / "trainer.json").read_text())["backend"] == "toy"
    assert "backend toy (set in the configuration)" in training.setup_description
    for step in (1, 2):
        training.run(training.prepare(make_samples((4, 4, 4), version=step - 1, seed=step), step))
    manifest, payload = open_payload(training.publish()().path)
    assert manifest.version == 2
    tensor = dict(training.model.named_parameters())["lm_head.weight"].detach()
    assert payload["lm_head.weight"].tobytes() == tensor.numpy().tobytes()
    resumed = opened(resume_from=str(training.save()().folder), lineage="l1")
    assert resumed.version == 2
    assert torch.equal(dict(resumed.model.named_parameters())["lm_head.weight"], tensor)


def test_what_its_descriptor_excludes_is_refused_before_it_is_made() -> None:
    with pytest.raises(
        UserError, match=r"trainer\.ranks: the backend toy supports one process, but trainer\.ranks is 2"
    ):
        choose_backend(TrainerSettings(ranks=2, **TOY), 1, torch.device("cpu"))
    with pytest.raises(UserError, match=r"trainer\.backend: no trainer backend `fsdq` -> did you mean fsdp\?"):
        choose_backend(TrainerSettings(backend="fsdq"), 1, torch.device("cpu"))
