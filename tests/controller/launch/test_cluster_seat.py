"""Claims about a seat, with real children and no Ray: it is a plain object until Ray makes an actor of it."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_like.transport.ports import can_listen
from controller.launch.cluster.seat import SPEC_PLACE, News, Order, Seat, with_host
from services.processes.process_tree import is_alive

pytestmark = pytest.mark.processes

REPOSITORY = Path(__file__).resolve().parents[3]
SHOW_SPEC = "import sys, time; print(open(sys.argv[1]).read(), flush=True); time.sleep(60)"


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def seat() -> Iterator[Seat]:
    seat = Seat("node-1", "127.0.0.1")
    yield seat
    seat.close()


def order(code: str, spec: dict[str, Any] | None = None, **more: Any) -> Order:
    text = json.dumps(spec or {"run_id": "r"})
    return Order(argv=("-c", code, SPEC_PLACE), spec=text, num_threads=1, user_path="/nowhere", **more)


def everything(seat: Seat) -> tuple[str, int]:
    """Its whole log and how it ended."""
    text, deadline_s = b"", time.monotonic() + 60
    while time.monotonic() < deadline_s:
        news: News = seat.news(len(text), 1.0)
        text += news.log
        if news.returncode is not None:
            return text.decode(), news.returncode
    raise AssertionError(text)


def spec_of(seat: Seat) -> dict[str, Any]:
    """What the child printed."""
    text = b""
    while not text.endswith(b"}\n"):
        text += seat.news(len(text), 5.0).log
    return json.loads(text)


def until(condition: Any) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_log_and_end_of_the_child_are_reported_in_order_and_the_end_only_after_the_whole_log(seat: Seat):
    seated = seat.start(order("import sys; print('x' * 400_000); print('error: words', file=sys.stderr); sys.exit(3)"))
    assert (seated.node_id, seated.address) == ("node-1", "127.0.0.1")
    text, returncode = everything(seat)
    assert returncode == 3
    assert "x" * 400_000 in text
    assert "error: words" in text
    assert seat.news(0, 0.0).log.startswith(b"x"), "asked again it tells the same: a lost answer loses nothing"


def test_spec_is_made_for_this_node(seat: Seat):
    spec = {"run_id": "r", "parent_pid": 1, "bind_address": "tcp://10.9.9.9:4000", "curve_dir": "/elsewhere"}
    seat.start(order(SHOW_SPEC, spec, keys={"curve_dir": {"client.secret": b"s3cret"}}))
    found = spec_of(seat)
    assert found["parent_pid"] == os.getpid()
    assert found["bind_address"] == "tcp://127.0.0.1:4000"
    folder = Path(found["curve_dir"])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "client.secret").stat().st_mode) == 0o600
    assert (folder / "client.secret").read_bytes() == b"s3cret"
    seat.close()
    assert not folder.exists(), "keys do not stay on the node"


def test_place_is_reported_before_anything_starts_with_a_port_that_is_free_at_its_own_address(seat: Seat):
    found = seat.place()
    assert found[:2] == ("node-1", "127.0.0.1")
    assert can_listen(found.port, found.address)


def test_keys_appear_neither_in_the_environment_nor_in_the_words_of_an_order(seat: Seat):
    start_order = order("import os; print(dict(os.environ))", keys={"curve_dir": {"client.secret": b"s3cret"}})
    seat.start(start_order)
    assert "s3cret" not in everything(seat)[0]
    assert "s3cret" not in repr(start_order)


def test_streaming_trainer_gets_a_store_of_this_node_that_goes_with_its_seat(seat: Seat, tmp_path: Path):
    spec = {
        "run_id": f"seat-{os.getpid()}",
        "run_dir": str(tmp_path),
        "model": {"path": None},
        "weight_dir": "/elsewhere",
    }
    seat.start(order(SHOW_SPEC, spec, weight_versions=4))
    folder = Path(spec_of(seat)["weight_dir"])
    assert folder.is_dir()
    assert str(folder) != "/elsewhere"
    seat.close()
    assert not folder.exists()


def test_term_reaches_the_child_and_kill_what_it_started_too(seat: Seat):
    code = (
        "import subprocess, sys, signal, time; signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True));"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); print(p.pid, flush=True);"
        "[time.sleep(0.1) for _ in range(600)]"
    )
    seated = seat.start(order(code))
    text = b""
    while not text.endswith(b"\n"):
        text += seat.news(len(text), 5.0).log
    grandchild = int(text)
    seat.signal(signal.SIGTERM, whole_session=False)
    until(lambda: b"asked" in seat.news(0, 1.0).log)
    seat.signal(signal.SIGKILL, whole_session=True)
    assert everything(seat)[1] == -signal.SIGKILL
    until(lambda: not is_alive(seated.pid) and not is_alive(grandchild))


def test_children_of_a_child_that_ended_go_with_it(seat: Seat):
    code = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],"
        "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL); print(p.pid)"
    )
    seat.start(order(code))
    text, returncode = everything(seat)
    assert returncode == 0
    until(lambda: not is_alive(int(text)))


def test_refusal_of_the_node_is_an_error_of_start(seat: Seat, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(OSError, match="No such file"):
        seat.start(order("pass"))


CODE_OF_A_SEAT = """
import sys, time
from controller.launch.cluster.seat import Order, Seat
seat = Seat("n", "127.0.0.1")
code = "from areal_like.process import die_with_parent; import json, sys, time;" \\
    "die_with_parent(json.load(open(sys.argv[1]))['parent_pid']); time.sleep(60)"
print(seat.start(Order(("-c", code, "{spec}"), '{"run_id": "r"}', 1, "/", {"curve_dir": {"a": b"b"}})).pid, flush=True)
time.sleep(60)
"""


def test_child_dies_with_a_killed_seat_and_the_next_seat_sweeps_up(tmp_path: Path):
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-c", CODE_OF_A_SEAT], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    assert is_alive(child)
    time.sleep(0.5)  # the child asks for its parent's death first of all
    process.kill()
    process.wait()
    process.stdout.close()
    until(lambda: not is_alive(child))
    (left,) = tmp_path.glob("areal_like-seat-*")
    assert (left / "curve_dir" / "a").exists()
    Seat("n", "127.0.0.1").close()
    assert not list(tmp_path.glob("areal_like-seat-*"))


def test_address_gets_another_host():
    assert with_host("tcp://10.0.0.1:4000", "10.0.0.2") == "tcp://10.0.0.2:4000"
    assert with_host("tcp://10.0.0.1:4000", "fd00::2") == "tcp://[fd00::2]:4000"
