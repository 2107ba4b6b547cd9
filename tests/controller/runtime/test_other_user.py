"""Another user of the machine gets nothing of a run: not its folder, weights, keys or sockets."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from channel_harness import open_hub, open_peer, serve_until

from areal_like.forkserver import _listen
from areal_like.process import private_files
from areal_like.transport.credentials import issue_credentials, make_run_credentials
from areal_like.weights.weight_store import SHARED_MEMORY, default_root
from controller.run_folder.run_folder import RunFolder

pytestmark = pytest.mark.processes

NOBODY = 65534
STRANGER = """
import encodings.idna, json, os, socket, sys  # all of it now: later Python itself may be out of reach
port, places = int(sys.argv[1]), sys.argv[2:]
os.setgroups([]); os.setgid({uid}); os.setuid({uid})
got = []
def attempt(what, work):
    try:
        work(); got.append(what)
    except OSError:
        pass
for place in places:
    attempt("list " + place, lambda: os.listdir(place))
    attempt("read " + place, lambda: open(place, "rb").read(1))
    attempt("write " + place, lambda: open(os.path.join(place, "x"), "wb"))
    def connect():
        with socket.socket(socket.AF_UNIX) as one: one.connect(place)
    attempt("connect " + place, connect)
names = [name for name in os.listdir("/dev/shm") if name.startswith("areal_like-")] if os.path.isdir("/dev/shm") else []
with socket.create_connection(("127.0.0.1", port), 5) as stream:
    stream.settimeout(5)
    stream.sendall(b"\\xff" + bytes(8) + b"\\x7f\\x03\\x00" + b"NULL".ljust(20, b"\\0") + bytes(32))
    received = b""
    try:
        while part := stream.recv(4096): received += part
    except OSError: pass
print(json.dumps(dict(uid=os.getuid(), got=got, names=names, received=len(received))))
"""

needs_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become a user")


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A folder that every user can enter, unlike pytest's own."""
    place = Path(tempfile.mkdtemp(prefix="areal-test-"))
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)


@needs_root
def test_stranger_of_another_uid_gets_nothing_at_all(open_place: Path) -> None:
    with private_files():
        run = RunFolder.create(open_place / "runs", "job")
        run.write_state("running")
        make_run_credentials(run.keys)
        issue_credentials(run.keys, "rollout", "rollout-0")
    run_id = str(run.read_state()["run_id"])
    weights = default_root(run_id, "shm" if SHARED_MEMORY.is_dir() else "disk", run.root)
    (weights / "v1.weights").write_bytes(b"weights")
    listener = _listen(str(open_place / "forkserver"))
    listener.listen()
    secrets = [path.read_text().strip() for path in run.keys.rglob("*") if path.is_file()]
    places = [run.root, run.state, run.processes, run.keys, run.keys / "controller.join", run.keys / "client.secret",
              run.keys / "rollout-0" / "controller.token", weights, weights / "v1.weights",
              open_place / "forkserver"]  # fmt: skip

    async def scene() -> dict[str, object]:
        async with open_hub(curve_dir=run.keys) as (hub, address), open_peer(address, curve_dir=run.keys) as peer:
            connecting = asyncio.create_task(peer.connect(20.0))
            await serve_until(hub, connecting.done)
            code, port = STRANGER.replace("{uid}", str(NOBODY)), address.rpartition(":")[2]
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-S", "-c", code, port, *map(str, places), stdout=subprocess.PIPE, cwd="/"
            )
            output, _ = await process.communicate()
            assert process.returncode == 0
            assert sum(count for kind, count in hub.counters.items() if kind.startswith("rejected")) == 0
            assert list(hub.peers) == ["rollout-0"]
            return dict(json.loads(output))

    try:
        found = asyncio.run(scene())
    finally:
        shutil.rmtree(weights, ignore_errors=True)
        listener.close()
    assert found["uid"] == NOBODY
    assert found["got"] == []
    assert not any(secret in str(found["names"]) for secret in secrets)
    assert int(str(found["received"])) <= 128, "a greeting that says CURVE, and no more"


@needs_root
def test_fork_server_hangs_up_on_another_user(open_place: Path) -> None:
    """Also where its socket can be reached: a process that is served has code run as its user."""
    path = open_place / "socket"
    argv = [sys.executable, "-P", "-m", "areal_like.forkserver", "--starter", str(os.getpid()), "--listen", str(path)]
    server = subprocess.Popen(argv, cwd=Path(__file__).parents[3])
    code = "import os, socket, sys\nif sys.argv[2] != '0': os.setgroups([]); os.setuid(int(sys.argv[2]))\n"
    code += "with socket.socket(socket.AF_UNIX) as one:\n    one.settimeout(20)\n    one.connect(sys.argv[1])\n"
    code += "    print(one.recv(100).decode())"
    try:
        while not path.exists():
            assert server.poll() is None
            time.sleep(0.01)
        path.chmod(0o777)
        answers = [
            subprocess.run(
                [sys.executable, "-c", code, str(path), str(uid)], capture_output=True, text=True, check=True
            )
            for uid in (NOBODY, 0)
        ]
    finally:
        server.kill()
        server.wait()
    stranger, owner = (answer.stdout.strip() for answer in answers)
    assert stranger == ""
    assert owner.startswith('{"ready": true')


def test_run_folder_and_what_is_written_for_a_run_is_private(tmp_path: Path) -> None:
    with private_files():
        run = RunFolder.create(tmp_path / "runs", "job")
        run.write_state("running")
        run.config.write_text("")
    assert run.root.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o077 for path in run.root.rglob("*")} == {0}


def test_weights_folder_that_was_open_to_others_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_like.weights.weight_store.SHARED_MEMORY", tmp_path)
    old = tmp_path / f"areal_like-r-{os.getuid()}"
    old.mkdir()
    old.chmod(0o755)
    assert default_root("r", "shm", tmp_path / "run", need_bytes=1) == old
    assert old.stat().st_mode & 0o777 == 0o700
