"""The doctor on cores, memory, limits, disk, network and clock: each verdict on a machine made up for it."""

from __future__ import annotations

import errno
import json
import math
import os
import sqlite3
import time
from pathlib import Path

import pytest
from fake_machine import GB, FakeMachine

from areal_like import store_owner
from areal_like.errors import OperationError
from areal_like.weights import weight_store
from controller.doctor import cgroups
from controller.doctor.machine import Mount
from controller.doctor.topics import clock, disk, limits, memory, network, processor
from trainer.config import WeightStoreSettings

V2 = {"/proc/self/cgroup": "0::/job\n"}

# ---------------------------------------------------------------- processor


def test_two_usable_cores_are_ok_and_one_is_a_warning() -> None:
    assert processor.cores(FakeMachine(cores=(2, 2))).verdict == "ok"
    tied = processor.cores(FakeMachine(cores=(64, 1)))
    assert (tied.verdict, "1 of 64 usable (affinity 1)" in tied.found) == ("warning", True)


@pytest.mark.parametrize(
    "files",
    [
        {**V2, "/sys/fs/cgroup/job/cpu.max": "150000 100000"},
        {"/proc/self/cgroup": "0::/job/inner\n", "/sys/fs/cgroup/job/cpu.max": "150000 100000",
         "/sys/fs/cgroup/job/inner/cpu.max": "max 100000"},
        {"/proc/self/cgroup": "0::/not/mounted\n", "/sys/fs/cgroup/cpu.max": "150000 100000"},
        {"/proc/self/cgroup": "3:cpu,cpuacct:/job\n", "/sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "150000",
         "/sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000"},
    ],
)  # fmt: skip
def test_quota_of_any_control_group_above_us_counts(files: dict[str, str]) -> None:
    machine = FakeMachine(files=files)
    assert cgroups.cores(machine) == 1.5
    found = processor.cores(machine)
    assert (found.verdict, "control group 1.5" in found.found) == ("warning", True)


def test_control_groups_without_limits_say_nothing() -> None:
    files = {**V2, "/sys/fs/cgroup/job/cpu.max": "max 100000", "/sys/fs/cgroup/job/memory.max": "max",
             "/sys/fs/cgroup/job/pids.max": "max"}  # fmt: skip
    machine = FakeMachine(files=files)
    assert cgroups.cores(machine) is cgroups.memory(machine) is cgroups.processes(machine) is None
    old = {"/proc/self/cgroup": "4:memory:/job", "/sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(2**63 - 4096)}
    assert cgroups.memory(FakeMachine(files=old)) is None


def test_busy_cores_are_a_warning() -> None:
    assert processor.load(FakeMachine(load=0.3)).verdict == "ok"
    assert processor.load(FakeMachine(load=6.0)).verdict == "warning"


@pytest.mark.parametrize(
    ("environment", "verdict"),
    [
        ({}, "ok"),
        ({"OMP_NUM_THREADS": "1", "OMP_PROC_BIND": "false"}, "ok"),
        ({"OMP_PROC_BIND": "true"}, "warning"),
        ({"GOMP_CPU_AFFINITY": "0-3"}, "warning"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "warning"),
        ({"KMP_BLOCKTIME": "infinite"}, "warning"),
    ],
)
def test_thread_settings_that_tie_processes_together_are_warnings(environment: dict[str, str], verdict: str) -> None:
    assert processor.threads(FakeMachine(environment=environment)).verdict == verdict


# ---------------------------------------------------------------- memory


def test_memory_is_judged_by_what_the_quickstart_takes() -> None:
    assert memory.memory(FakeMachine()).verdict == "ok"
    assert memory.memory(FakeMachine(memory=(4 * GB, 2 * GB))).verdict == "warning"
    assert memory.memory(FakeMachine(memory=(4 * GB, 1 * GB))).verdict == "problem"


def test_memory_of_the_control_group_counts_and_its_file_cache_is_free() -> None:
    files = {**V2, "/sys/fs/cgroup/job/memory.max": str(8 * GB), "/sys/fs/cgroup/job/memory.current": str(7 * GB),
             "/sys/fs/cgroup/job/memory.stat": f"anon 1\ninactive_file {5 * GB}"}  # fmt: skip
    found = memory.memory(FakeMachine(files=files))
    assert (found.verdict, found.data["free_bytes"]) == ("ok", 6 * GB)
    files["/sys/fs/cgroup/job/memory.stat"] = "inactive_file 0"
    assert memory.memory(FakeMachine(files=files)).verdict == "problem"


def test_swap_is_a_warning_once_it_is_used_in_earnest() -> None:
    assert memory.swap(FakeMachine()).verdict == "ok"
    assert memory.swap(FakeMachine(swap=(8 * GB, 0.1 * GB))).verdict == "ok"
    assert memory.swap(FakeMachine(swap=(8 * GB, 5 * GB))).verdict == "warning"


def test_small_shared_memory_is_a_warning_and_no_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "SHARED_MEMORY", tmp_path)
    docker = memory.shared_memory(FakeMachine(disk=(64e6, 64e6)))
    assert (docker.verdict, "--shm-size" in docker.advice) == ("warning", True)
    good = memory.shared_memory(FakeMachine(disk=(64 * GB, 64 * GB)))
    assert (good.verdict, "a model with 8 billion parameters" in good.found) == ("ok", True)
    assert memory.shared_memory(FakeMachine(system="darwin")).verdict == "absent"


def test_shared_memory_that_cannot_be_read_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = FakeMachine()

    def gone(folder: Path) -> int:
        raise OSError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(machine, "free_bytes", gone)
    assert memory.shared_memory(machine).verdict == "warning"


def test_kept_versions_and_store_size_are_those_of_the_store() -> None:
    assert WeightStoreSettings().keep + 1 == memory.KEPT_VERSIONS
    assert weight_store.default_root.__defaults__ == (memory.STORE_BYTES,)
    assert weight_store.SHARED_MEMORY == memory.SHARED_MEMORY


def test_leftovers_are_the_stores_that_the_next_run_would_sweep(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "SHARED_MEMORY", tmp_path)
    assert memory.leftovers(FakeMachine()).verdict == "ok"
    mine = tmp_path / "areal_like-alive-0"
    mine.mkdir()
    store_owner.claim(mine)
    dead = tmp_path / "areal_like-dead-0"
    dead.mkdir()
    store_owner.claim(dead)
    owner = json.loads((dead / "owner.json").read_text())
    (dead / "owner.json").write_text(json.dumps({**owner, "identity": "of a dead process"}))
    (dead / "v0.weights").write_bytes(bytes(5000))
    elsewhere = tmp_path / "areal_like-elsewhere-0"
    elsewhere.mkdir()
    (elsewhere / "owner.json").write_text(json.dumps({**owner, "identity": "", "scope": "another host"}))
    (tmp_path / "areal_like-new-0").mkdir()
    old = tmp_path / "areal_like-unclaimed-0"
    old.mkdir()
    os.utime(old, (time.time() - 7200, time.time() - 7200))
    found = memory.leftovers(FakeMachine())
    assert found.verdict == "warning"
    assert set(found.data["stores"]) == {str(dead), str(old)}
    assert found.data["num_bytes"] > 5000
    assert set(store_owner.sweep_dead(tmp_path)) == {dead, old}, "the doctor and the sweep agree"
    assert memory.leftovers(FakeMachine(system="darwin")).verdict == "absent"


# ---------------------------------------------------------------- limits


@pytest.mark.parametrize(
    ("pair", "verdict"),
    [((math.inf, math.inf), "ok"), ((1024, 4096), "ok"), ((256, 1024), "warning"), ((32, 32), "problem")],
)
def test_open_file_limit(pair: tuple[float, float], verdict: str) -> None:
    assert limits.open_files(FakeMachine(limits={"RLIMIT_NOFILE": pair})).verdict == verdict


def test_process_limits_of_user_and_control_group() -> None:
    assert limits.processes(FakeMachine()).verdict == "ok"
    full = FakeMachine(limits={"RLIMIT_NPROC": (4096, 4096)}, own_threads=4050)
    assert limits.processes(full).verdict == "problem"
    files = {**V2, "/sys/fs/cgroup/job/pids.max": "512", "/sys/fs/cgroup/job/pids.current": "100"}
    found = limits.processes(FakeMachine(files=files))
    assert (found.verdict, "--pids-limit" in found.advice) == ("warning", True)


# ---------------------------------------------------------------- disk


def test_runs_folder_is_judged_by_room_and_by_writing(tmp_path: Path) -> None:
    def look(free: float) -> str:
        return disk.runs_folder(FakeMachine(disk=(100 * GB, free), runs_dir=tmp_path / "not" / "yet")).verdict

    assert (look(50 * GB), look(5 * GB), look(0.1 * GB)) == ("ok", "warning", "problem")
    assert list(tmp_path.iterdir()) == [], "the doctor leaves nothing behind"


def test_unwritable_runs_folder_is_one_problem_and_not_four(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*args: object, **more: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(disk.tempfile, "TemporaryDirectory", refuse)
    machine = FakeMachine(runs_dir=tmp_path)
    assert disk.runs_folder(machine).verdict == "problem"
    assert {check(machine).verdict for check in (disk.file_system, disk.locks, disk.forced_writes)} == {"absent"}


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [("ext4", "ok"), ("apfs", "ok"), ("overlay", "ok"), ("", "ok"), ("nfs4", "warning"), ("lustre", "warning"),
     ("fuse.sshfs", "warning"), ("9p", "warning"), ("tmpfs", "warning")],
)  # fmt: skip
def test_network_and_memory_file_systems_are_warnings(kind: str, verdict: str, tmp_path: Path) -> None:
    mounts = [Mount("/", "ext4"), Mount(str(tmp_path), kind)]
    found = disk.file_system(FakeMachine(mounts=mounts, runs_dir=tmp_path / "runs"))
    assert found.verdict == verdict


def test_file_system_is_that_of_the_deepest_mount_and_of_the_last_one_there(tmp_path: Path) -> None:
    mounts = [
        Mount(str(tmp_path), "nfs4"),
        Mount("/", "ext4"),
        Mount(str(tmp_path), "xfs"),
        Mount(f"{tmp_path}x", "9p"),
    ]
    assert disk.mount_of(FakeMachine(mounts=mounts), tmp_path).kind == "xfs"


def test_write_ahead_log_that_does_not_work_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert disk.wal_fault(tmp_path / "ledger.sqlite") == ""

    def refuse(*args: object, **more: object) -> None:
        raise sqlite3.OperationalError("locking protocol")

    monkeypatch.setattr(disk.sqlite3, "connect", refuse)
    found = disk.file_system(FakeMachine(runs_dir=tmp_path))
    assert (found.verdict, "locking protocol" in found.found) == ("problem", True)


def test_locks_that_bind_nobody_are_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = FakeMachine(runs_dir=tmp_path)
    assert disk.locks(machine).verdict == "ok"
    with monkeypatch.context() as patch:
        patch.setattr(disk.fcntl, "flock", lambda file, flags: None)
        assert disk.locks(machine).verdict == "warning"

    def unable(file: object, flags: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(disk.fcntl, "flock", unable)
    assert disk.locks(machine).verdict == "problem"


def test_slow_forced_writes_are_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert len(disk.sync_times(tmp_path / "file")) == disk.TRIALS
    for wall_s, verdict, word in ((0.0005, "ok", "fast"), (0.005, "ok", "ordinary"), (0.2, "warning", "very slow")):
        monkeypatch.setattr(disk, "sync_times", lambda path, wall_s=wall_s: [wall_s] * 5)
        found = disk.forced_writes(FakeMachine(runs_dir=tmp_path))
        assert (found.verdict, found.found.startswith(f"{word}:")) == (verdict, True)


def test_temporary_folder_full_not_executable_and_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert disk.temporary(FakeMachine()).verdict == "ok"
    assert disk.temporary(FakeMachine(disk=(GB, 1e6))).verdict == "warning"
    assert disk.temporary(FakeMachine(mounts=[Mount("/", "ext4", ("rw", "noexec"))])).verdict == "warning"

    def none() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(disk.tempfile, "gettempdir", none)
    assert disk.temporary(FakeMachine()).verdict == "problem"


def test_model_cache_is_optional(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment = {"HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    found = disk.model_cache(FakeMachine(environment=environment))
    assert (found.verdict, "offline" in found.found) == ("ok", True)
    assert disk.model_cache(FakeMachine(environment=environment, disk=(GB, GB))).verdict == "absent"
    monkeypatch.setattr(disk.os, "access", lambda path, mode: False)
    assert disk.model_cache(FakeMachine(environment=environment)).verdict == "absent"


# ---------------------------------------------------------------- network


@pytest.mark.parametrize(
    ("text", "verdict"),
    [("32768\t60999", "ok"), ("1024\t65535", "warning"), ("32768\t33000", "warning"), ("", "absent")],
)
def test_port_range(text: str, verdict: str) -> None:
    assert network.port_range(FakeMachine(files={network.PORT_RANGE: text})).verdict == verdict


def test_loopback_and_zeromq_are_tried_for_real_and_their_failure_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = FakeMachine()
    assert (
        network.loopback(machine).verdict == network.zeromq(machine).verdict == network.curve(machine).verdict == "ok"
    )

    def silent(*, is_encrypted: bool) -> float:
        raise OperationError("a message over loopback did not arrive within 3 s")

    def unreachable(*args: object, **more: object) -> None:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(network, "round_trip", silent)
    monkeypatch.setattr(network.socket, "create_server", unreachable)
    assert network.loopback(machine).verdict == network.zeromq(machine).verdict == "problem"
    assert network.curve(machine).verdict == "warning"


def test_libzmq_without_curve_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zmq.has", lambda feature: False)
    assert network.curve(FakeMachine()).verdict == "warning"


# ---------------------------------------------------------------- clock


def test_coarse_clock_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    assert clock.resolution(FakeMachine()).verdict == "ok"
    monkeypatch.setattr(clock, "step_s", lambda name: 0.0156)
    assert clock.resolution(FakeMachine()).verdict == "warning"


@pytest.mark.parametrize("now_s", [0.0, 1.6e9, 9e9])
def test_date_that_cannot_be_right_is_a_warning(now_s: float) -> None:
    assert clock.date(FakeMachine(), now_s=now_s).verdict == "warning"


def test_date_of_today_is_ok() -> None:
    assert clock.date(FakeMachine()).verdict == "ok"


@pytest.mark.parametrize(("state", "verdict"), [(0, "ok"), (5, "absent"), (None, "absent")])
def test_unsynchronised_clock_is_no_fault_on_one_machine(
    state: int | None, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock, "kernel_clock_state", lambda: state)
    assert clock.synchronisation(FakeMachine()).verdict == verdict


def test_linux_questions_are_answered_with_not_on_this_system_elsewhere() -> None:
    mac = FakeMachine(system="darwin", cores=(8, None))
    for look in (network.port_range, clock.synchronisation, memory.leftovers):
        assert look(mac).found == "not on this system"
    assert processor.cores(mac).verdict == limits.processes(mac).verdict == memory.memory(mac).verdict == "ok"
