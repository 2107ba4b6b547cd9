"""Claims about one policy in training, without a controller: what is counted, recorded, published, and when it ends."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from areal_like.config import ModelSettings, ProcessSpec, SamplingSettings, StalenessSettings
from areal_like.errors import PolicyDiverged, UserError
from areal_like.weights.weight_store import open_payload, verify
from areal_like.wire.messages import BatchSample, RunPosition
from trainer import training as module
from trainer.backends.registry import BACKENDS
from trainer.checkpoints import checkpoint
from trainer.ranks import Order, Ranks
from trainer.training import MAX_ADAPTERS, MAX_BAD_STEPS, Training, trainer_settings


def spec_of(prepared: Path, **changes: Any) -> ProcessSpec:
    run_dir = prepared.parent / "run"
    facts: dict[str, Any] = {
        "role": "trainer", "name": "trainer", "run_id": "t", "run_dir": str(run_dir), "hub_address": "tcp://127.0.0.1:1",
        "parent_pid": os.getpid(), "seed": 1, "model": ModelSettings(path=str(prepared)),
        "sampling": SamplingSettings(), "staleness": StalenessSettings(), "groups_per_step": 3, "group_size": 4,
        "num_steps": 5, "weight_dir": str(run_dir / "weights"), "settings": {"optimizer": {"lr": 1e-3}},
    }  # fmt: skip
    merged = {**facts, **changes}
    return ProcessSpec(**{**merged, "settings": {"device": "cpu", **merged["settings"]}})


def opened(prepared: Path, **changes: Any) -> Training:
    training = Training(spec_of(prepared, **changes))
    training.open()
    return training


@pytest.fixture
def samples(make_samples: Callable[..., list[BatchSample]]) -> Callable[[int], list[BatchSample]]:
    return lambda step: make_samples([4, 4, 4], version=step, seed=step)


# ---------------------------------------------------------------- start


def test_opened_training_is_at_version_0_without_a_checkpoint_and_records_what_was_chosen(prepared: Path) -> None:
    training = Training(spec_of(prepared))
    assert training.version == -1, "there is no policy yet"
    training.open()
    assert (training.version, training.saved, training.is_saved) == (0, None, False)
    recorded = json.loads((prepared.parent / "run" / "trainer.json").read_text())
    assert {
        "backend": "torch", "ranks": 1, "attention": "sdpa", "device": "cpu", "precision": "float32",
        "torch": torch.__version__, "threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in training.model.parameters()),
    }.items() <= recorded.items()  # fmt: skip
    assert 0 <= recorded["disagreement_nats"] < 1e-3
    assert recorded["attention_reason"].startswith("auto: cpu")
    assert recorded["backend_reason"]
    assert recorded["transformers"]
    assert recorded["hardware"].startswith("cpu ")


def test_screen_shows_attention_and_with_a_backend_that_was_not_named_that_too(prepared: Path) -> None:
    words = opened(prepared, settings={"backend": "auto"}).setup_description
    assert words.startswith("attention sdpa (auto: cpu")
    assert "; backend torch (auto: one rank" in words
    assert "backend" not in opened(prepared, settings={"backend": "torch"}).setup_description


def test_only_rank_0_writes_what_was_chosen(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Training, "_meet", lambda self, name: Ranks(1, 1, torch.device("cpu")))
    opened(prepared)
    assert not (prepared.parent / "run" / "trainer.json").exists()


def test_several_ranks_meet_with_the_deadlines_of_the_settings(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[tuple[str, float, float]] = []

    def join(spec: ProcessSpec, device: str, *, timeout_s: float, order_timeout_s: float) -> Ranks:
        met.append((device, timeout_s, order_timeout_s))
        return Ranks(0, 2, torch.device("cpu"))

    monkeypatch.setattr(module.Ranks, "join", join)
    training = Training(spec_of(prepared, settings={"rank_timeout_s": 11.0, "max_batch_wait_s": 100.0}))
    assert training._meet(BACKENDS["fsdp"]).size == 2
    assert met == [("cpu", 11.0, 111.0)], "an order comes only after a batch that may take its time"
    assert training._meet(BACKENDS["torch"]).size == 1
    assert len(met) == 1


def test_first_mistake_in_the_settings_is_named_by_its_key(prepared: Path) -> None:
    for settings, key in (
        ({"optimizer": {"lr": -1}}, "trainer.optimizer.lr"),
        ({"precision": "x"}, "trainer.precision"),
    ):
        with pytest.raises(UserError) as raised:
            trainer_settings(spec_of(prepared, settings=settings))
        assert raised.value.where == key
        assert raised.value.remedy == "see areal-like validate"


# ---------------------------------------------------------------- steps


def position(drawn: int, *staleness: int) -> RunPosition:
    return RunPosition(drawn=drawn, staleness=staleness)


def test_step_counts_its_tokens_and_moves_the_run_to_the_position_of_its_batch(prepared: Path, samples: Any) -> None:
    training = opened(prepared)
    tokens = 0.0
    for step in (1, 2):
        batch = training.prepare(samples(step), step, position(10 * step, 0, step, step))
        metrics = training.run(batch)
        tokens += metrics["tokens"]
        assert training.version == step
        assert metrics["step_s"] > 0
        assert training.counters == {"steps": float(step), "tokens": tokens, "skipped_updates": 0.0}
        assert training._position.drawn == 10 * step
    assert training.staleness == {0: 2, 1: 2, 2: 2}
    assert training._positions == {}, "nothing is kept of a step that is done"


def test_gradients_of_every_update_are_given_before_they_are_clipped(prepared: Path, samples: Any) -> None:
    settings = {"mini_batches": 2, "optimizer": {"lr": 1e-3, "max_grad_norm": 1e-6}}
    training = opened(prepared, settings={**settings, "critic": {}, "advantage": {"kind": "gae"}})
    norms: list[float] = []
    names: set[str] = set()

    def watch(gradients: Mapping[str, torch.Tensor]) -> None:
        own = [one for name, one in gradients.items() if not name.startswith("critic/")]
        names.update(gradients)
        norms.append(float(torch.stack([one.norm() for one in own]).norm()))

    training.watch_gradients(watch)
    metrics = training.run(training.prepare(samples(1), 1))
    assert len(norms) == 2
    assert max(norms) == pytest.approx(metrics["grad_norm_max"], rel=1e-5)
    own = {name for name, _ in training.model.named_parameters()}
    assert {name for name in names if not name.startswith("critic/")} == own
    assert {name for name in names if name.startswith("critic/")}


def test_batch_packed_ahead_changes_nothing_yet(prepared: Path, samples: Any) -> None:
    training = opened(prepared)
    first = training.prepare(samples(1), 1, position(10))
    training.prepare(samples(2), 2, position(20))
    training.run(first)
    assert training._position.drawn == 10


def test_batch_without_a_position_leaves_the_run_where_it_was(prepared: Path, samples: Any) -> None:
    training = opened(prepared)
    training.run(training.prepare(samples(1), 1, position(10, 1)))
    training.run(training.prepare(samples(2), 2))
    assert training._position.drawn == 10


def test_batch_of_another_step_is_our_own_mistake(prepared: Path, samples: Any) -> None:
    training = opened(prepared)
    with pytest.raises(AssertionError, match="batch of step 2 at version 0"):
        training.run(training.prepare(samples(2), 2))


def test_only_bad_gradients_in_a_row_end_the_training_and_the_last_good_version_is_named(
    prepared: Path, samples: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    training = opened(prepared)
    bad = iter([1.0] * (MAX_BAD_STEPS - 1) + [0.0] + [2.0] * MAX_BAD_STEPS)
    monkeypatch.setattr(training._step, "run", lambda prepared: {"tokens": 5.0, "skipped_updates": next(bad)})

    def step() -> None:
        number = training.version + 1
        training.run(training.prepare(samples(number), number))

    for _ in range(2 * MAX_BAD_STEPS - 1):
        step()
    with pytest.raises(PolicyDiverged) as raised:
        step()
    assert f"not finite in {MAX_BAD_STEPS} steps in a row, up to step {2 * MAX_BAD_STEPS}" in str(raised.value)
    assert f"at version {MAX_BAD_STEPS} " in str(raised.value)
    assert training.counters["skipped_updates"] == MAX_BAD_STEPS - 1 + 2 * MAX_BAD_STEPS
    assert sum("the update was skipped" in record.getMessage() for record in caplog.records) == 2 * MAX_BAD_STEPS - 1


def test_first_step_alone_settles_the_heap(prepared: Path, samples: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settled: list[int] = []
    training = opened(prepared)
    monkeypatch.setattr(module, "freeze_heap", lambda: settled.append(training.version))
    for step in (1, 2, 3):
        training.run(training.prepare(samples(step), step))
    assert settled == [1]


# ---------------------------------------------------------------- what it leaves behind


def test_published_version_is_the_one_it_was_copied_at(prepared: Path, samples: Any) -> None:
    training = opened(prepared)
    training.publish()()
    before = training.model.get_input_embeddings().weight.detach().clone()
    training.run(training.prepare(samples(1), 1))
    write = training.publish()
    now = training.model.get_input_embeddings().weight.detach().clone()
    training.run(training.prepare(samples(2), 2))
    written = write()
    manifest, payload = open_payload(written.path)
    assert (manifest.version, manifest.lineage) == (1, training.spec.lineage)
    verify(manifest, payload)
    assert not torch.equal(before, now)
    (name,) = [name for name in payload if "embed_tokens" in name]
    assert torch.equal(torch.frombuffer(bytearray(payload[name]), dtype=torch.float32).view(now.shape), now)


def test_newest_version_is_written_again_on_demand_and_no_older_one(prepared: Path, samples: Any) -> None:
    training = opened(prepared)
    training.publish()()
    training.run(training.prepare(samples(1), 1))
    written = training.publish()()
    written.path.unlink()
    again = training.publish_again(1)
    assert again is not None
    verify(*open_payload(again.path))
    assert training.publish_again(0) is None


def test_checkpoint_is_of_the_present_version_until_the_next_step(prepared: Path, samples: Any) -> None:
    training = opened(prepared)
    training.run(training.prepare(samples(1), 1, position(10, 1, 0, 1)))
    assert not training.is_saved
    write = training.save()
    assert not training.is_saved, "copied is not written"
    saved = write()
    assert training.saved == saved.folder == checkpoint.checkpoint_folder(training.run_dir, 1)
    assert training.is_saved
    assert saved.num_bytes > 0
    assert saved.write_s > 0
    state = checkpoint.read_state(saved.folder)
    assert (state.version, state.lineage, state.run_id) == (1, training.spec.lineage, "t")
    assert state.counters == training.counters
    assert (state.position.drawn, state.staleness) == (10, {0: 1, 1: 2})
    training.run(training.prepare(samples(2), 2))
    assert not training.is_saved
    assert training.saved == saved.folder


def test_resumed_run_goes_on_counting_and_says_where_its_settings_differ(
    prepared: Path, samples: Any, caplog: pytest.LogCaptureFixture
) -> None:
    training = opened(prepared)
    training.run(training.prepare(samples(1), 1, position(10, 1, 0, 1)))
    folder = training.save()().folder
    words = "the settings differ from those of the checkpoint"
    same = opened(prepared, resume_from=str(folder), lineage="l1")
    assert words not in caplog.text
    assert (same.version, same.counters, same.staleness) == (1, training.counters, {0: 1, 1: 2})
    assert same._position.drawn == 10
    assert same.saved == folder
    for changes in ({"seed": 2}, {"group_size": 8}, {"settings": {"optimizer": {"lr": 2e-3}}}):
        caplog.clear()
        opened(prepared, resume_from=str(folder), **changes)
        assert words in caplog.text, changes
    caplog.clear()
    opened(prepared, resume_from=str(folder), name="other", hub_address="tcp://127.0.0.1:2")
    assert words not in caplog.text, "where it runs is no setting of the training"


def test_checkpoint_of_another_run_is_where_it_starts_but_not_its_own(prepared: Path, samples: Any) -> None:
    training = opened(prepared)
    training.run(training.prepare(samples(1), 1))
    folder = training.save()().folder
    other = opened(prepared, resume_from=str(folder), run_dir=str(prepared.parent / "other"))
    assert other.version == 1
    assert other.saved is None
    assert not other.is_saved


class Recorded(Ranks):
    """Rank `rank` of two, whose messages go nowhere."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, 2, torch.device("cpu"))
        self.log: list[Any] = []
        serving: Any = SimpleNamespace(serve=self._serve)
        self.saves = serving

    def tell(self, order: Order) -> None:
        self.log.append(order)

    def end_batches(self) -> None:
        self.log.append("end of batches")

    def send_batch(self, samples: Any, step: int, lineage: str) -> None:
        self.log.append(("batch", len(samples), step, lineage))

    def _serve(self, copied: Any) -> None:
        self.log.append(("part", len(copied.places), len(copied.buffer_U)))

    def close(self) -> None:
        self.log.append("closed")


def test_rank_0_tells_the_others_before_it_does_anything_together_with_them(
    prepared: Path, samples: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = opened(prepared)
    batch = training.prepare(samples(1), 1)
    ranks = training.ranks = Recorded(0)
    monkeypatch.setattr(
        training._step, "run", lambda prepared: ranks.log.append("run") or {"tokens": 1.0, "skipped_updates": 0.0}
    )
    monkeypatch.setattr(module, "snapshot", lambda *_, **__: ranks.log.append("snapshot") or {})
    monkeypatch.setattr(training._copy, "take", lambda parts: ranks.log.append("copy"))
    monkeypatch.setattr(module, "export_policy", lambda *_, **__: ranks.log.append("export"))
    training.run(batch)
    training.publish()
    training.save()
    training.export()
    training.close()
    assert ranks.log == [
        Order.STEP, "run", Order.PUBLISH, "snapshot", Order.SAVE, "copy", Order.EXPORT, "export",
        "end of batches", Order.END, "closed",
    ]  # fmt: skip
    ranks.log.clear()
    training._step.prepare = lambda samples, version: version  # type: ignore[method-assign, assignment, return-value]
    assert training.prepare(samples(2), 2) == 1, "a step starts from the version before it"
    assert ranks.log == [("batch", 12, 2, training.spec.lineage)]


def test_other_ranks_send_their_part_of_a_checkpoint_and_write_nothing(prepared: Path) -> None:
    training = opened(prepared)
    training.ranks = ranks = Recorded(1)
    assert training.export() == training.run_dir / "final"
    assert not (training.run_dir / "final").exists()
    saved = training.save()()
    assert saved.folder == checkpoint.checkpoint_folder(training.run_dir, 0)
    assert not saved.folder.exists()
    ((_, num_places, num_bytes),) = [entry for entry in ranks.log if isinstance(entry, tuple)]
    assert num_places > 5
    assert saved.num_bytes == num_bytes
    assert saved.write_s > 0
    assert not training.is_saved


def test_setup_is_logged_with_reasons(prepared: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "trainer.training"):
        opened(prepared)
    messages = [record.getMessage() for record in caplog.records]
    assert any(message.startswith("attention: sdpa (auto: cpu") for message in messages)
    assert any(message.startswith("backend: torch (") for message in messages)


def test_memory_is_taken_for_a_step_and_left_once_its_version_is_copied(
    prepared: Path, samples: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = opened(prepared)
    seen: list[str] = []
    right = training._step.run
    monkeypatch.setattr(training._devices, "take", lambda: seen.append("take"))
    monkeypatch.setattr(training._devices, "leave", lambda: seen.append("leave"))
    monkeypatch.setattr(training._step, "run", lambda batch: seen.append("run") or right(batch))
    honest = module.snapshot
    monkeypatch.setattr(module, "snapshot", lambda *args, **keys: seen.append("copy") or honest(*args, **keys))
    training.run(training.prepare(samples(1), 1))
    training.publish()
    assert seen == ["take", "run", "copy", "leave"]


def test_no_memory_is_held_for_the_version_before_while_one_is_copied(prepared: Path) -> None:
    training = opened(prepared)
    training.publish()()
    assert training.publish_again(0) is not None
    write = training.publish()
    assert training.publish_again(0) is None
    write()
    assert training.publish_again(0) is not None


@pytest.mark.parametrize(("most", "num"), [(0, 2), (1, 3), (2, 4), (3, MAX_ADAPTERS), ("unbounded", MAX_ADAPTERS)])
def test_as_many_adapters_are_kept_to_compare_engines_with_as_answers_may_be_old(
    prepared: Path, most: Any, num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The present one, those that answers may begin with, and one before them; but a bounded number."""
    made: list[dict[str, Any]] = []

    class Noted(module.AdapterCheck):
        def __init__(self, *args: Any, **keys: Any) -> None:
            made.append(keys)
            super().__init__(*args, **keys)

    monkeypatch.setattr(module, "AdapterCheck", Noted)
    training = opened(
        prepared, settings={"lora": {"rank": 2, "targets": ["q_proj"]}}, staleness=StalenessSettings(max_staleness=most)
    )
    (keys,) = made
    assert (keys["num_versions"], keys["dtype"]) == (num, training.spec.model.dtype)
    assert keys["fence"] == training._copy.fence
    assert training._adapter_check is not None
    assert list(training._adapter_check._kept) == [0]


# ---------------------------------------------------------------- full tensors


@pytest.mark.parametrize("has_group", [False, True])
def test_full_tensors_are_gathered_only_from_a_model_in_parts(has_group: bool) -> None:
    asked: list[Any] = []
    policy = SimpleNamespace(full_weights=lambda *wanted: asked.append(wanted) or {"w": torch.zeros(1)})
    training: Any = SimpleNamespace(ranks=SimpleNamespace(has_group=has_group), policy=policy)
    for wanted in ((), (str.isupper,)):
        assert (Training._weights_in_parts(training, *wanted) is not None) == has_group
    assert asked == ([(), (str.isupper,)] if has_group else [])
