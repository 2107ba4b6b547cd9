"""`areal-like worker --join`: what each obstacle is called, and how the spec is adapted to this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import run_zoo as zoo
from valid_config import make

from areal_like import __version__
from areal_like.config import ProcessSpec, TraceSettings
from areal_like.errors import DeadlineExceeded, UserError
from areal_like.process import boot_id
from areal_like.store_owner import claim
from areal_like.transport.credentials import candidate_credentials, make_run_credentials
from areal_like.wire.messages import JoinOffer
from controller.run_folder.invitation import INVITATION_FILE, Invitation
from controller.run_folder.run_folder import RunFolder
from controller.runs import join as module
from controller.runs import joined_spec
from controller.runs.join import check_invitation, find_invitation, join
from controller.runs.joined_spec import Machine, localized
from controller.wiring.process_specs import Addresses, process_spec

FILES = {"config.json": b'{"model_type": "qwen3"}', "tokenizer.json": b"{}"}


def invitation(**changes: Any) -> Invitation:
    facts: dict[str, Any] = {
        "run": "mine", "run_id": "r", "release": __version__, "address": "tcp://127.0.0.1:9", "host": "far",
        "boot_id": boot_id(), "credentials": {},
    }  # fmt: skip
    return Invitation(**{**facts, **changes})


# ---------------------------------------------------------------- the invitation


def test_the_invitation_of_a_run_in_progress_is_found_by_its_folder_or_read_from_a_copy(tmp_path: Path) -> None:
    folder = zoo.make_run(tmp_path, "running")
    folder.keys.mkdir(mode=0o700)
    invitation().save(folder.keys)
    assert find_invitation(str(folder.root)) == find_invitation(str(folder.keys / INVITATION_FILE)) == invitation()


@pytest.mark.parametrize(
    ("kind", "words"), [("finished", "finished"), ("crashed", "crashed"), ("running", "does not admit workers")]
)
def test_a_run_that_cannot_be_joined_is_refused_in_words(tmp_path: Path, kind: str, words: str) -> None:
    folder = zoo.make_run(tmp_path, kind)
    with pytest.raises(UserError, match=words):
        find_invitation(str(folder.root))


def test_another_version_of_the_program_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"the run uses areal_like 0\.0\.1, and this is {__version__}"):
        check_invitation(invitation(release="0.0.1"), "x")


def test_a_loopback_address_of_another_machine_is_named() -> None:
    check_invitation(invitation(), "x")
    check_invitation(invitation(address="tcp://10.0.0.5:1", boot_id="another"), "x")
    with pytest.raises(UserError, match=r"other machines cannot reach -> start the run with launch.host"):
        check_invitation(invitation(boot_id="another"), "x")


def test_a_signal_ends_the_command_while_the_run_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def connect(candidate: Any, found: Invitation, source: str) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()

    monkeypatch.setattr(module, "_connect", connect)
    make_run_credentials(tmp_path / "keys")
    files = {name: content.decode() for name, content in candidate_credentials(tmp_path / "keys").items()}
    machine = Machine(tmp_path / "here")
    machine.folder.mkdir()
    assert asyncio.run(module._join(invitation(credentials=files), machine, "x")) == 0


def test_a_device_that_does_not_exist_is_refused_first() -> None:
    with pytest.raises(UserError, match="'tpu' is not a device"):
        join("nowhere", device="tpu")


# ---------------------------------------------------------------- the connection


def refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, address: str) -> str:
    """What `join` says when the controller does not answer its Hello."""

    async def connect(self: Any, timeout_s: float) -> None:
        raise DeadlineExceeded("a reply", "the hub", timeout_s)

    monkeypatch.setattr(module.Peer, "connect", connect)
    make_run_credentials(tmp_path / "keys")
    path = tmp_path / "keys"
    invitation(address=address).save(path)
    with pytest.raises(UserError) as caught:
        join(str(path / INVITATION_FILE))
    return str(caught.value)


def test_a_run_that_has_ended_and_a_wrong_key_have_different_messages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        assert "does not accept the keys of this invitation" in refused(monkeypatch, tmp_path, address)
    assert "the run has ended, or this machine cannot reach it" in refused(monkeypatch, tmp_path, address)


# ---------------------------------------------------------------- the spec


class Run:
    """A run's folder with an offer for one worker, as its controller makes it."""

    def __init__(self, root: Path, **config: Any) -> None:
        self.folder = zoo.make_run(root / "runs", "running")
        self.run_id = str(self.folder.read_state()["run_id"])
        self.model, self.weights = root / "model", root / "weights"
        self.model.mkdir()
        for name, content in FILES.items():
            (self.model / name).write_bytes(content)
        self.weights.mkdir()
        claim(self.weights)
        self.here = root / "here"
        self.here.mkdir()
        self.config = make(**config)

    def offer(self, folder: RunFolder | None = None, model_dir: str = "", **changes: Any) -> JoinOffer:
        addresses = Addresses("tcp://127.0.0.1:1", ("tcp://127.0.0.1:2",), self.weights, self.here)
        spec = process_spec(
            self.config, folder or self.folder, addresses,
            run_id=self.run_id, role="rollout", name="rollout-7", model_dir=Path(model_dir or self.model), lineage="l0",
        )  # fmt: skip
        return JoinOffer(
            name="rollout-7", spec=spec.model_copy(update=changes).model_dump_json(),
            keys={"client.public": b"k"}, model_files=FILES,
        )  # fmt: skip

    def spec(self, *, is_controllers: bool = True, device: str = "", model: str = "", **changes: Any) -> ProcessSpec:
        machine = Machine(self.here, device=device, model=model, is_controllers=is_controllers)
        return localized(self.offer(**changes), machine)


def test_on_shared_storage_the_worker_uses_the_run_s_folders_and_its_own_keys(tmp_path: Path) -> None:
    run = Run(tmp_path)
    spec = run.spec()
    assert (spec.run_dir, spec.model.path) == (str(run.folder.root), str(run.model))
    assert spec.curve_dir == str(run.here / "keys")
    assert (run.here / "keys" / "client.public").read_bytes() == b"k\n"
    assert spec.settings["engine"]["device"] == "cpu"


def test_without_shared_storage_the_files_that_were_sent_are_used_and_no_trace_is_written(tmp_path: Path) -> None:
    run = Run(tmp_path, trainer__weights__kind="stream")
    run.weights.joinpath("owner.json").unlink()
    spec = run.spec(folder=RunFolder(tmp_path / "elsewhere"), model_dir="/not/here")
    assert (spec.run_dir, spec.trace) == (str(run.here), TraceSettings())
    assert {path.name: path.read_bytes() for path in Path(str(spec.model.path)).iterdir()} == FILES


def test_another_run_at_the_same_path_is_not_taken_for_this_one(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.run_id = "another"
    assert run.spec().run_dir == str(run.here)


def test_weights_that_this_machine_does_not_see_are_named(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with pytest.raises(UserError, match=r"which this machine does not see -> start the run with trainer.weights.kind"):
        run.spec(weight_dir="/not/here")


def test_reward_services_on_another_machine_s_loopback_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"launch.host: the run's reward service listens on tcp://127.0.0.1:2"):
        Run(tmp_path).spec(is_controllers=False)


def test_a_gpu_that_this_machine_lacks_is_named_and_another_device_can_be_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    monkeypatch.setattr(joined_spec, "usable_gpus", lambda: 0)
    settings = run.config.rollout.model_dump(mode="json")
    settings["engine"]["device"] = "cuda:3"
    with pytest.raises(UserError, match=r"has none that torch can use -> .* --device cpu"):
        run.spec(settings=settings)
    other = Run(tmp_path / "other")
    assert other.spec(settings=settings, device="cpu").settings["engine"]["device"] == "cpu"
    monkeypatch.setattr(joined_spec, "usable_gpus", lambda: 1)
    third = Run(tmp_path / "third")
    assert third.spec(settings=settings).settings["engine"]["device"] == "cuda", "its first GPU, not its fourth"


def test_an_engine_whose_environment_is_missing_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path)
    settings = run.config.rollout.model_dump(mode="json")
    settings["engine"] |= {"kind": "vllm", "python": "/not/here/python", "device": "cpu"}
    with pytest.raises(UserError, match="/not/here/python"):
        run.spec(settings=settings)


def test_an_engine_that_reads_weights_wants_a_folder_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    monkeypatch.setattr(joined_spec, "reads_weights", lambda spec: True)
    with pytest.raises(UserError, match="has no weights"):
        run.spec()
    other = Run(tmp_path / "other")
    with pytest.raises(UserError, match=r"which is not on this machine, .* --model FOLDER"):
        other.spec(model_dir="/not/here")
    (run.model / "model.safetensors").write_bytes(b"w")
    third = Run(tmp_path / "third")
    found = localized(
        third.offer(model_dir="/not/here"), Machine(third.here, model=str(run.model), is_controllers=True)
    )
    assert found.model.path == str(run.model)


def test_a_given_model_that_differs_from_the_run_s_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path)
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "config.json").write_bytes(b"{}")
    with pytest.raises(UserError, match=r"config.json is missing or differs from the run's"):
        localized(run.offer(), Machine(run.here, model=str(copy), is_controllers=True))


def test_a_called_model_that_this_machine_lacks_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path)
    settings = run.config.rollout.model_dump(mode="json")
    settings["models"] = [{"name": "judge", "path": "/not/here/judge", "endpoint": None}]
    with pytest.raises(UserError, match="the model judge is in /not/here/judge, which is not on this machine"):
        run.spec(settings=settings)


def test_settings_of_another_version_are_refused_in_words(tmp_path: Path) -> None:
    offer = JoinOffer(name="rollout-7", spec='{"from": "the future"}')
    with pytest.raises(UserError, match="does not know"):
        localized(offer, Machine(tmp_path))
