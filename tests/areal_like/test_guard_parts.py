"""The guard's parts in this process: its command line, what it waits for, what it removes, how it ends."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_like import guard
from areal_like.guard import guarded, tied

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs a subreaper and parent-death signals")


def test_process_of_another_user_does_not_keep_the_guard_from_ending_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    families, killed = iter([[1, 2], [2]]), []

    def kill(pid: int, number: int) -> None:
        if pid == 1:
            raise PermissionError
        killed.append(pid)

    monkeypatch.setattr(guard, "_descendants", lambda: next(families, []))
    monkeypatch.setattr(guard, "_reap_all", lambda: killed == [2, 2])
    monkeypatch.setattr(guard.os, "kill", kill)
    guard._sweep()
    assert killed == [2, 2]


@pytest.fixture
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(guard, "SHM", str(folder))
    return folder


def record(folder: Path, *files: Path) -> None:
    lines = [f"{file.name} {file.lstat().st_dev} {file.lstat().st_ino}\n" for file in files]
    (folder / guard.RECORD).write_text("".join(lines))


def test_recorded_files_are_removed_where_they_are_still_the_same(tmp_path: Path, shared_memory: Path) -> None:
    same, other, unnamed = (shared_memory / name for name in ("same", "other", "unnamed"))
    link, outside = shared_memory / "link", tmp_path / "outside"
    for file in (same, other, unnamed, outside):
        file.touch()
    link.symlink_to(outside)
    record(tmp_path, same, other, link)
    replacement = shared_memory / "replacement"
    replacement.touch()
    replacement.rename(other)
    guard.remove_recorded(tmp_path)
    assert sorted(file.name for file in shared_memory.iterdir()) == ["other", "unnamed"]
    assert outside.exists(), "a link is removed and not what it leads to"
    assert not (tmp_path / guard.RECORD).exists()
    guard.remove_recorded(tmp_path)


def test_a_record_names_nothing_outside_of_shared_memory(tmp_path: Path, shared_memory: Path) -> None:
    outside = tmp_path / "outside"
    outside.touch()
    status = outside.stat()
    (tmp_path / guard.RECORD).write_text(f"../outside {status.st_dev} {status.st_ino}\n")
    guard.remove_recorded(tmp_path)
    assert outside.exists()


def test_only_files_that_the_family_maps_and_that_are_new_are_recorded(
    tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {name: shared_memory / name for name in ("a-mapped", "a-else", "b-mapped", "a with space")}
    for file in files.values():
        file.touch()
    identities = {
        (os.major(found.st_dev), os.minor(found.st_dev), found.st_ino)
        for name, found in ((name, file.stat()) for name, file in files.items())
        if name != "a-else"
    }
    monkeypatch.setattr(guard, "_descendants", lambda: [1])
    monkeypatch.setattr(guard, "_mapped", lambda pid: identities)
    kept = guard._Record(tmp_path, ("a",))
    kept.update()
    found = files["a-mapped"].stat()
    assert (tmp_path / guard.RECORD).read_text() == f"a-mapped {found.st_dev} {found.st_ino}\n"
    (tmp_path / guard.RECORD).unlink()
    kept.update()
    assert not (tmp_path / guard.RECORD).exists(), "written only where there is something new"
    old = guard._Record(tmp_path, ("a",))
    old._started_s += 3600.0
    old.update()
    assert not (tmp_path / guard.RECORD).exists(), "files of before the command are somebody else's"


def test_what_a_process_maps_is_known_by_device_and_inode(
    tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = shared_memory / "a b"
    file.write_bytes(b"x")
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ):
        found = file.stat()
        assert guard._mapped(os.getpid()) == {(os.major(found.st_dev), os.minor(found.st_dev), found.st_ino)}
    assert guard._mapped(2**22 + 1) == set()


def test_command_lines_name_the_mode_the_starter_and_what_to_remove() -> None:
    head = [sys.executable, "-I", "-S", guard.__file__]
    pid = str(os.getpid())
    assert tied(["a", "b"]) == [*head, "tied", pid, "a", "b"]
    assert guarded(["a", "b"]) == [*head, "guarded", pid, "a", "b"]
    assert guarded(["a"], until=guard.STDIN, shared_memory=["x-", "y"]) == [
        *head, "guarded", "stdin", "--shared-memory=x-,y", "a",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        (("guarded", "7", "a", "b"), ("7", ["a", "b"], ())),
        (("guarded", "stdin", "--shared-memory=x-,y", "a"), ("stdin", ["a"], ("x-", "y"))),
    ],
)
def test_guard_reads_its_command_line(
    line: tuple[str, ...], seen: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(guard, "_guard", lambda *given: calls.append(given))
    guard.main(*line)
    assert calls == [seen]


class Family:
    """What `_wait` sees of a child: a pipe for signals, a descriptor for the starter's end, deaths to reap."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wakeup, self.waker = os.pipe()
        self.starter_end, self.starter = os.pipe()
        self.deaths: list[tuple[int, int]] = []
        self.timeouts: list[float | None] = []
        self.num_updates = 0
        self.on_time_out = lambda: None
        self.select = guard.select.select
        monkeypatch.setattr(guard, "_reap", lambda: self.deaths.pop(0) if self.deaths else None)
        monkeypatch.setattr(guard.select, "select", self.waited)

    def waited(self, fds: list[int], writable: list[int], broken: list[int], timeout_s: float | None) -> object:
        """As `select`, but time passes at once."""
        self.timeouts.append(timeout_s)
        assert len(self.timeouts) < 10, "waits without end"
        found = self.select(fds, writable, broken, 0)
        if not found[0]:
            assert timeout_s is not None, "waits for nothing"
            self.on_time_out()
        return found

    def update(self) -> None:
        self.num_updates += 1

    def wait(self, *, end_fd: int | None = None, starter: int = 0, has_record: bool = False) -> int | None:
        end_fd = self.starter_end if end_fd is None else end_fd
        return guard._wait(77, self.wakeup, end_fd, starter or os.getppid(), self if has_record else None)  # type: ignore[arg-type]


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> Iterator[Family]:
    made = Family(monkeypatch)
    yield made
    monkeypatch.undo()
    for fd in (made.wakeup, made.waker, made.starter_end, made.starter):
        with contextlib.suppress(OSError):
            os.close(fd)


def test_guard_ends_with_the_status_of_its_child_and_not_of_another(family: Family) -> None:
    os.write(family.waker, bytes([signal.SIGCHLD]))
    family.deaths = [(5, 1 << 8), (77, 3 << 8), (6, 0)]
    assert family.wait() == 3 << 8
    assert family.timeouts == [None]


def test_guard_that_receives_the_signal_to_end_ends_as_if_killed(family: Family) -> None:
    os.write(family.waker, bytes([signal.SIGCHLD, guard.END]))
    family.deaths = [(5, 0)]
    assert family.wait() == signal.SIGKILL


def test_status_of_a_child_that_has_ended_is_kept_also_with_the_signal_to_end(family: Family) -> None:
    os.write(family.waker, bytes([guard.END]))
    family.deaths = [(77, 0)]
    assert family.wait() == 0


def test_end_of_the_starter_ends_the_guard(family: Family) -> None:
    os.close(family.starter)
    assert family.wait() is None
    assert family.timeouts == [None]


def test_starter_without_a_descriptor_is_looked_for(family: Family) -> None:
    family.on_time_out = lambda: family.deaths.append((77, 0)) if len(family.timeouts) == 2 else None
    assert family.wait(end_fd=-1) == 0
    assert family.timeouts == [guard.POLL_S] * 2
    assert family.wait(end_fd=-1, starter=os.getpid()) is None
    assert len(family.timeouts) == 3


def test_input_is_read_and_thrown_away_until_it_ends(family: Family) -> None:
    standard_input = os.dup(0)
    try:
        os.dup2(family.starter_end, 0)
        os.write(family.starter, b"text")
        closing = family.waited

        def waited(*given: object) -> object:
            if family.timeouts:
                os.close(family.starter)
            return closing(*given)  # type: ignore[arg-type]

        guard.select.select = waited  # type: ignore[assignment]
        assert family.wait(end_fd=0) is None
        assert family.timeouts == [None, None]
    finally:
        os.dup2(standard_input, 0)
        os.close(standard_input)


def test_what_the_family_maps_is_looked_for_while_nothing_happens(family: Family) -> None:
    family.on_time_out = lambda: family.deaths.append((77, 0)) if len(family.timeouts) == 3 else None
    assert family.wait(has_record=True) == 0
    assert (family.timeouts, family.num_updates) == ([guard.RECORD_S] * 3, 3)
    os.write(family.waker, bytes([signal.SIGCHLD]))
    family.deaths = [(77, 0)]
    family.wait(has_record=True)
    assert family.num_updates == 3


def test_sweep_goes_on_until_nobody_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    families, killed, is_childless = iter([[1, 2], [3]]), [], iter([False, False, True])

    def kill(pid: int, number: int) -> None:
        killed.append((pid, number))
        if pid == 2:
            raise ProcessLookupError

    monkeypatch.setattr(guard, "_descendants", lambda: next(families))
    monkeypatch.setattr(guard, "_reap_all", lambda: next(is_childless))
    monkeypatch.setattr(guard.os, "kill", kill)
    guard._sweep()
    assert killed == [(1, signal.SIGKILL), (2, signal.SIGKILL), (3, signal.SIGKILL)]
    assert next(is_childless, None) is None


def test_a_process_without_children_has_no_descendants(monkeypatch: pytest.MonkeyPatch) -> None:
    exited = iter([(1, 0), (2, 9), (0, 0)])
    monkeypatch.setattr(guard.os, "waitpid", lambda pid, options: next(exited))
    assert not guard._reap_all(), "there is one that has not exited"

    def no_child(pid: int, options: int) -> tuple[int, int]:
        raise ChildProcessError

    monkeypatch.setattr(guard.os, "waitpid", no_child)
    assert guard._reap_all()


def test_sweep_gives_up_on_what_the_kernel_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = iter([0.0, 0.0, guard.SWEEP_S / 2, guard.SWEEP_S + 0.1])
    monkeypatch.setattr(guard.time, "monotonic", lambda: next(now_s))
    monkeypatch.setattr(guard.time, "sleep", lambda _: None)
    monkeypatch.setattr(guard, "_descendants", lambda: [1])
    monkeypatch.setattr(guard, "_reap_all", lambda: False)
    killed: list[int] = []
    monkeypatch.setattr(guard.os, "kill", lambda pid, _: killed.append(pid))
    guard._sweep()
    assert killed == [1, 1]


class Ended(BaseException):
    """In place of the end of this process."""


@pytest.mark.parametrize(
    ("status", "ends"),
    [
        (0, [("exit", 0)]),
        (None, [("exit", 0)]),
        (3 << 8, [("exit", 3)]),
        (int(signal.SIGKILL), [("kill", signal.SIGKILL)]),
        (int(signal.SIGSEGV), [("default", signal.SIGSEGV), ("kill", signal.SIGSEGV)]),
    ],
)
def test_guard_ends_like_its_command(status: int | None, ends: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[object] = []

    def end(how: str, number: int) -> None:
        found.append((how, number))
        raise Ended

    monkeypatch.setattr(guard.os, "_exit", lambda number: end("exit", number))
    monkeypatch.setattr(guard.os, "kill", lambda pid, number: end("kill" if pid == os.getpid() else "other", number))
    monkeypatch.setattr(guard.signal, "signal", lambda number, how: found.append(("default", number)))
    with pytest.raises(Ended):
        guard._end_like(status)
    assert found == ends


def test_descendants_are_found_at_every_depth(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = os.getpid()
    for pid, parent in ((own, 1), (21, own), (22, 21), (23, 22), (24, own), (31, 1), (32, 31)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a) S 1) S {parent} 9 9")
    (tmp_path / "99").mkdir()
    (tmp_path / "self").mkdir()
    monkeypatch.setattr(guard, "Path", lambda path: tmp_path if path == "/proc" else Path(path))
    assert sorted(guard._descendants()) == [21, 22, 23, 24]


def test_files_of_a_record_are_those_of_every_update(
    tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped: set[tuple[int, int, int]] = set()
    monkeypatch.setattr(guard, "_descendants", lambda: [1, 2])
    monkeypatch.setattr(guard, "_mapped", lambda pid: mapped if pid == 2 else set())
    kept = guard._Record(tmp_path, ("a", "b"))
    for name in ("a1", "b1"):
        (shared_memory / name).touch()
        found = (shared_memory / name).stat()
        mapped.add((os.major(found.st_dev), os.minor(found.st_dev), found.st_ino))
        kept.update()
    assert [line.split()[0] for line in (tmp_path / guard.RECORD).read_text().splitlines()] == ["a1", "b1"]
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [guard.RECORD]
    gone = guard._Record(tmp_path / "gone", ("a",))
    gone.update()


def test_files_of_another_user_are_not_recorded(
    tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shared_memory / "a1").touch()
    found = (shared_memory / "a1").stat()
    monkeypatch.setattr(guard, "_descendants", lambda: [1])
    monkeypatch.setattr(guard, "_mapped", lambda pid: {(os.major(found.st_dev), os.minor(found.st_dev), found.st_ino)})
    monkeypatch.setattr(os, "getuid", lambda: found.st_uid + 1)
    guard._Record(tmp_path, ("a",)).update()
    assert not (tmp_path / guard.RECORD).exists()
    record(tmp_path, shared_memory / "a1")
    guard.remove_recorded(tmp_path)
    assert (shared_memory / "a1").exists()


def test_maps_are_read_by_their_hexadecimal_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = [
        "7f00-7f01 rw-s 00000000 1f:a2 4711                       /dev/shm/psm_1 (deleted)",
        "7f01-7f02 r--p 00000000 08:01 12                         /lib/libc.so",
        "7f02-7f03 rw-p 00000000 00:00 0 ",
        "7f03-7f04 rw-s 00000000 00:19 5                          /dev/shm/sem a",
    ]
    (tmp_path / "maps").write_text("\n".join(lines))
    monkeypatch.setattr(guard, "Path", lambda path: tmp_path / "maps" if path == "/proc/5/maps" else Path(path))
    assert guard._mapped(5) == {(0x1F, 0xA2, 4711), (0, 0x19, 5)}
