"""Folders of a session besides the run folder: where each lies, and that the session gives it back."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_like.store_owner import OWNER_FILE
from controller.ledger.ledger import LEDGER_FILE
from controller.runtime import storage


class Launcher:
    """A launcher of one machine, or of a cluster that mirrors the ledger."""

    def __init__(self, mirroring: Any = None, *, is_one_machine: bool = True) -> None:
        self.mirrors, self.is_one_machine = mirroring, is_one_machine

    def mirroring(self, launch: str) -> Any:
        assert launch == "its settings"
        return self.mirrors


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(*args: Any, **facts: Any) -> None:
        monkeypatch.setattr(storage, "launcher_of", lambda config: Launcher(*args, **facts))

    return use


def config_of(**weights: Any) -> Any:
    settings = {"keep": 3, "place": "shm", "shared_dir": None, "layout": "files", **weights}
    return SimpleNamespace(
        launch="its settings", trainer=SimpleNamespace(weights=SimpleNamespace(**settings)),
        ledger=SimpleNamespace(segment_mb=2, keep_mb=None, fsync=True),
    )  # fmt: skip


# ---------------------------------------------------------------- ledger


class Home:
    """Stands in for `LedgerHome`."""

    def __init__(self, *args: Any) -> None:
        self.args, self.done = args, list[str]()

    def open(self) -> None:
        self.done.append("open")

    def close(self) -> None:
        self.done.append("close")


@pytest.mark.parametrize(("local_dir", "is_own"), [("~/fast", True), (None, False)])
def test_a_ledger_that_is_mirrored_has_a_home_until_the_session_ends(
    monkeypatch: pytest.MonkeyPatch, launched: Any, local_dir: str | None, is_own: bool
) -> None:
    launched(SimpleNamespace(local_dir=local_dir, every_s=5.0))
    monkeypatch.setattr(storage, "LedgerHome", Home)
    folder: Any = SimpleNamespace(root=Path("run"))
    with contextlib.ExitStack() as stack:
        home: Any = storage.open_ledger_home(config_of(), folder, "r", stack)
        assert home.args == (Path("run"), Path("~/fast").expanduser() if is_own else None, "r")
        assert home.done == ["open"]
    assert home.done == ["open", "close"]
    launched(None)
    assert storage.open_ledger_home(config_of(), folder, "r", contextlib.ExitStack()) is None


@pytest.mark.parametrize("has_home", [True, False])
@pytest.mark.parametrize("is_resume", [True, False])
@pytest.mark.parametrize(("keep_mb", "keep_bytes"), [(None, None), (3, 3 << 20)])
def test_the_ledger_is_opened_where_it_is_written_and_must_be_there_to_resume(
    monkeypatch: pytest.MonkeyPatch, has_home: bool, is_resume: bool, keep_mb: int | None, keep_bytes: int | None
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(storage, "refuse_absent_ledger", lambda *args, **facts: asked.append((*args, facts)))
    monkeypatch.setattr(storage, "Ledger", lambda root, **facts: (root, facts))
    folder: Any = SimpleNamespace(root=Path("run"))
    home: Any = SimpleNamespace(folder=Path("home")) if has_home else None
    config = config_of()
    config.ledger.keep_mb = keep_mb
    made: Any = storage.open_ledger(config, folder, "r", home, is_resume=is_resume, accept_loss=True)
    root = Path("home" if has_home else "run")
    assert made == (root, {"run_id": "r", "segment_bytes": 2 << 20, "keep_bytes": keep_bytes, "fsync": True})
    assert asked == [(folder, root / LEDGER_FILE, {"accept_loss": True})] * is_resume


def test_the_run_folders_copy_is_kept_up_to_date_while_the_session_is_open(launched: Any) -> None:
    done: list[Any] = []

    async def keep_up(saved_version: Any, every_s: float, say: Any) -> None:
        done.append((saved_version(), every_s))
        try:
            await asyncio.Event().wait()
        finally:
            done.append("stopped")

    async def during(home: Any) -> None:
        session: Any = SimpleNamespace(config=config_of(), ledger_home=home, note=print)
        async with storage.mirrored(session, lambda: 4):
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    home = SimpleNamespace(keep_up=keep_up)
    launched(SimpleNamespace(every_s=5.0))
    asyncio.run(during(None))
    launched(None)
    asyncio.run(during(home))
    assert done == []
    launched(SimpleNamespace(every_s=5.0))
    asyncio.run(during(home))
    assert done == [(4, 5.0), "stopped"]


# ---------------------------------------------------------------- weights


class Weights:
    """A session that opens its weight folder; records what for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, run_dir: Path, *, model_bytes: int = 1 << 30) -> None:
        self.asked: list[Any] = []
        self.done: list[Any] = []
        self.shared = Path("/dev/shm/areal_like-r")
        self.is_full = False
        self.run_dir = run_dir
        monkeypatch.setattr(storage, "weight_bytes", lambda model_dir: model_bytes)
        monkeypatch.setattr(storage, "default_root", self.root_of)
        monkeypatch.setattr(storage, "sweep_dead", lambda: self.done.append("sweep"))
        monkeypatch.setattr(storage.reaper, "start", lambda: lambda: self.done.append("reaper ends"))
        monkeypatch.setattr(storage, "WeightStore", self.store)

    def root_of(self, *args: Any) -> Path:
        self.asked.append(args)
        return self.run_dir / "weights" if self.is_full else self.shared

    def store(self, folder: Path, layout: str, *, keep: int) -> Any:
        self.done.append((layout, keep))
        return SimpleNamespace(close=lambda *, remove: self.done.append(("closed", folder, remove)))

    def open(self, **weights: Any) -> Path:
        with contextlib.ExitStack() as stack:
            session: Any = SimpleNamespace(
                config=config_of(**weights), folder=SimpleNamespace(root=self.run_dir), stack=stack, run_id="r",
                note=lambda text, level: self.done.append((text, level)),
            )  # fmt: skip
            return storage.open_weight_folder(session, Path("model"))


@pytest.mark.parametrize(("model_bytes", "need_bytes"), [(1 << 30, 4 << 30), (10, 64 << 20), (0, 64 << 20)])
def test_versions_are_in_shared_memory_with_room_for_all_that_are_kept_and_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, launched: Any, model_bytes: int, need_bytes: int
) -> None:
    launched()
    weights = Weights(monkeypatch, tmp_path, model_bytes=model_bytes)
    assert weights.open() == weights.shared
    assert weights.asked == [("r", "shm", tmp_path, need_bytes)]
    assert weights.done == [("files", 2), ("closed", weights.shared, True), "sweep", "reaper ends"]


@pytest.mark.parametrize(
    ("place", "is_one_machine", "asked", "is_noted"),
    [("shm", True, "shm", True), ("shm", False, "disk", False), ("disk", True, "disk", False)],
)
def test_a_lack_of_shared_memory_is_said_where_it_was_wanted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, launched: Any, place: str, is_one_machine: bool, asked: str,
    is_noted: bool,
) -> None:  # fmt: skip
    launched(is_one_machine=is_one_machine)
    weights = Weights(monkeypatch, tmp_path)
    weights.is_full = True
    weights.open(place=place, shared_dir="/shared")
    assert weights.asked[0][1:3] == (asked, Path("/shared/r"))
    words = f"shared memory has too little free space, so weights are transferred through {tmp_path / 'weights'}"
    assert [line for line in weights.done if "free space" in str(line)] == [(words, "warning")] * is_noted


def test_a_reaper_that_cannot_be_started_keeps_no_run_from_starting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, launched: Any
) -> None:
    def fail() -> None:
        raise OSError("no more processes")

    launched()
    weights = Weights(monkeypatch, tmp_path)
    monkeypatch.setattr(storage.reaper, "start", fail)
    weights.open()
    assert weights.done[-1] == "sweep"


def test_what_killed_ones_left_is_removed_from_shared_memory_and_the_folder_for_temporary_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    swept: list[Any] = []
    monkeypatch.setattr(storage, "sweep_dead", lambda *root: swept.append(root))
    monkeypatch.setattr(storage.tempfile, "gettempdir", lambda: str(tmp_path))
    storage.sweep_dead_folders()
    assert swept == [(), (tmp_path,)]


# ---------------------------------------------------------------- where ranks meet


def test_ranks_meet_in_a_claimed_folder_in_shared_memory_or_the_one_for_temporary_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shared, temporary = tmp_path / "shm", tmp_path / "tmp"
    shared.mkdir()
    temporary.mkdir()
    monkeypatch.setattr(storage.tempfile, "tempdir", str(temporary))
    for place, wanted in ((shared, shared), (tmp_path / "absent", temporary)):
        monkeypatch.setattr(storage, "SHARED_MEMORY", place)
        with storage.rendezvous_folder() as folder:
            assert (folder.parent, folder.name.startswith("areal_like-ranks-")) == (wanted, True)
            assert (folder / OWNER_FILE).is_file()
        assert not folder.exists()


def test_each_start_of_the_ranks_has_an_address_of_its_own() -> None:
    first, second = (storage.rendezvous_address(Path("/meet")) for _ in range(2))
    assert first != second
    assert first.startswith("file:///meet/")
    assert len(first.removeprefix("file:///meet/")) >= 16
