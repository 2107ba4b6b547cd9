"""What each process of a run is started with, as the configuration says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from valid_config import make

from areal_like.config import ProcessSpec, TraceSettings
from areal_like.trace import DETAIL_SHARE
from areal_like.transport.credentials import process_folder
from controller.config.run_config import RunConfig
from controller.run_folder.run_folder import RunFolder
from controller.wiring import process_specs
from controller.wiring.process_specs import (
    Addresses,
    Role,
    new_worker_name,
    num_cores,
    pinned_facts,
    prepare_spec,
    process_spec,
    reward_names,
    threads_for,
    trace_settings,
    trainer_names,
    worker_names,
    worker_number,
)

ADDRESSES = Addresses("tcp://hub:1", ("ipc:///r0", "ipc:///r1"), Path("/w"), Path("/k"), "file:///meet")
WARM_START = {"data": {"generator": "running_sum", "limit": 9}, "sft": {"steps": 3, "log_every": 1}}


def spec_of(config: RunConfig, role: Role, name: str, **more: Any) -> ProcessSpec:
    return process_spec(
        config, RunFolder(Path("/run")), ADDRESSES,
        run_id="r", role=role, name=name, model_dir=Path("/model"), lineage="l3", **more,
    )  # fmt: skip


# ---------------------------------------------------------------- names


def test_names_are_those_of_the_workers_services_and_ranks_in_order() -> None:
    config = make(rollout__num_workers=3, reward__num_services=2, trainer__ranks=3)
    assert worker_names(config) == ["rollout-0", "rollout-1", "rollout-2"]
    assert reward_names(config) == ["reward-0", "reward-1"]
    assert trainer_names(config) == ["trainer", "trainer-1", "trainer-2"]
    assert reward_names(make()) == ["reward"], "a single service has no number"
    assert trainer_names(make()) == ["trainer"]


def test_a_run_that_uses_shared_services_or_needs_none_starts_none() -> None:
    assert reward_names(make(reward={"addresses": ["tcp://a:1"]})) == []


def test_a_worker_that_is_added_gets_the_lowest_free_number() -> None:
    assert new_worker_name([]) == "rollout-0"
    assert new_worker_name(["rollout-0", "rollout-2", "trainer", "reward-1"]) == "rollout-1"
    assert new_worker_name(["rollout-1", "rollout-0"]) == "rollout-2"
    assert worker_number("rollout-12") == 12


# ---------------------------------------------------------------- one process


def test_all_processes_share_what_the_configuration_says_of_the_run() -> None:
    config = make(
        seed=5,
        groups_per_step=3,
        group_size=4,
        num_steps=7,
        launch__heartbeat_s=2.0,
        launch__silence_s=90.0,
        launch__controller_silence_s=95.0,
    )
    for role, name in (("trainer", "trainer"), ("reward", "reward"), ("rollout", "rollout-0")):
        spec = spec_of(config, role, name)  # type: ignore[arg-type]
        assert (spec.role, spec.name, spec.run_id, spec.run_dir) == (role, name, "r", "/run")
        assert (spec.seed, spec.groups_per_step, spec.group_size, spec.num_steps) == (5, 3, 4, 7)
        assert (spec.hub_address, spec.weight_dir, spec.lineage) == ("tcp://hub:1", "/w", "l3")
        assert (spec.heartbeat_s, spec.silence_s, spec.controller_silence_s) == (2.0, 90.0, 95.0)
        assert spec.startup_timeout_s == config.launch.startup_timeout_s
        assert (spec.mode, spec.is_colocated, spec.staleness) == (config.mode, False, config.staleness)
        assert (spec.sampling, spec.max_context) == (config.sampling, config.rollout.engine.max_context)
        assert (spec.weight_transfer, spec.merges_adapters) == (config.trainer.weights.kind, False)
        assert (spec.parent_pid, spec.emulation, spec.has_own_gpus) == (os.getpid(), None, False)
        assert spec.curve_dir == str(process_folder(Path("/k"), name)), "each has credentials of its own"
        assert spec.model.path == "/model"
        assert (spec.model.init, spec.model.tokenizer) == (None, "from_model"), "the prepared model is whole"


@pytest.mark.parametrize("publish", ["adapter", "merged"])
def test_workers_merge_adapters_where_adapters_are_published(publish: str) -> None:
    config = make(trainer__lora={"rank": 4, "publish": publish})
    assert spec_of(config, "rollout", "rollout-0").merges_adapters == (publish == "adapter")


def test_workers_know_which_model_is_the_teacher() -> None:
    advantage = {"kind": "distillation"}
    for teacher, name in (({"model": "big"}, "big"), ({"path": "/big"}, ""), (None, "")):
        config = make(trainer={"teacher": teacher, "advantage": advantage})
        assert spec_of(config, "rollout", "rollout-0").teacher_model == name


def test_answers_of_external_models_are_recorded_in_the_run_unless_a_file_is_named() -> None:
    endpoint = {"base_url": "http://h/v1", "model": "m"}
    models = [{"name": "a", "endpoint": endpoint}, {"name": "b", "endpoint": {**endpoint, "records": "mine.jsonl"}}]
    config = make(rollout={"workflow": "my:Own", "models": models})
    spec = spec_of(config, "rollout", "rollout-0")
    files = [one["endpoint"]["records"] for one in spec.settings["models"]]
    assert files == [f"{spec.run_dir}/external/model-a.jsonl", "mine.jsonl"]


def test_a_trainer_continues_from_its_checkpoint_and_each_rank_knows_its_place() -> None:
    config = make(trainer__ranks=3)
    spec = spec_of(config, "trainer", "trainer-2", resume_from=Path("/c"))
    assert (spec.rank, spec.num_ranks, spec.ranks_address, spec.resume_from) == (2, 3, "file:///meet", "/c")
    assert spec.settings == config.trainer.model_dump(mode="json")
    worker = spec_of(config, "rollout", "rollout-0")
    assert (worker.rank, worker.num_ranks, worker.ranks_address, worker.resume_from) == (0, 1, "", None)


def test_each_reward_service_binds_its_own_address_and_all_know_every_one() -> None:
    config = make(reward__num_services=2)
    first, second, worker = (spec_of(config, "reward", "reward-0"), spec_of(config, "reward", "reward-1"),
                             spec_of(config, "rollout", "rollout-0"))  # fmt: skip
    assert (first.bind_address, second.bind_address, worker.bind_address) == ("ipc:///r0", "ipc:///r1", None)
    assert first.reward_addresses == worker.reward_addresses == ("ipc:///r0", "ipc:///r1")
    assert (worker.are_rewards_shared, worker.reward_curve_dir) == (False, None)
    assert first.settings == config.reward.model_dump(mode="json")


def test_shared_reward_services_are_asked_with_their_own_keys() -> None:
    config = make(reward={"addresses": ["tcp://a:1", "tcp://b:2"], "curve_dir": "/keys", "ask_for": "mine"})
    spec = spec_of(config, "rollout", "rollout-0")
    assert spec.reward_addresses == ("tcp://a:1", "tcp://b:2")
    assert (spec.are_rewards_shared, spec.reward_curve_dir, spec.reward_scorer) == (True, "/keys", "mine")
    assert spec_of(make(), "rollout", "rollout-0").reward_scorer == ""


def test_each_worker_has_its_device_and_one_added_later_that_of_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunConfig, "rollout_devices", property(lambda self: ("cuda:1", "cuda:2")))
    config = make(rollout__num_workers=2)
    devices = [spec_of(config, "rollout", f"rollout-{n}").settings["engine"]["device"] for n in range(5)]
    assert devices == ["cuda:1", "cuda:2", "cuda:1", "cuda:2", "cuda:1"]
    section = spec_of(config, "rollout", "rollout-0").settings
    expected = config.rollout.model_dump(mode="json")
    expected["engine"]["device"] = "cuda:1"
    assert section == expected


# ---------------------------------------------------------------- threads


@pytest.mark.parametrize(
    ("mode", "ranks", "role", "threads"),
    [
        ("async", 1, "trainer", 1), ("async", 1, "rollout", 1), ("async", 1, "reward", 1),
        ("sync", 1, "trainer", 8), ("sync", 3, "trainer", 2), ("sync", 9, "trainer", 1), ("sync", 3, "rollout", 8),
        ("sync", 1, "reward", 1),
    ],
)  # fmt: skip
def test_engine_and_trainer_take_all_cores_only_where_they_take_turns(
    monkeypatch: pytest.MonkeyPatch, mode: str, ranks: int, role: Role, threads: int
) -> None:
    monkeypatch.setattr(process_specs, "num_cores", lambda: 8)
    assert threads_for(make(mode=mode, trainer__ranks=ranks), role) == threads


def test_threads_that_are_configured_are_what_a_process_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_specs, "num_cores", lambda: 8)
    config = make(mode="sync", rollout__threads=3, trainer__threads=5)
    assert [threads_for(config, role) for role in ("rollout", "trainer", "reward")] == [3, 5, 1]
    assert spec_of(config, "rollout", "rollout-0").num_threads == 3


def test_cores_are_those_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 4, 5} if pid == 0 else set(), raising=False)
    assert num_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    for found, cores in ((6, 6), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda found=found: found)
        assert num_cores() == cores


# ---------------------------------------------------------------- timeline


def test_without_a_timeline_nothing_is_traced() -> None:
    assert trace_settings(make(metrics__trace=False)) == TraceSettings()


@pytest.mark.parametrize(("num_workers", "busiest"), [(1, 4 * 600), (2, 2 * 600), (4, 2 * 600)])
def test_the_busiest_process_stays_within_the_events_of_a_timeline(num_workers: int, busiest: int) -> None:
    config = make(
        groups_per_step=3, group_size=2, num_steps=100, rollout__num_workers=num_workers,
        metrics__max_trace_events=1000, metrics__trace_samples_per_step=None, metrics__trace=True,
    )  # fmt: skip
    settings = trace_settings(config)
    assert settings.max_events == 1000
    assert busiest / settings.every_group <= DETAIL_SHARE * 1000 < busiest / (settings.every_group - 1)


def test_samples_drawn_individually_are_bounded_by_step() -> None:
    facts = {"groups_per_step": 4, "group_size": 4, "num_steps": 1, "metrics__trace": True}
    assert trace_settings(make(**facts, metrics__trace_samples_per_step=5)).every_group == 4, "16 / 5, rounded up"
    assert trace_settings(make(**facts, metrics__trace_samples_per_step=16)).every_group == 1
    assert trace_settings(make(**facts, metrics__trace_samples_per_step=None)).every_group == 1


# ---------------------------------------------------------------- preparation


def test_the_preparation_knows_model_rows_and_where_its_results_go(tmp_path: Path) -> None:
    config = make(seed=5, warm_start=WARM_START, rollout__add_bos="always", rollout__prompt_template="{prompt}!")
    spec = prepare_spec(
        config,
        out_dir=tmp_path / "m",
        sft_rows=tmp_path / "rows",
        status_path=tmp_path / "s",
        publish_to=tmp_path / "w",
    )
    assert (spec.seed, spec.model, spec.parent_pid) == (5, config.model, os.getpid())
    assert (spec.out_dir, spec.sft_rows) == (str(tmp_path / "m"), str(tmp_path / "rows"))
    assert (spec.status_path, spec.publish_to) == (str(tmp_path / "s"), str(tmp_path / "w"))
    assert (spec.publish_kind, spec.prompt_template, spec.add_bos) == (
        config.trainer.weights.layout,
        "{prompt}!",
        "always",
    )
    assert config.warm_start is not None
    assert spec.sft == config.warm_start.sft
    without = prepare_spec(config, out_dir=tmp_path, sft_rows=None, status_path=tmp_path)
    assert (without.sft, without.sft_rows, without.publish_to) == (None, None, None)
    assert prepare_spec(make(), out_dir=tmp_path, sft_rows=None, status_path=tmp_path).sft is None


def test_supervised_steps_take_the_threads_that_are_configured_or_all_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(process_specs, "num_cores", lambda: 8)

    def threads(config: RunConfig, rows: Path | None) -> int:
        return prepare_spec(config, out_dir=tmp_path, sft_rows=rows, status_path=tmp_path).num_threads

    configured = {**WARM_START, "sft": {**WARM_START["sft"], "threads": 3}}  # type: ignore[dict-item]
    assert threads(make(warm_start=configured), tmp_path) == 3
    assert threads(make(warm_start=configured), None) == 8
    assert threads(make(warm_start=WARM_START), tmp_path) == 8
    assert threads(make(), None) == 8


def test_a_prepared_model_is_another_one_where_seed_data_model_or_supervised_steps_differ() -> None:
    base = pinned_facts(make(warm_start=WARM_START))
    assert pinned_facts(make(warm_start=WARM_START)) == base
    others: list[dict[str, Any]] = [
        {"seed": 8}, {"data__seed": 9}, {"model__tokenizer": "characters:running_sum"}, {"rollout__add_bos": "always"},
        {"rollout__prompt_template": "{prompt}!"}, {"warm_start": {**WARM_START, "sft": {"steps": 4, "log_every": 1}}},
        {"warm_start": None},
    ]  # fmt: skip
    for changes in others:
        assert pinned_facts(make(**{"warm_start": WARM_START, **changes})) != base, changes
    sft = {"steps": 3, "log_every": 2, "threads": 4}
    same = make(warm_start={**WARM_START, "sft": sft}, num_steps=77)
    assert pinned_facts(same) == base, "what changes nothing about the model"


def test_without_supervised_steps_the_prompt_is_no_part_of_the_model() -> None:
    assert pinned_facts(make(rollout__add_bos="always")) == pinned_facts(make())
    assert pinned_facts(make())["warm_start"] is None
