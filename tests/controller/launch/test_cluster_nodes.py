"""Claims about the look at a node: what is seen on this machine, and what is said of one that lacks something."""

from __future__ import annotations

import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controller.launch.cluster.node_check import Expected, node_problems
from controller.launch.cluster.node_look import free_port, look

EXPECTED = Expected(
    python="3.11.7", packages={"torch": "2.13.0+cpu"}, model="/models/m", run_dir="/runs", engine_python="/opt/python",
    engine="SGLang", controller="10.0.0.1", max_clock_skew_s=5.0,
)  # fmt: skip


def seen(**other: Any) -> dict[str, Any]:
    fine = {
        "time_s": time.time(), "python": "3.11.9", "executable": "/usr/bin/python3", "packages": {"torch": "2.13.0"},
        "is_installed": True, "model": "", "run_dir": "", "engine_python": "", "controller": "", "port": "",
    }  # fmt: skip
    return {**fine, **other}


def problems(**other: Any) -> list[str]:
    return [str(problem) for problem in node_problems("10.0.0.2", seen(**other), EXPECTED, took_s=0.0)]


def test_a_node_like_ours_lacks_nothing():
    assert problems() == []


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"python": "3.12.1"}, "node 10.0.0.2 runs Python 3.12.1 (/usr/bin/python3), but the controller runs 3.11.7"),
        ({"packages": {"torch": "2.12.0"}}, "node 10.0.0.2 has torch 2.12.0, but the controller has torch 2.13.0"),
        ({"packages": {}}, "has no torch, but the controller has torch 2.13.0"),
        ({"is_installed": False}, "node 10.0.0.2 has no installation of areal_like for /usr/bin/python3"),
        ({"model": "No such file"}, "model.path: node 10.0.0.2 cannot read /models/m"),
        ({"run_dir": "Permission denied"}, "runs_dir: node 10.0.0.2 cannot use /runs (Permission denied)"),
        ({"engine_python": "it does not exist"}, "node 10.0.0.2 has no SGLang interpreter /opt/python"),
        ({"controller": "No route to host"}, "node 10.0.0.2 cannot reach the controller at 10.0.0.1"),
        ({"port": "Too many open files"}, "node 10.0.0.2 has no free port"),
        ({"time_s": time.time() - 90}, "node 10.0.0.2's clock is off by "),
    ],
)
def test_each_thing_that_is_missing_is_one_sentence_with_the_node(other: dict[str, Any], words: str):
    (said,) = problems(**other)
    assert words in said
    assert " -> " in said


def test_a_slow_answer_is_no_wrong_clock():
    late = seen(time_s=time.time() - 8)
    assert not list(node_problems("10.0.0.2", late, EXPECTED, took_s=4.0))


def order(folder: Path, **other: Any) -> dict[str, Any]:
    (folder / "token").write_text("abc")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    fine = {
        "packages": ["pytest"], "model": None, "run_dir": str(folder), "token": ("token", "abc"),
        "python": sys.executable, "controller": ("127.0.0.1", port), "address": "127.0.0.1",
    }  # fmt: skip
    return {**fine, **other}


def test_this_machine_is_seen_as_it_is(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = look(order(tmp_path, controller=server.getsockname()))
    assert found["packages"]["pytest"]
    assert (found["run_dir"], found["engine_python"], found["controller"], found["port"]) == ("", "", "", "")
    assert found["is_installed"]
    assert [path.name for path in tmp_path.iterdir()] == ["token"], "nothing stays behind"


def test_a_folder_of_the_same_name_that_is_not_shared_is_noticed(tmp_path: Path):
    assert "a different folder" in look(order(tmp_path, token=("token", "xyz")))["run_dir"]
    assert look(order(tmp_path, token=("gone", "abc")))["run_dir"]


def test_absent_model_interpreter_and_controller_are_noticed(tmp_path: Path):
    found = look(order(tmp_path, model=str(tmp_path / "m"), python="/no/such/python"))
    assert "No such file" in found["model"]
    assert found["engine_python"] == "it does not exist"
    assert found["controller"], "nobody listens there any more"


def test_an_address_of_another_machine_cannot_be_bound(tmp_path: Path):
    assert look(order(tmp_path, address="203.0.113.7"))["port"]


def test_free_ports_lie_outside_those_of_outgoing_connections_and_of_rays_workers():
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(20_000 <= free_port("127.0.0.1") < lowest for _ in range(5))


def test_only_what_the_controller_has_is_asked_of_nodes():
    bare = replace(EXPECTED, packages={"deepspeed": ""})
    assert not list(node_problems("10.0.0.2", seen(packages={"deepspeed": ""}), bare, took_s=0.0))
