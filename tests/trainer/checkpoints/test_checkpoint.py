"""Claims about checkpoints: whole or absent, damage is named, and training continues bit for bit."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from areal_like.config import ModelSettings, ProcessSpec, SamplingSettings, StalenessSettings
from areal_like.errors import OperationError, PolicyDiverged, UserError, WeightError
from areal_like.wire.messages import BatchSample, RunPosition
from controller.runtime.trainer_restart import find_checkpoint
from trainer.checkpoints import checkpoint
from trainer.checkpoints.atomic_folder import atomic_folder, sweep
from trainer.checkpoints.checkpoint import CheckpointState, Retention
from trainer.export import write_model
from trainer.model.tokenizers import build_tokenizer
from trainer.training import MAX_BAD_STEPS, Training
from trainer.weights.tensor_file import write_tensors


def latest_valid(run_dir: Path) -> Path | None:
    """The newest checkpoint whose every file has its recorded checksum."""
    for _, folder in reversed(checkpoint.all_checkpoints(run_dir)):
        with contextlib.suppress(WeightError):
            checkpoint.verify(folder)
            return folder
    return None


def state(version: int) -> CheckpointState:
    return CheckpointState(version=version, lineage="l0", run_id="t", config_digest="d")


def filled(text: str = "payload") -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model.safetensors").write_text(text)

    return write


def save(run_dir: Path, version: int, *, keep: int = 9, text: str = "payload") -> Path:
    return checkpoint.save(run_dir, state(version), filled(text), Retention(keep=keep))[0]


# ---------------------------------------------------------------- the folder


def test_saved_checkpoint_is_the_latest_and_valid(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None
    assert latest_valid(tmp_path) is None
    folder = save(tmp_path, 20)
    assert folder == tmp_path / "checkpoints" / "step_000020"
    assert checkpoint.latest(tmp_path) == latest_valid(tmp_path) == folder
    assert checkpoint.read_state(folder).version == 20


def test_size_of_a_checkpoint_is_that_of_its_files(tmp_path: Path) -> None:
    folder, num_bytes = checkpoint.save(tmp_path, state(20), filled("x" * 1000), Retention(keep=9))
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != checkpoint.MANIFEST]
    assert num_bytes == sum(file.stat().st_size for file in files) > 1000


def test_facts_of_a_written_file_are_those_of_its_bytes(tmp_path: Path) -> None:
    facts = write_tensors(tmp_path / "x", {"a": torch.arange(1000.0), "b": torch.zeros(0)})
    data = (tmp_path / "x").read_bytes()
    assert facts == (len(data), hashlib.sha256(data).hexdigest())


def test_newest_is_chosen_by_number_not_by_name(tmp_path: Path) -> None:
    for version in (20, 999_999, 1_000_000):
        save(tmp_path, version)
    assert checkpoint.latest(tmp_path) == checkpoint.checkpoint_folder(tmp_path, 1_000_000)


@pytest.mark.parametrize("name", ["model.safetensors", "state.json"])
def test_damaged_file_is_named_and_the_checkpoint_before_is_taken(name: str, tmp_path: Path) -> None:
    older, newer = save(tmp_path, 20), save(tmp_path, 40)
    content = bytearray((newer / name).read_bytes())
    content[3] ^= 1
    (newer / name).write_bytes(bytes(content))
    with pytest.raises(WeightError, match=name):
        checkpoint.verify(newer)
    assert latest_valid(tmp_path) == older


def test_missing_file_is_named(tmp_path: Path) -> None:
    folder = save(tmp_path, 20)
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightError, match=r"model\.safetensors"):
        checkpoint.verify(folder)


@pytest.mark.parametrize("text", ["", "{", '{"format": 1}', '{"format": 99, "files": {}}', "[]"])
def test_unreadable_manifest_is_no_checkpoint(text: str, tmp_path: Path) -> None:
    folder = save(tmp_path, 20)
    (folder / "manifest.json").write_text(text)
    with pytest.raises(WeightError, match=r"manifest\.json"):
        checkpoint.verify(folder)
    assert latest_valid(tmp_path) is None


@pytest.mark.parametrize(("number", "is_read"), [(1, False), (2, True), (3, True), (4, False)])
def test_checkpoints_of_formats_2_and_3_are_read_and_no_others(number: int, is_read: bool, tmp_path: Path) -> None:
    """2: a model's folder. 3: the parts of ranks. A change of what checkpoints consist of takes another number."""
    folder = save(tmp_path, 20)
    manifest = folder / "manifest.json"
    recorded = json.loads(manifest.read_text())
    assert recorded["format"] == 2
    manifest.write_text(json.dumps({**recorded, "format": number}))
    if is_read:
        checkpoint.verify(folder)
        return
    with pytest.raises(WeightError) as raised:
        checkpoint.verify(folder)
    assert str(raised.value) == f"{manifest} has format {number}, but this version of areal_like reads formats 2 and 3"


def test_partial_folder_is_never_taken(tmp_path: Path) -> None:
    folder = save(tmp_path, 20)
    os.rename(folder, folder.parent / f".step_000020.{os.getpid()}.partial")
    (folder.parent / "step_000040").mkdir()
    assert checkpoint.latest(tmp_path) is None


def test_older_ones_stay_one_for_each_span_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(checkpoint.time, "time", lambda: now_s)
    for version in range(1, 9):
        now_s += 10.0
        checkpoint.save(tmp_path, state(version), filled(), Retention(keep=2, every_s=30.0))
    assert [version for version, _ in checkpoint.all_checkpoints(tmp_path)] == [1, 4, 7, 8]


def test_newest_ones_are_kept(tmp_path: Path) -> None:
    for version in (10, 20, 30, 40):
        save(tmp_path, version, keep=2)
    assert [version for version, _ in checkpoint.all_checkpoints(tmp_path)] == [30, 40]


def test_old_one_that_cannot_be_removed_does_not_spoil_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    save(tmp_path, 10)
    monkeypatch.setattr(checkpoint, "remove_folder", refuse)
    assert latest_valid(tmp_path) != save(tmp_path, 20, keep=1) == latest_valid(tmp_path)
    assert "step_000010 cannot be removed" in caplog.text


def test_checkpoints_of_a_rolled_back_lineage_go_only_after_the_new_one_is_safe(tmp_path: Path) -> None:
    base = save(tmp_path, 20)
    save(tmp_path, 60)

    def fail(_: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OperationError, match="disk is full"):
        checkpoint.save(tmp_path, state(40), fail, Retention(keep=1))
    assert [version for version, _ in checkpoint.all_checkpoints(tmp_path)] == [20, 60]
    save(tmp_path, 40, keep=2)
    assert [version for version, _ in checkpoint.all_checkpoints(tmp_path)] == [20, 40]
    assert base.is_dir()


def test_checkpoint_of_the_same_version_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 20, text="old lineage")
    folder = save(tmp_path, 20, text="new lineage")
    assert (folder / "model.safetensors").read_text() == "new lineage"
    assert [entry.name for entry in folder.parent.iterdir()] == ["step_000020"]


def test_full_disk_is_reported_and_the_previous_checkpoint_stays(tmp_path: Path) -> None:
    save(tmp_path, 20)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(OperationError, match=r"could not write .*step_000040"):
            save(tmp_path, 40, text="x" * 20_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert latest_valid(tmp_path) == checkpoint.checkpoint_folder(tmp_path, 20)
    assert [entry.name for entry in (tmp_path / "checkpoints").iterdir()] == ["step_000020"]


def test_unwritable_place_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(UserError, match="cannot be written"):
        save(tmp_path, 20)


@pytest.mark.processes
def test_interrupted_replacement_is_undone(tmp_path: Path) -> None:
    folder = save(tmp_path, 20)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    os.rename(folder, folder.parent / f".step_000020.{dead.pid}.replaced")
    sweep(folder.parent)
    assert latest_valid(tmp_path) == folder


def test_interrupted_replacement_is_undone_where_the_writers_process_id_is_anothers_by_now(tmp_path: Path) -> None:
    """Or the writer sat on another machine: a trainer that starts again, and `resume`, know that none is left."""
    folder = save(tmp_path, 20)
    os.rename(folder, folder.parent / f".step_000020.{os.getppid()}.replaced")
    (folder.parent / f".step_000040.{os.getppid()}.partial").mkdir()
    assert latest_valid(tmp_path) is None
    assert find_checkpoint(tmp_path, num_batches=20, ledger_seq=0).path == folder
    assert [entry.name for entry in folder.parent.iterdir()] == ["step_000020"]


def test_leftovers_of_the_living_stay(tmp_path: Path) -> None:
    mine = tmp_path / f".x.{os.getppid()}.partial"
    mine.mkdir()
    sweep(tmp_path)
    assert mine.is_dir()


CALLS = ("open", "fsync", "rename", "mkdir", "rmdir", "unlink")
"""Of `os` and of files: between any two of them a save can be cut off."""


def save_and_die(run_dir: Path, version: int, at_call: int) -> int:
    """Save in a child that kills itself at the `at_call`-th touch of the disk; its exit status (0: it got through)."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    left = at_call

    def counted(honest: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return honest(*arguments, **options)

        return call

    try:
        for name in CALLS:
            setattr(os, name, counted(getattr(os, name)))
        Path.write_bytes = counted(Path.write_bytes)  # type: ignore[method-assign]
        Path.write_text = counted(Path.write_text)  # type: ignore[method-assign]
        checkpoint.save(run_dir, state(version), filled(f"version {version}"), Retention(keep=1))
        os._exit(0)
    except BaseException:
        os._exit(3)


@pytest.mark.processes
@pytest.mark.parametrize("is_replaced", [False, True], ids=["new", "same_version"])
def test_kill_at_any_touch_of_the_disk_leaves_a_valid_checkpoint(is_replaced: bool, tmp_path: Path) -> None:
    """The one before, until the new one is whole: never neither, never a broken one, and the next save cleans up."""
    is_through, seen = False, set()
    for at_call in range(200):
        run_dir = tmp_path / str(at_call)
        save(run_dir, 20, text="before")
        version = 20 if is_replaced else 40
        status = save_and_die(run_dir, version, at_call)
        assert status in (0, -signal.SIGKILL)
        found = find_checkpoint(run_dir, num_batches=100, ledger_seq=0).path  # what `resume` and a restart do
        assert found is not None, f"killed at touch {at_call}"
        for _, folder in checkpoint.all_checkpoints(run_dir):
            checkpoint.verify(folder)
        seen.add((found / "model.safetensors").read_text())
        save(run_dir, 60, keep=1)
        assert [entry.name for entry in (run_dir / "checkpoints").iterdir()] == ["step_000060"]
        is_through = status == 0
        if is_through:
            break
    assert is_through
    assert seen == {"before", f"version {version}"}
    assert at_call > 10


KILLED = """
    import os, signal, sys, threading, time
    from pathlib import Path
    from areal_like.config import ProcessSpec
    from trainer.training import Training

    spec = ProcessSpec.load(Path(sys.argv[1]))
    training = Training(spec)
    training.open()
    print(training.save()().folder, flush=True)
    training.version = 1
    write = training.save()
    threading.Timer(float(sys.argv[2]), lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    while True:
        write()
"""


@pytest.mark.e2e
def test_kill_while_another_thread_writes_leaves_the_previous_one_loadable(tmp_path: Path, prepared: Path) -> None:
    script, spec = tmp_path / "killed.py", tmp_path / "spec.json"
    script.write_text(textwrap.dedent(KILLED))
    run_dir = tmp_path / "run"
    process_spec(run_dir, prepared, settings={"checkpoint": {"keep": 2}}).save(spec)
    environment = {**os.environ, "PYTHONPATH": str(Path(checkpoint.__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    killed = subprocess.run([sys.executable, str(script), str(spec), "0.05"], env=environment, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    newest = find_checkpoint(run_dir, num_batches=100, ledger_seq=0).path
    assert newest is not None
    resumed = Training(process_spec(run_dir, prepared, resume_from=str(newest), lineage="l1"))
    resumed.open()
    assert resumed.version in (0, 1)


def test_failed_folder_leaves_no_trace(tmp_path: Path) -> None:
    def fail() -> None:
        with atomic_folder(tmp_path / "x") as partial:
            (partial / "file").write_text("")
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_folder_completed_meanwhile_by_another_stays(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "x", replaces=False) as partial:
        (partial / "file").write_text("mine")
        (tmp_path / "x").mkdir()
        (tmp_path / "x" / "file").write_text("theirs")
    assert (tmp_path / "x" / "file").read_text() == "theirs"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


# ---------------------------------------------------------------- what is in it

STEPS = 6


@pytest.fixture
def prepared(tmp_path: Path, tiny_model: Callable[..., PreTrainedModel]) -> Path:
    folder = tmp_path / "prepared"
    folder.mkdir()
    write_model(tiny_model(), folder, dtype="float32")
    build_tokenizer("characters:running_sum", None).save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    return folder


@pytest.fixture
def batches(make_samples: Callable[..., list[BatchSample]]) -> list[list[BatchSample]]:
    return [make_samples([4, 4, 4], version=step, seed=step) for step in range(STEPS)]


def process_spec(run_dir: Path, prepared: Path, **changes: Any) -> ProcessSpec:
    facts: dict[str, Any] = {
        "role": "trainer", "name": "trainer", "run_id": "t", "run_dir": str(run_dir), "hub_address": "tcp://127.0.0.1:1",
        "parent_pid": os.getpid(), "seed": 1, "model": ModelSettings(path=str(prepared)),
        "sampling": SamplingSettings(), "staleness": StalenessSettings(), "groups_per_step": 3, "group_size": 4,
        "num_steps": STEPS, "weight_dir": str(run_dir / "weights"),
        "settings": {"optimizer": {"lr": 1e-3, "schedule": "cosine", "warmup_steps": 2}, "mini_batches": 2},
    }  # fmt: skip
    merged = {**facts, **changes}
    return ProcessSpec(**{**merged, "settings": {"device": "cpu", **merged["settings"]}})


@pytest.fixture
def quiet_generators() -> Iterator[None]:
    python, legacy, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(python)
    np.random.set_state(legacy)
    torch.set_rng_state(torch_state)


def train(training: Training, batches: Sequence[list[BatchSample]], until: int) -> None:
    while training.version < until:
        step = training.version + 1
        training.run(training.prepare(batches[step - 1], step))


def bits(training: Training) -> dict[str, torch.Tensor]:
    return {part.key: part.items for part in training.policy.parts()}


def kept(training: Training) -> Path:
    """A checkpoint of the present version, written here and now."""
    return training.save()().folder


def test_resumed_training_continues_bit_for_bit(
    tmp_path: Path, prepared: Path, batches: list[list[BatchSample]], quiet_generators: None
) -> None:
    whole = Training(process_spec(tmp_path / "run", prepared))
    whole.open()
    train(whole, batches, 3)
    folder = kept(whole)
    at_save = (random.random(), float(np.random.rand()), torch.rand(2))
    train(whole, batches, STEPS)

    resumed = Training(process_spec(tmp_path / "run", prepared, resume_from=str(folder), lineage="l1"))
    resumed.open()
    assert resumed.version == 3
    assert resumed.is_saved
    after = (random.random(), float(np.random.rand()), torch.rand(2))
    assert at_save[:2] == after[:2]
    assert torch.equal(at_save[2], after[2])
    train(resumed, batches, STEPS)

    expected, found = bits(whole), bits(resumed)
    assert expected.keys() == found.keys()
    assert len(found) > 40
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert resumed.counters == whole.counters


def test_training_changes_the_weights_so_that_the_bits_mean_something(
    tmp_path: Path, prepared: Path, batches: list[list[BatchSample]]
) -> None:
    training = Training(process_spec(tmp_path / "run", prepared))
    training.open()
    before = {name: tensor.clone() for name, tensor in bits(training).items()}
    train(training, batches, 2)
    assert all(not torch.equal(before[name], tensor) for name, tensor in bits(training).items() if name in before)


def test_resume_needs_no_prepared_folder(tmp_path: Path, prepared: Path, batches: list[list[BatchSample]]) -> None:
    training = Training(process_spec(tmp_path / "run", prepared))
    training.open()
    train(training, batches, 1)
    folder = kept(training)
    gone = process_spec(tmp_path / "run", tmp_path / "gone", resume_from=str(folder))
    resumed = Training(gone)
    resumed.open()
    train(resumed, batches, 2)
    assert AutoTokenizer.from_pretrained(kept(resumed)).eos_token_id == 2


def test_checkpoint_and_export_are_hugging_face_folders(
    tmp_path: Path, prepared: Path, batches: list[list[BatchSample]]
) -> None:
    model = ModelSettings(path=str(prepared), dtype="bfloat16")
    training = Training(process_spec(tmp_path / "run", prepared, model=model))
    training.open()
    train(training, batches, 1)
    expected = {name: p.detach().clone() for name, p in training.model.named_parameters()}
    saved = AutoModelForCausalLM.from_pretrained(kept(training), dtype=torch.float32)
    assert all(torch.equal(expected[name], p) for name, p in saved.named_parameters())
    final = training.export()
    assert final == tmp_path / "run" / "final"
    exported = AutoModelForCausalLM.from_pretrained(final)
    assert {p.dtype for p in exported.parameters()} == {torch.bfloat16}
    assert all(torch.equal(expected[name].bfloat16(), p) for name, p in exported.named_parameters())
    assert exported.generation_config.eos_token_id == 2
    assert len(AutoTokenizer.from_pretrained(final)) == 18


def test_damaged_checkpoint_is_not_resumed_from(
    tmp_path: Path, prepared: Path, batches: list[list[BatchSample]]
) -> None:
    training = Training(process_spec(tmp_path / "run", prepared))
    training.open()
    train(training, batches, 1)
    folder = kept(training)
    file = folder / "optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(WeightError, match=r"optimizer\.safetensors is damaged"):
        Training(process_spec(tmp_path / "run", prepared, resume_from=str(folder))).open()


def test_checkpoint_holds_the_moment_it_was_copied_at_however_late_it_is_written(
    tmp_path: Path, prepared: Path, batches: list[list[BatchSample]]
) -> None:
    """All of it: weights, optimizer, generators, position, counters; training went on in between."""
    training = Training(process_spec(tmp_path / "run", prepared))
    training.open()
    position = RunPosition(ledger_seq=40, drawn=9, filtered=2, dropped=1, staleness=(0, 2, 0))
    training.run(training.prepare(batches[0], 1, position))
    at_copy = {name: tensor.clone() for name, tensor in bits(training).items()}
    write = training.save()
    drawn = torch.rand(2)
    later = RunPosition(ledger_seq=80, drawn=12, staleness=(1, 1, 1))
    training.run(training.prepare(batches[1], 2, later))
    assert not training.is_saved
    folder = write().folder
    assert folder == checkpoint.checkpoint_folder(tmp_path / "run", 1)
    assert not training.is_saved, "version 2 is not"
    state = checkpoint.read_state(folder)
    assert (state.version, state.counters["steps"], state.position) == (1, 1.0, position)
    assert state.staleness == {0: 2, 2: 1}

    resumed = Training(process_spec(tmp_path / "run", prepared, resume_from=str(folder), lineage="l1"))
    resumed.open()
    assert torch.equal(torch.rand(2), drawn)
    found = bits(resumed)
    assert found.keys() == at_copy.keys()
    assert all(torch.equal(found[name], at_copy[name]) for name in found)
    resumed.run(resumed.prepare(batches[1], 2, later))
    assert resumed.staleness == training.staleness == {0: 2, 2: 1, 1: 3}


def test_checkpoint_of_another_architecture_is_one_clear_error(
    tmp_path: Path, prepared: Path, tiny_model: Callable[..., PreTrainedModel]
) -> None:
    training = Training(process_spec(tmp_path / "run", prepared))
    training.open()
    folder = kept(training)
    other = tmp_path / "other"
    shutil.copytree(prepared, other)
    write_model(tiny_model(hidden_size=64), other, dtype="float32")
    with pytest.raises(UserError, match=r"the checkpoint has a different architecture: .* -> resume with the model"):
        Training(process_spec(tmp_path / "run", other, resume_from=str(folder))).open()


def test_gradient_that_stays_bad_ends_the_training(
    tmp_path: Path, prepared: Path, batches: list[list[BatchSample]]
) -> None:
    training = Training(process_spec(tmp_path / "run", prepared))
    training.open()
    with torch.no_grad():
        training.model.get_output_embeddings().weight[0, 0] = float("nan")
    for step in range(1, MAX_BAD_STEPS):
        training.run(training.prepare(batches[step - 1], step))
    with pytest.raises(PolicyDiverged, match=f"not finite in {MAX_BAD_STEPS} steps in a row"):
        training.run(training.prepare(batches[MAX_BAD_STEPS - 1], MAX_BAD_STEPS))
    assert training.counters["skipped_updates"] >= MAX_BAD_STEPS


def test_weights_that_are_not_finite_are_not_published(tmp_path: Path, prepared: Path) -> None:
    training = Training(process_spec(tmp_path / "run", prepared))
    training.open()
    training.publish()()
    weight = training.model.get_input_embeddings().weight
    with torch.no_grad():
        weight.fill_(3e38)  # finite, though their sum is not
        training.publish()
        weight[0, 0] = float("inf")
    with pytest.raises(PolicyDiverged, match=r"at version 0 \(.*embed.* contains a value that is not finite\)"):
        training.publish()


def test_wrong_setting_is_reported_by_its_key(tmp_path: Path, prepared: Path) -> None:
    with pytest.raises(UserError, match=r"trainer\.optimizer\.lr"):
        Training(process_spec(tmp_path / "run", prepared, settings={"optimizer": {"lr": -1}}))


def test_reference_model_stays_where_it_started(
    tmp_path: Path, prepared: Path, batches: list[list[BatchSample]]
) -> None:
    settings = {"optimizer": {"lr": 1e-2}, "loss": {"kl_coef": 0.1}}
    training = Training(process_spec(tmp_path / "run", prepared, settings=settings))
    training.open()
    train(training, batches, 2)
    started = AutoModelForCausalLM.from_pretrained(prepared)
    assert training._step.reference is not None
    for name, parameter in training._step.reference.named_parameters():
        assert torch.equal(parameter, started.get_parameter(name))
