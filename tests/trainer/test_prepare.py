"""Claims about preparation: what the folder contains, that it is whole or absent, and how mistakes are reported."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_jobs import JobServer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_like.config import ModelSettings
from areal_like.errors import UserError
from areal_like.metrics import read_jsonl
from areal_like.weights.weight_store import open_payload, verify
from trainer import sft
from trainer.config import SftSettings
from trainer.prepare import prepare
from trainer.prepare_spec import PrepareSpec

INIT: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
MADE = ModelSettings(init=INIT, tokenizer="characters:running_sum")


def spec(out: Path, model: ModelSettings = MADE, **changes: Any) -> PrepareSpec:
    facts = {"run_id": "t", "parent_pid": os.getpid(), "seed": 1, "model": model, "out_dir": str(out)}
    return PrepareSpec(**{**facts, **changes})


def rows_file(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{a}+1=", "response": f"#{(a + 1) % 10}"} for a in range(10)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def supervised(tmp_path: Path, steps: int = 3, **changes: Any) -> dict[str, Any]:
    settings = SftSettings(**{"device": "cpu", "steps": steps, "batch_size": 4, "log_every": 2, **changes})
    return {"sft_rows": str(rows_file(tmp_path)), "sft": settings, "status_path": str(tmp_path / "status.jsonl")}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(str(folder / "model.safetensors"))


def test_made_folder_is_read_by_transformers_alone(tmp_path: Path) -> None:
    folder = prepare(spec(tmp_path / "made"))
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.vocab_size == len(tokenizer) == 18
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    assert tokenizer("1+2=").input_ids[0] == tokenizer.bos_token_id


def test_preparation_is_a_pure_function_of_the_seed(tmp_path: Path) -> None:
    first = weights(prepare(spec(tmp_path / "a", **supervised(tmp_path))))
    again = weights(prepare(spec(tmp_path / "b", **supervised(tmp_path))))
    other = weights(prepare(spec(tmp_path / "c", seed=2, **supervised(tmp_path))))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_supervised_steps_change_the_weights_and_report_progress(tmp_path: Path) -> None:
    plain = weights(prepare(spec(tmp_path / "plain")))
    trained = weights(prepare(spec(tmp_path / "trained", **supervised(tmp_path))))
    assert any(not torch.equal(plain[name], trained[name]) for name in plain)
    lines = read_jsonl(tmp_path / "status.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["loss"] > 0 and line["seconds"] >= 0 for line in lines)


def test_supervised_steps_of_an_adapter_change_its_targets_alone(tmp_path: Path) -> None:
    base = weights(prepare(spec(tmp_path / "base")))
    lora = {"rank": 2, "targets": ["down_proj"]}
    trained = weights(prepare(spec(tmp_path / "trained", **supervised(tmp_path, lora=lora))))
    assert trained.keys() == base.keys()
    changed = {name for name in base if not torch.equal(base[name], trained[name])}
    assert changed == {f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(2)}
    with pytest.raises(UserError, match=r"warm_start\.sft\.lora\.targets: the model has no linear module up"):
        prepare(spec(tmp_path / "wrong", **supervised(tmp_path, lora={"targets": ["up"]})))


def test_loaded_model_keeps_its_bits_its_tokenizer_and_its_list_of_ends(tmp_path: Path) -> None:
    source = prepare(spec(tmp_path / "source"))
    (source / "generation_config.json").write_text('{"eos_token_id": [2, 0], "temperature": 0.3}')
    (source / "chat_template.jinja").write_text("{{ messages }}")
    folder = prepare(spec(tmp_path / "loaded", ModelSettings(path=str(source))))
    assert (folder / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [2, 0]
    assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"
    assert len(AutoTokenizer.from_pretrained(folder)) == 18


def test_warm_start_of_a_loaded_model_leaves_the_source_alone(tmp_path: Path) -> None:
    source = prepare(spec(tmp_path / "source"))
    before = (source / "model.safetensors").read_bytes()
    folder = prepare(spec(tmp_path / "warm", ModelSettings(path=str(source)), **supervised(tmp_path)))
    assert (source / "model.safetensors").read_bytes() == before != (folder / "model.safetensors").read_bytes()
    assert (folder / "generation_config.json").is_file()
    assert (folder / "tokenizer.json").is_file()


def test_model_without_generation_config_gets_one_that_names_the_end(tmp_path: Path) -> None:
    source = prepare(spec(tmp_path / "source"))
    (source / "generation_config.json").unlink()
    folder = prepare(spec(tmp_path / "loaded", ModelSettings(path=str(source))))
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2


def test_published_version_0_holds_the_prepared_weights(tmp_path: Path) -> None:
    source = prepare(spec(tmp_path / "source"))
    asked = spec(tmp_path / "eval", ModelSettings(path=str(source)), publish_to=str(tmp_path / "store"), lineage="l7")
    prepare(asked)
    (manifest_path,) = (tmp_path / "store").glob("*.manifest.json")
    manifest, payload = open_payload(manifest_path)
    verify(manifest, payload)
    assert (manifest.version, manifest.lineage) == (0, "l7")
    for name, tensor in weights(source).items():
        assert bytes(payload[name]) == tensor.numpy().tobytes()


def test_preparation_that_fails_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer import export

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "write_model", fail)
    with pytest.raises(Exception, match="disk is full"):
        prepare(spec(tmp_path / "out" / "made"))
    assert list((tmp_path / "out").iterdir()) == []


def test_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    folder = prepare(spec(tmp_path / "made"))
    with pytest.raises(UserError, match="already exists"):
        prepare(spec(folder))
    (tmp_path / "empty").mkdir()
    assert prepare(spec(tmp_path / "empty")).is_dir()


def test_unwritable_place_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        prepare(spec(tmp_path / "file" / "made"))


def missing_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def missing_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def damaged_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"nonsense")


def damaged_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").write_text("[")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (missing_weights, "no weights"),
        (missing_tokenizer, "no tokenizer"),
        (damaged_weights, "cannot be read"),
        (damaged_generation_config, "not a JSON object"),
    ],
)
def test_bad_model_folder_is_one_sentence(damage: Any, words: str, tmp_path: Path) -> None:
    source = prepare(spec(tmp_path / "source"))
    damage(source)
    with pytest.raises(UserError, match=words):
        prepare(spec(tmp_path / "out", ModelSettings(path=str(source))))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (ModelSettings(), "neither path nor init is set"),
        (ModelSettings(path="x", init=INIT), "both path and init are set"),
        (ModelSettings(path="/absent/model"), "no such model folder"),
        (ModelSettings(init=INIT), "has no tokenizer"),
        (ModelSettings(init=INIT, tokenizer="nowhere"), "no tokenizer folder"),
    ],
)
def test_unusable_model_settings_are_user_errors(model: ModelSettings, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        prepare(spec(tmp_path / "out", model))


def test_tokenizer_larger_than_the_model_is_a_user_error(tmp_path: Path) -> None:
    source = prepare(spec(tmp_path / "source"))
    with pytest.raises(UserError, match="259 tokens, but the vocabulary of the model has only 18"):
        prepare(spec(tmp_path / "out", ModelSettings(path=str(source), tokenizer="bytes")))


def test_row_longer_than_the_model_is_a_user_error(tmp_path: Path) -> None:
    asked = supervised(tmp_path)
    Path(asked["sft_rows"]).write_text(json.dumps({"prompt": "1+" * 40, "response": "1"}))
    with pytest.raises(UserError, match=r"row 1: .*the limit is 64"):
        prepare(spec(tmp_path / "out", **asked))


def test_rows_without_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be set together"):
        spec(tmp_path / "out", sft_rows="rows.jsonl")


@pytest.mark.processes
def test_process_prepares_and_tells_a_mistake_in_its_last_line(tmp_path: Path, job_server: JobServer) -> None:
    file, log, mistake = (tmp_path / name for name in ("spec.json", "log", "mistake.log"))
    spec(tmp_path / "out", **supervised(tmp_path)).save(file)
    assert job_server.start("trainer.prepare", ["--spec", str(file)], log).wait(300.0) == 0, log.read_text()
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert job_server.start("trainer.prepare", ["--spec", str(file)], mistake).wait(300.0) == 2
    assert mistake.read_text().strip().splitlines()[-1].startswith("error: ")
    assert "Traceback" not in mistake.read_text()


def test_order_of_rows_is_reported_by_number(tmp_path: Path) -> None:
    asked = supervised(tmp_path)
    Path(asked["sft_rows"]).write_text('{"prompt": "1", "response": "1"}\n{"prompt": "ü", "response": "1"}\n')
    assert len(sft.read_rows(Path(asked["sft_rows"]))) == 2
    with pytest.raises(UserError, match="row 2"):
        prepare(spec(tmp_path / "out", **asked))
