"""Claims about checkpoints: whole or absent, damage is named, and training continues bit for bit."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from areal_like.config import ModelSettings, ProcessSpec, SamplingSettings, StalenessSettings
from areal_like.errors import OperationError, PolicyDiverged, UserError, WeightError
from areal_like.messages import BatchSample
from trainer import checkpoint
from trainer.atomic_folder import atomic_folder, sweep
from trainer.checkpoint import CheckpointState
from trainer.export import write_model
from trainer.tokenizers import build_tokenizer
from trainer.training import MAX_BAD_STEPS, Training


def state(version: int) -> CheckpointState:
    return CheckpointState(version=version, lineage="l0", run_id="t", config_digest="d")


def filled(text: str = "payload") -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model.safetensors").write_text(text)

    return write


def save(run_dir: Path, version: int, *, keep: int = 9, text: str = "payload") -> Path:
    return checkpoint.save(run_dir, state(version), filled(text), keep=keep)


# ---------------------------------------------------------------- the folder


def test_saved_checkpoint_is_the_latest_and_valid(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest_valid(tmp_path) is None
    folder = save(tmp_path, 20)
    assert folder == tmp_path / "checkpoints" / "step_000020"
    assert checkpoint.latest(tmp_path) == checkpoint.latest_valid(tmp_path) == folder
    assert checkpoint.read_state(folder).version == 20


def test_newest_is_chosen_by_number_not_by_name(tmp_path: Path) -> None:
    for version in (999_999, 1_000_000, 20):
        checkpoint.save(tmp_path, state(version), filled(), keep=9) if version > 20 else None
    assert checkpoint.latest(tmp_path) == checkpoint.checkpoint_folder(tmp_path, 1_000_000)


@pytest.mark.parametrize("name", ["model.safetensors", "state.json"])
def test_damaged_file_is_named_and_the_checkpoint_before_is_taken(name: str, tmp_path: Path) -> None:
    older, newer = save(tmp_path, 20), save(tmp_path, 40)
    content = bytearray((newer / name).read_bytes())
    content[3] ^= 1
    (newer / name).write_bytes(bytes(content))
    with pytest.raises(WeightError, match=name):
        checkpoint.verify(newer)
    assert checkpoint.latest_valid(tmp_path) == older


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
    assert checkpoint.latest_valid(tmp_path) is None


def test_partial_folder_is_never_taken(tmp_path: Path) -> None:
    folder = save(tmp_path, 20)
    os.rename(folder, folder.parent / f".step_000020.{os.getpid()}.partial")
    (folder.parent / "step_000040").mkdir()
    assert checkpoint.latest(tmp_path) is None


def test_newest_ones_are_kept(tmp_path: Path) -> None:
    for version in (10, 20, 30, 40):
        save(tmp_path, version, keep=2)
    assert [version for version, _ in checkpoint.all_checkpoints(tmp_path)] == [30, 40]


def test_checkpoints_of_a_rolled_back_lineage_go_only_after_the_new_one_is_safe(tmp_path: Path) -> None:
    base = save(tmp_path, 20)
    save(tmp_path, 60)

    def fail(_: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OperationError, match="disk is full"):
        checkpoint.save(tmp_path, state(40), fail, keep=1)
    assert [version for version, _ in checkpoint.all_checkpoints(tmp_path)] == [20, 60]
    save(tmp_path, 40, keep=2)
    assert [version for version, _ in checkpoint.all_checkpoints(tmp_path)] == [20, 40]
    assert base.is_dir()


def test_checkpoint_of_the_same_version_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 20, text="old lineage")
    folder = save(tmp_path, 20, text="new lineage")
    assert (folder / "model.safetensors").read_text() == "new lineage"
    assert [entry.name for entry in folder.parent.iterdir()] == ["step_000020"]


def test_full_disk_is_told_and_the_previous_checkpoint_stays(tmp_path: Path) -> None:
    save(tmp_path, 20)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(OperationError, match=r"could not write .*step_000040"):
            save(tmp_path, 40, text="x" * 20_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert checkpoint.latest_valid(tmp_path) == checkpoint.checkpoint_folder(tmp_path, 20)
    assert [entry.name for entry in (tmp_path / "checkpoints").iterdir()] == ["step_000020"]


def test_unwritable_place_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(UserError, match="cannot be written"):
        save(tmp_path, 20)


def test_interrupted_replacement_is_undone(tmp_path: Path) -> None:
    folder = save(tmp_path, 20)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    os.rename(folder, folder.parent / f".step_000020.{dead.pid}.replaced")
    sweep(folder.parent)
    assert checkpoint.latest_valid(tmp_path) == folder


def test_leftovers_of_the_living_stay(tmp_path: Path) -> None:
    mine = tmp_path / f".x.{os.getppid()}.partial"
    mine.mkdir()
    sweep(tmp_path)
    assert mine.is_dir()


KILLED = """
    import sys, time
    from pathlib import Path
    from trainer import checkpoint
    from trainer.checkpoint import CheckpointState

    def write(folder):
        for index in range(40):
            (folder / f"part-{index}").write_bytes(b"x" * 50_000)

    run = Path(sys.argv[1])
    for version in range(1, 100_000):
        state = CheckpointState(version=version % 7 + 1, lineage="l", run_id="r", config_digest="d")
        checkpoint.save(run, state, write, keep=2)
        print(version, flush=True)
"""


@pytest.mark.parametrize("delay_s", [0.02, 0.11, 0.23])
def test_kill_in_the_middle_of_saves_always_leaves_a_valid_checkpoint(delay_s: float, tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(textwrap.dedent(KILLED))
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(checkpoint.__file__).parent.parent)},
    )
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(delay_s)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    sweep(tmp_path / "checkpoints")
    found = checkpoint.all_checkpoints(tmp_path)
    assert found
    for _, folder in found:
        checkpoint.verify(folder)


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
    return ProcessSpec(**{**facts, **changes})


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
    moments = {
        f"{kind}/{name}": value for name, kinds in training.policy.moments().items() for kind, value in kinds.items()
    }
    return {**{name: p.detach() for name, p in training.model.named_parameters()}, **moments}


def test_resumed_training_continues_bit_for_bit(
    tmp_path: Path, prepared: Path, batches: list[list[BatchSample]], quiet_generators: None
) -> None:
    whole = Training(process_spec(tmp_path / "run", prepared))
    whole.open()
    train(whole, batches, 3)
    folder = whole.save()
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
    folder = training.save()
    gone = process_spec(tmp_path / "run", tmp_path / "gone", resume_from=str(folder))
    resumed = Training(gone)
    resumed.open()
    train(resumed, batches, 2)
    assert AutoTokenizer.from_pretrained(resumed.save()).eos_token_id == 2


def test_checkpoint_and_export_are_hugging_face_folders(
    tmp_path: Path, prepared: Path, batches: list[list[BatchSample]]
) -> None:
    model = ModelSettings(path=str(prepared), dtype="bfloat16")
    training = Training(process_spec(tmp_path / "run", prepared, model=model))
    training.open()
    train(training, batches, 1)
    expected = {name: p.detach().clone() for name, p in training.model.named_parameters()}
    saved = AutoModelForCausalLM.from_pretrained(training.save(), dtype=torch.float32)
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
    folder = training.save()
    file = folder / "optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(WeightError, match=r"optimizer\.safetensors is damaged"):
        Training(process_spec(tmp_path / "run", prepared, resume_from=str(folder))).open()


def test_saving_twice_at_one_version_writes_once(tmp_path: Path, prepared: Path) -> None:
    training = Training(process_spec(tmp_path / "run", prepared))
    training.open()
    first = training.save()
    made = (first / "manifest.json").stat().st_mtime_ns
    assert training.save() == first
    assert (first / "manifest.json").stat().st_mtime_ns == made


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
    with pytest.raises(PolicyDiverged, match=r"at version 0 \(.*embed.* holds a value that is not finite\)"):
        training.publish()


def test_wrong_setting_is_told_by_its_key(tmp_path: Path, prepared: Path) -> None:
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
