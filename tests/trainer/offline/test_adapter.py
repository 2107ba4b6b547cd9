"""Adapters in training from files: the base stays, checkpoints and resume hold the adapter, and the result is merged or
peft's."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_offline import digits, make_spec, rows_of_kind, run_until, write_rows
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from areal_like.errors import UserError
from trainer.checkpoints.adapter_export import export_adapter
from trainer.checkpoints.checkpoint import all_checkpoints
from trainer.offline import opening
from trainer.offline.loop import OfflineTraining
from trainer.offline.spec import OfflineSpec

TRAINER: dict[str, Any] = {
    "micro_batch_tokens": 24, "checkpoint": {"every_steps": 2, "keep": 9},
    "optimizer": {"lr": 2e-2, "warmup_steps": 1},
}  # fmt: skip
OBJECTIVES = ("sft", "dpo", "reward_model")


def pairs(num: int, first: int = 0) -> list[dict[str, str]]:
    return [
        {"prompt": f"{n % 10}+{n // 10}=", "chosen": str(n % 10), "rejected": str((n + 3) % 10)}
        for n in range(first, first + num)
    ]


def spec_of(folder: Path, objective: str, lora: dict[str, Any] | None = None, **changes: Any) -> OfflineSpec:
    folder.mkdir(exist_ok=True)
    rows = digits if objective == "sft" else pairs
    data = {
        "train": write_rows(folder / "train.jsonl", rows(10)), "eval": write_rows(folder / "eval.jsonl", rows(6, 20)),
    }  # fmt: skip
    settings = {"device": "cpu", **TRAINER, "lora": {"rank": 3, "alpha": 6.0, **(lora or {})}}
    return make_spec(folder, objective=objective, data=data, trainer=settings, **changes)


def train(spec: OfflineSpec, stop_at: tuple[int, ...] = ()) -> Path:
    for step in stop_at:
        run_until(spec, step)
    OfflineTraining(spec).run()
    return Path(spec.run_dir)


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def newest(run_dir: Path) -> Path:
    return all_checkpoints(run_dir)[-1][1]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_adapter_learns_and_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, objective: str) -> None:
    changes = {"epochs": 6, "dpo": {"beta": 1.0}}
    whole = train(spec_of(tmp_path / "whole", objective, **changes))
    parts = train(spec_of(tmp_path / "parts", objective, **changes), stop_at=(1, 4))
    first, last = ([row["loss"] for row in rows_of_kind(whole, "step")[part]] for part in (slice(3), slice(-3, None)))
    assert sum(last) < 0.95 * sum(first)
    assert digest(whole / "final" / "model.safetensors") == digest(parts / "final" / "model.safetensors")
    moments = [load_file(newest(run_dir) / "optimizer.safetensors") for run_dir in (whole, parts)]
    names = {name for name in moments[0] if not name.startswith("generator/")}  # this process's, used by both runs
    assert len(names) > 6
    assert all(torch.equal(moments[0][name], moments[1][name]) for name in names)
    assert digest(newest(whole) / "adapter_model.safetensors") == digest(newest(parts) / "adapter_model.safetensors")


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_only_the_adapter_and_a_reward_models_head_are_trained(tmp_path: Path, objective: str) -> None:
    run_dir = train(spec_of(tmp_path, objective, {"targets": ("q_proj", "up_proj")}))
    start, final = (load_file(run_dir / name / "model.safetensors") for name in ("start", "final"))
    head = {"score.weight"} if objective == "reward_model" else set()
    targets = {"model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"}
    assert final.keys() - start.keys() == head
    assert {name for name in start if not torch.equal(start[name], final[name])} == targets
    stored = load_file(newest(run_dir) / "adapter_model.safetensors")
    assert len(stored) == 4 + len(head)
    assert not (newest(run_dir) / "model.safetensors").exists()
    setup = json.loads((run_dir / "trainer.json").read_text())
    assert setup["parameters_trained"] == sum(one.numel() for one in stored.values())
    assert head <= final.keys()
    assert not head or final["score.weight"].any()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_peft_computes_the_merged_model_from_the_adapter_alone(tmp_path: Path, objective: str) -> None:
    peft = pytest.importorskip("peft")
    merged = train(spec_of(tmp_path / "merged", objective))
    alone = train(spec_of(tmp_path / "alone", objective, {"export": "adapter"}))
    files = {file.name for file in (alone / "final").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= files
    assert not files & {"config.json", "model.safetensors", "adapter_base.json"}
    kind = AutoModelForSequenceClassification if objective == "reward_model" else AutoModelForCausalLM
    options = {"num_labels": 1} if objective == "reward_model" else {}
    base = kind.from_pretrained(alone / "start", pad_token_id=0, **options)
    model = peft.PeftModel.from_pretrained(base, alone / "final").eval()
    expected = kind.from_pretrained(merged / "final").eval()
    ids = torch.tensor([[1, 4, 5, 6, 7]])
    with torch.no_grad():
        assert torch.allclose(model(input_ids=ids).logits, expected(input_ids=ids).logits, atol=1e-5)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_exported_checkpoint_is_the_final_model(tmp_path: Path, objective: str) -> None:
    run_dir = train(spec_of(tmp_path, objective))
    export_adapter(newest(run_dir), tmp_path / "out", form="merged")
    ours, final = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", run_dir / "final"))
    assert ours.keys() == final.keys()
    assert all(torch.allclose(ours[name], final[name], atol=1e-6) for name in final)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "out", run_dir / "final")]
    assert configs[0]["architectures"] == configs[1]["architectures"]


def test_dpo_with_an_adapter_loads_no_second_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(tmp_path, "dpo")
    run_until(spec, 2)
    loaded: list[Path] = []
    plain = opening.load_causal_lm

    def load(folder: Path, **options: Any) -> Any:
        loaded.append(folder)
        return plain(folder, **options)

    monkeypatch.setattr(opening, "load_causal_lm", load)
    OfflineTraining(spec).run()
    assert loaded == [Path(spec.run_dir) / "start"]


@pytest.mark.parametrize(
    ("objective", "target", "words"),
    [
        ("sft", "q_prj", "trainer.lora.targets: the model has no linear module q_prj -> did you mean q_proj?"),
        ("sft", "lm_head", "trainer.lora.targets: lm_head is the head, which cannot have an adapter"),
        ("reward_model", "score", "trainer.lora.targets: score is the head, which cannot have an adapter"),
    ],
)
def test_a_target_that_does_not_exist_is_one_sentence(tmp_path: Path, objective: str, target: str, words: str) -> None:
    with pytest.raises(UserError) as refused:
        train(spec_of(tmp_path, objective, {"targets": (target,)}))
    assert words in str(refused.value)


def test_a_checkpoint_with_another_adapter_or_none_is_refused(tmp_path: Path) -> None:
    run_until(spec_of(tmp_path, "sft"), 2)
    with pytest.raises(UserError, match="a different rank or different target modules"):
        train(spec_of(tmp_path, "sft", {"rank": 2, "alpha": 6.0}))
    whole = spec_of(tmp_path, "sft")
    whole = whole.model_copy(update={"trainer": whole.trainer.model_copy(update={"lora": None})})
    with pytest.raises(UserError, match=r"the checkpoint contains an adapter, but trainer\.lora is not set"):
        train(whole)
