"""The parts of a run as they are made: each receives what the configuration and the ledger say of it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from valid_config import make

from areal_like.config import ProcessSpec
from areal_like.errors import UserError
from areal_like.transport.credentials import make_run_credentials, process_folder
from controller.config.run_config import RunConfig
from controller.config.stall_limit import stall_limit_s
from controller.coordinator.snapshot import BatchGroup, BatchRecord, CheckpointRecord, LedgerState
from controller.run_folder.invitation import INVITATION_FILE, Invitation
from controller.run_folder.run_folder import RunFolder
from controller.runtime import composition
from controller.runtime.composition import ProcessStarter, compose, invite, make_hub, make_supervisor, server_settings
from controller.runtime.inbound import ACCEPTED
from controller.runtime.starting_point import StartingPoint
from controller.wiring.process_specs import Addresses


class Supervisor:
    """Takes down what it is given."""

    def __init__(self) -> None:
        self.added: list[tuple[ProcessSpec, Path, int]] = []
        self.times: list[float] = []

    @property
    def names(self) -> list[str]:
        return [spec.name for spec, _, _ in self.added]

    def add(self, spec: ProcessSpec, path: Path, max_restarts: int, now_s: float) -> None:
        self.added.append((spec, path, max_restarts))
        self.times.append(now_s)


def starter(config: RunConfig, root: Path) -> tuple[ProcessStarter, Supervisor]:
    supervisor = Supervisor()
    make_run_credentials(root / "keys")
    addresses = Addresses("tcp://hub:1", ("ipc:///r0", "ipc:///r1"), root / "w", root / "keys", "file:///meet")
    processes = ProcessStarter(
        config, RunFolder(root), supervisor, addresses, run_id="r", model_dir=root / "model", lineage="l2"  # type: ignore[arg-type]
    )  # fmt: skip
    return processes, supervisor


CONFIG = {
    "rollout__num_workers": 2, "reward__num_services": 2, "trainer__ranks": 2,
    "reward__max_restarts": 3, "rollout__max_restarts": 4, "trainer__max_restarts": 5,
}  # fmt: skip


def test_a_run_begins_with_services_then_ranks_then_workers_each_with_its_own_budget(tmp_path: Path) -> None:
    processes, supervisor = starter(make(**CONFIG), tmp_path)
    processes.add_all(tmp_path / "c", has_trainer=True)
    assert [(spec.role, spec.name, budget) for spec, _, budget in supervisor.added] == [
        ("reward", "reward-0", 3), ("reward", "reward-1", 3), ("trainer", "trainer", 5), ("trainer", "trainer-1", 5),
        ("rollout", "rollout-0", 4), ("rollout", "rollout-1", 4),
    ]  # fmt: skip
    assert [path for _, path, _ in supervisor.added] == [
        RunFolder(tmp_path).processes / f"{name}.json" for name in supervisor.names
    ]
    assert [spec.resume_from for spec, _, _ in supervisor.added] == [
        str(tmp_path / "c") if spec.role == "trainer" else None for spec, _, _ in supervisor.added
    ], "only the trainer continues from a checkpoint"
    assert {(spec.run_id, spec.lineage, spec.model.path) for spec, _, _ in supervisor.added} == {
        ("r", "l2", str(tmp_path / "model"))
    }
    assert supervisor.times == sorted(supervisor.times)
    for name in supervisor.names:
        assert (process_folder(tmp_path / "keys", name) / "controller.token").is_file()


def test_an_evaluation_starts_no_trainer_and_a_worker_can_be_added(tmp_path: Path) -> None:
    processes, supervisor = starter(make(**CONFIG), tmp_path)
    processes.add_all(None, has_trainer=False)
    assert supervisor.names == ["reward-0", "reward-1", "rollout-0", "rollout-1"]
    assert processes.add_worker() == "rollout-2"
    assert supervisor.names[-1] == "rollout-2"
    assert supervisor.added[-1][2] == 4


def test_an_offer_has_all_that_a_worker_needs_and_leaves_nothing_in_the_run_s_folder(tmp_path: Path) -> None:
    processes, supervisor = starter(make(**CONFIG), tmp_path)
    (tmp_path / "model").mkdir()
    for name, content in (("config.json", b"{}"), ("tokenizer.json", b"[]"), ("model.safetensors", b"weights")):
        (tmp_path / "model" / name).write_bytes(content)
    processes.add_all(None, has_trainer=False)
    spec, offer = processes.offer()
    assert (spec.name, offer.name, ProcessSpec.model_validate_json(offer.spec)) == ("rollout-2", "rollout-2", spec)
    assert offer.model_files == {"config.json": b"{}", "tokenizer.json": b"[]"}
    assert "controller.token" in offer.keys
    assert "controller.join" not in offer.keys
    assert supervisor.names[-1] == "rollout-1", "it is supervised when it registers"
    assert not process_folder(tmp_path / "keys", "rollout-2").exists()
    supervisor.added.pop()  # rollout-1 drained
    assert processes.offer()[1].name == "rollout-3", "neither the name of an earlier offer nor one that the run used"
    assert [processes.add_worker() for _ in range(2)] == ["rollout-1", "rollout-4"], "other tokens are somebody else's"


def test_the_invitation_is_of_this_session_and_has_no_secret_of_a_hub(tmp_path: Path) -> None:
    make_run_credentials(tmp_path / "keys")
    session: Any = Session(tmp_path, make())
    invite(session, "tcp://10.0.0.1:5")
    found = Invitation.load(tmp_path / "keys" / INVITATION_FILE)
    assert (found.run_id, found.address) == ("r", "tcp://10.0.0.1:5")
    assert sorted(found.credentials) == ["client.public", "client.secret", "controller.token", "server.public"]


@pytest.mark.parametrize(
    ("is_evaluation", "config", "words"),
    [
        (False, {}, ""),
        (True, {}, "an evaluation admits no further workers"),
        (False, {"mode": "sync", "placement": "colocated", "trainer__weights__kind": "shm"}, "share their devices"),
        (False, {"encryption": {"key_env": "RUN_KEY"}}, "the run is encrypted"),
    ],
)
def test_evaluations_and_shared_devices_admit_nobody(
    tmp_path: Path, is_evaluation: bool, config: dict[str, Any], words: str
) -> None:
    session: Any = Session(tmp_path, make(**config))
    session.is_evaluation = is_evaluation
    found = composition._obstacle(session)
    assert (words in found) if words else not found


# ---------------------------------------------------------------- hub and supervisor


@pytest.mark.parametrize(("port", "bind"), [(0, "tcp://10.0.0.1:*"), (5000, "tcp://10.0.0.1:5000")])
def test_the_hub_is_the_controllers_on_the_launchers_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, port: int, bind: str
) -> None:
    monkeypatch.setattr(composition, "Hub", lambda **facts: facts)
    session: Any = SimpleNamespace(
        config=make(launch__port=port),
        run_id="r",
        launcher=SimpleNamespace(host="10.0.0.1"),
        folder=RunFolder(tmp_path),
    )
    made: Any = make_hub(session)
    assert made == {
        "run_id": "r", "role": "controller", "bind": bind, "curve_dir": RunFolder(tmp_path).keys, "accept": ACCEPTED,
    }  # fmt: skip


def test_the_supervisor_has_the_deadlines_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composition, "Supervisor", lambda *parts, **times: (parts, times))
    config = make(launch__startup_timeout_s=70.0, launch__silence_s=80.0)
    made: Any = make_supervisor(SimpleNamespace(config=config, launcher="launcher"), "hub")  # type: ignore[arg-type]
    assert made == (
        ("launcher", "hub"), {"startup_timeout_s": 70.0, "silence_s": 80.0, "node_wait_s": 70.0},
    )  # fmt: skip


# ---------------------------------------------------------------- the parts


def state_of(num_lineages: int, num_batches: int = 0, groups_per_step: int = 2) -> LedgerState:
    batches = tuple(
        BatchRecord(
            step=step,
            lineage="l0",
            groups=tuple(
                BatchGroup(group_id=(step - 1) * groups_per_step + number, sample_indices=(0,), first_version=0)
                for number in range(groups_per_step)
            ),
        )
        for step in range(1, num_batches + 1)
    )
    return LedgerState(
        num_lineages=num_lineages, num_drawn=num_batches * groups_per_step, num_filtered=0, dropped={}, live=(),
        batches=batches, checkpoints=(CheckpointRecord(version=1, lineage="l0", path="c1"),), evals=(),
    )  # fmt: skip


class Session:
    """What composing needs of an open session."""

    def __init__(self, root: Path, config: RunConfig) -> None:
        self.config, self.folder, self.stack = config, RunFolder(root), contextlib.ExitStack()
        self.ledger, self.end, self.is_evaluation = object(), object(), False
        self.run_id = "r"
        self.telemetry = SimpleNamespace(tally=SimpleNamespace(eval_metrics={}), journal=None)
        self.rows = SimpleNamespace(max_draws=50, num_final=7, num_periodic=3)
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the parts that reach out are made with."""
    found: dict[str, Any] = {}
    for name in ("WorkerAdmin", "TrainerRestart"):
        monkeypatch.setattr(
            composition, name, lambda *parts, name=name, **facts: found.setdefault(name, (parts, facts)) and name
        )
    return found


def test_the_parts_go_on_where_the_ledger_ends_and_know_each_other(tmp_path: Path, made: dict[str, Any]) -> None:
    config = make(groups_per_step=2, group_size=1, metrics__trace=False)
    session: Any = Session(tmp_path, config)
    processes, supervisor = starter(config, tmp_path)
    start = StartingPoint(state_of(num_lineages=4, num_batches=3), version=1)
    hub: Any = object()
    parts = compose(session, start, hub, processes, lambda: "address")
    assert parts.coordinator.shipped == 3, "what earlier sessions recorded is known"
    settings = parts.coordinator.settings
    assert (settings.max_draws, settings.num_eval_rows, settings.num_periodic_eval_rows) == (50, 7, 3)
    assert (parts.ledger, parts.hub, parts.supervisor) == (session.ledger, hub, supervisor)
    assert (parts.rows, parts.telemetry, parts.end) == (session.rows, session.telemetry, session.end)
    assert (parts.worker_admin, parts.trainer_restart) == ("WorkerAdmin", "TrainerRestart")
    (coordinator, asked, channel, _), admin = made["WorkerAdmin"]
    assert (coordinator, asked, channel) == (parts.coordinator, supervisor, hub)
    admin["say"]("words")
    assert session.notes == ["words"]
    assert admin["add_worker"]() == "rollout-0"
    session.stack.close()


def test_the_trainers_next_life_has_the_lineage_behind_that_of_this_session(
    tmp_path: Path, made: dict[str, Any]
) -> None:
    config = make(groups_per_step=2, metrics__trace=False)
    session: Any = Session(tmp_path, config)
    processes, supervisor = starter(config, tmp_path)
    start = StartingPoint(state_of(num_lineages=4))
    compose(session, start, None, processes, lambda: "address")  # type: ignore[arg-type]
    parts, facts = made["TrainerRestart"]
    assert parts == (tmp_path, session.ledger, supervisor)
    assert start.lineage == "l4"
    assert facts["num_lineages"] == 5, "l5 is its next one"
    assert facts["new_address"]() == "address"


def test_a_session_that_contradicts_the_ledger_is_refused(tmp_path: Path, made: dict[str, Any]) -> None:
    config = make(groups_per_step=3, metrics__trace=False)
    processes, _ = starter(config, tmp_path)
    start = StartingPoint(state_of(1, num_batches=1, groups_per_step=2))
    with pytest.raises(UserError, match="recorded with 2, but the config has 3"):
        compose(Session(tmp_path, config), start, None, processes, lambda: "")  # type: ignore[arg-type]


@pytest.mark.parametrize("is_traced", [True, False])
def test_the_controllers_timeline_is_closed_with_the_session(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, made: dict[str, Any], is_traced: bool
) -> None:
    closed: list[Any] = []
    monkeypatch.setattr(
        composition, "Tracer", SimpleNamespace(of=lambda *facts: SimpleNamespace(close=lambda: closed.append(facts)))
    )
    config = make(metrics__trace=is_traced)
    session: Any = Session(tmp_path, config)
    processes, _ = starter(config, tmp_path)
    compose(session, StartingPoint(state_of(0)), None, processes, lambda: "")  # type: ignore[arg-type]
    assert closed == []
    session.stack.close()
    ((root, name, settings),) = closed
    assert (root, name, settings.max_events > 0) == (tmp_path, "controller", is_traced)


# ---------------------------------------------------------------- the server's settings


def test_the_server_draws_samples_as_the_configuration_says() -> None:
    config = make(seed=5, num_steps=9, rollout__segment_tokens=32, launch__stop_grace_s=44.0, eval__temperature=0.25)
    settings = server_settings(config)
    assert (settings.num_steps, settings.stop_grace_s, settings.stall_after_s) == (9, 44.0, stall_limit_s(config))
    tasks = settings.tasks
    assert (tasks.seed, tasks.segment_tokens, tasks.forced_lengths) == (5, 32, None)
    assert (tasks.train_sampling, tasks.eval_sampling) == (config.train_sampling, config.eval_sampling)
    assert tasks.eval_sampling.temperature == 0.25
    assert tasks.load_deadline_s == config.trainer.weights.deadline_s


@pytest.mark.parametrize(("choice", "stops"), [("stop", True), ("drop", False)])
def test_a_long_prompt_ends_the_run_only_where_it_is_to(choice: str, stops: bool) -> None:
    assert server_settings(make(data__on_long_prompt=choice)).stop_on_long_prompt == stops


def test_lengths_that_are_forced_reach_the_server() -> None:
    tasks = server_settings(make(sampling__forced_lengths="100", sampling__max_new_tokens=64)).tasks
    assert tasks.forced_lengths is not None
    assert 1 <= tasks.forced_lengths(3, 1) <= 64
    assert msgspec.structs.asdict(tasks.train_sampling)["ignore_eos"]
