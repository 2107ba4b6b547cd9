"""Claims about capsules, without processes: a step repeated from its file alone, and what a changed file says."""

from __future__ import annotations

import json
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from replayable_run import MadeRun, make_run, play_here

from areal_like.config import ProcessSpec
from areal_like.errors import UserError
from controller.run_folder.run_folder import RunFolder
from controller.runs.replay import capsule as module
from controller.runs.replay.capsule import first_differing, make_capsule, replay_capsule
from controller.runs.replay.capsule_file import read_archive, write_archive
from controller.wiring.replay import fixed_models


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "play", play_here)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeRun:
    settings = {"mini_batches": 2, "critic": {}, "advantage": {"kind": "gae"}, "gradient_cosine": {"every_steps": 1}}
    return make_run(tmp_path_factory.mktemp("made"), starts=((0, 3), (2, 5)), settings=settings)


def contents(capsule: Path) -> dict[str, Any]:
    with zipfile.ZipFile(capsule) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def test_random_steps_give_bit_equal_gradients_after_the_run_is_gone(
    made: MadeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, random.randint(2, 4), 5):
        capsule = tmp_path / f"{step}.capsule"
        assert make_capsule(made.folder, step, capsule) == 0
        shown = capsys.readouterr()
        assert "note:" not in shown.err, "the step gives here what it gave in the run"
        result = json.loads(contents(capsule)["result.json"])
        assert len(result["gradients"]) == 2, "one table for each update"
        assert any(name.startswith("critic/") for name in result["gradients"][0])
        assert result["recorded_metrics"]["grad_norm"] == result["metrics"]["grad_norm"]
        assert replay_capsule(capsule) == 0
        assert "equal: 2 updates with gradients of" in capsys.readouterr().out


def test_capsule_holds_what_the_step_needs_and_no_path_or_secret_of_the_machine(made: MadeRun, tmp_path: Path) -> None:
    capsule = tmp_path / "c"
    make_capsule(made.folder, 5, capsule)
    entries = contents(capsule)
    assert {
        "spec.json", "config.yaml", "environment.json", "batch.bin", "samples.jsonl", "result.json", "manifest.json",
        "before/model.safetensors", "before/optimizer.safetensors", "before/critic.safetensors", "before/state.json",
    } <= entries.keys()  # fmt: skip
    assert not [name for name in entries if name.startswith("model/")], "nothing reads the starting model"
    home = str(made.folder.root.parents[1]).encode()
    assert [name for name, data in entries.items() if b"a-secret" in data or home in data] == []
    rows = [json.loads(line) for line in entries["samples.jsonl"].splitlines()]
    assert len(rows) == 12
    assert {row["verdict"] for row in rows} == {"scored"}


def test_adapter_and_reference_take_the_starting_model_along(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path, starts=((0, 2),), saved=(1,), settings={"lora": {"rank": 2}})
    (tmp_path / "prepared" / "provenance.json").write_text(json.dumps({"data": str(tmp_path)}))
    (tmp_path / "prepared" / "training_args.bin").write_bytes(b"a pickle")
    for step in (1, 2):
        capsule = tmp_path / f"{step}.capsule"
        make_capsule(run.folder, step, capsule)
        entries = contents(capsule)
        assert "model/model.safetensors" in entries
        assert not entries.keys() & {"model/provenance.json", "model/training_args.bin"}
        assert [name for name, data in entries.items() if str(tmp_path).encode() in data] == []
        if step == 2:
            shutil.rmtree(tmp_path / "prepared")
        assert replay_capsule(capsule) == 0, capsys.readouterr().out


def test_changed_entry_is_named_before_anything_runs(
    made: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capsule = tmp_path / "c"
    make_capsule(made.folder, 5, capsule)
    monkeypatch.setattr(module, "play", lambda *_: pytest.fail("it ran"))
    entries = contents(capsule)
    entries["before/optimizer.safetensors"] = entries["before/optimizer.safetensors"][:-1] + b"\xee"
    with zipfile.ZipFile(tmp_path / "changed", "w") as opened:
        for name, data in entries.items():
            opened.writestr(name, data)
    with pytest.raises(UserError, match=r"before/optimizer\.safetensors was changed"):
        replay_capsule(tmp_path / "changed")


def other(capsule: Path, inside: Path, change: Callable[[Path, dict[str, Any]], None]) -> Path:
    """A capsule with changed entries or facts, and a manifest that agrees."""
    facts = read_archive(capsule, inside)
    facts.pop("format")
    change(inside, facts)
    entries: dict[str, Path | bytes] = {
        str(file.relative_to(inside)): file for file in inside.rglob("*") if file.is_file()
    }
    facts.pop("entries")
    write_archive(inside.with_suffix(".capsule"), entries, facts)
    return inside.with_suffix(".capsule")


def change_result(inside: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    result = json.loads((inside / "result.json").read_text())
    change(result)
    (inside / "result.json").write_text(json.dumps(result))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda inside, facts: facts.pop("step"), "the manifest has no valid step"),
        (lambda inside, facts: facts.update(num_threads="1"), "the manifest has no valid num_threads"),
        (lambda inside, facts: (inside / "result.json").write_text("[" * 100_000), "not a complete capsule"),
        (lambda inside, facts: (inside / "result.json").write_text("[]"), "result.json is not a JSON object"),
        (
            lambda inside, facts: change_result(inside, lambda result: result.pop("gradients")),
            "result.json has no gradients",
        ),
        (
            lambda inside, facts: change_result(inside, lambda result: result.update(gradients=[1])),
            "result.json does not list the gradients by tensor",
        ),
        (lambda inside, facts: (inside / "before" / "pytorch_model.bin").write_bytes(b""), "may be a pickle"),
    ],
)
def test_capsule_that_lacks_something_is_refused_before_anything_runs(
    made: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, words: str
) -> None:
    make_capsule(made.folder, 5, tmp_path / "c")
    monkeypatch.setattr(module, "play", lambda *_: pytest.fail("it ran"))
    with pytest.raises(UserError) as raised:
        replay_capsule(other(tmp_path / "c", tmp_path / "inside", change))
    assert words in raised.value.what


def test_words_of_a_capsule_are_shown_without_terminal_escapes(
    made: MadeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(inside: Path, facts: dict[str, Any]) -> None:
        facts["run"] = "\x1b[2Ja\nb"
        change_result(inside, lambda result: result["metrics"].update({"\x1b[31mloss": 1.0}))

    make_capsule(made.folder, 5, tmp_path / "c")
    assert replay_capsule(other(tmp_path / "c", tmp_path / "inside", change)) == 1
    shown = "".join(capsys.readouterr())
    assert "\x1b" not in shown
    assert "of run \\x1b[2Ja\\nb" in shown
    assert "different: \\x1b[31mloss is 1.0 in the record and None in the replay" in shown


def test_mistakes_are_found_before_the_step_is_trained(
    made: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "play", lambda *_: pytest.fail("it ran"))
    with pytest.raises(UserError, match="the parent folder does not exist"):
        make_capsule(made.folder, 5, tmp_path / "missing" / "c")
    folder = tmp_path / "run"
    shutil.copytree(made.folder.root, folder)
    (folder / "config.yaml").write_text("a: [")
    with pytest.raises(UserError, match="is damaged"):
        make_capsule(RunFolder(folder), 5, tmp_path / "c")
    model = tmp_path / "pickled"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "pytorch_model.bin").write_bytes(b"")
    file = folder / "processes" / "trainer.json"
    settings = {**made.spec.settings, "teacher": {"path": str(model)}}
    made.spec.model_copy(update={"settings": settings}).save(file)
    with pytest.raises(
        UserError, match="the folder has no safetensors files, and a capsule must not contain pickle files"
    ):
        make_capsule(RunFolder(folder), 5, tmp_path / "c")
    shutil.rmtree(model)
    with pytest.raises(UserError, match="there is no such model folder"):
        make_capsule(RunFolder(folder), 5, tmp_path / "c")


def test_spec_has_no_settings_of_the_machine(made: MadeRun) -> None:
    settings = {
        **made.spec.settings,
        "weights": {"kind": "own:transfer", "shared_dir": "/hidden", "options": {"token": "hidden"}},
        "loss": {"kind": "own:loss", "options": {"api_key": "hidden", "file": "/hidden/rows"}},
    }
    changed = {"settings": settings, "weight_transfer": "own:hidden", "bind_address": "hidden"}
    spec = made.spec.model_copy(update=changed)
    assert "hidden" not in module._portable(spec).model_dump_json()


def test_other_gradient_is_found_and_named(made: MadeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A capsule whose weights before the step are other ones, with a manifest that agrees."""

    def change(inside: Path, facts: dict[str, Any]) -> None:
        change_result(inside, lambda result: result["gradients"][1].update({"model.norm.weight": "0" * 64}))

    make_capsule(made.folder, 5, tmp_path / "c")
    assert replay_capsule(other(tmp_path / "c", tmp_path / "inside", change)) == 1
    assert "different: update 2: the gradient of model.norm.weight" in capsys.readouterr().out


def test_first_difference_is_gradients_then_metrics_then_tensors() -> None:
    result = {"gradients": [{"w": "a"}], "metrics": {"loss": 1.0, "step_s": 3.0}, "tensors": {"model: w": "b"}}
    assert first_differing(result, {**result, "metrics": {"loss": 1.0, "step_s": 4.0}}) is None
    assert first_differing(result, {**result, "gradients": []}) == "1 updates in the record, 0 in the replay"
    assert first_differing(result, {**result, "metrics": {}}) == "loss is 1.0 in the record and None in the replay"
    assert (
        first_differing(result, {**result, "metrics": {"loss": 2.0}})
        == "loss is 1.0 in the record and 2.0 in the replay"
    )
    assert first_differing(result, {**result, "tensors": {"model: w": "c"}}) == "after the step: model: w"


def test_settings_that_a_capsule_cannot_hold_are_refused_by_name(made: MadeRun, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(made.folder.root, folder)
    file = folder / "processes" / "trainer.json"
    spec = ProcessSpec.load(file)
    for settings, key in (
        ({"version_logprobs": {}}, "trainer.version_logprobs"),
        ({"backend": "deepspeed"}, "trainer.backend"),
    ):
        spec.model_copy(update={"settings": {**spec.settings, **settings}}).save(file)
        with pytest.raises(UserError) as raised:
            make_capsule(RunFolder(folder), 2, tmp_path / "c")
        assert raised.value.where == key
    spec.save(file)
    with pytest.raises(UserError, match="there is no step 9"):
        make_capsule(RunFolder(folder), 9, tmp_path / "c")
    (tmp_path / "c").write_text("something")
    with pytest.raises(UserError, match="already exists"):
        make_capsule(RunFolder(folder), 2, tmp_path / "c")


@pytest.mark.parametrize(("teacher", "written"), [
    ({"path": "/models/large"}, {"path": "teacher"}), ({"model": "large"}, {"model": "large"}), (None, None),
])  # fmt: skip
def test_a_teacher_of_the_trainer_is_in_the_capsule_and_one_of_the_workers_is_not(
    made: MadeRun, teacher: dict[str, str] | None, written: dict[str, str] | None
) -> None:
    """The log-probs of a teacher that the rollout workers hold are in the samples."""
    settings = made.spec.settings | {"teacher": teacher, "advantage": {"kind": "distillation"}, "critic": None}
    spec = made.spec.model_copy(update={"settings": settings})
    assert module._portable(spec).settings["teacher"] == written
    is_held = teacher is not None and "path" in teacher
    assert ("teacher" in fixed_models(spec)) == is_held
