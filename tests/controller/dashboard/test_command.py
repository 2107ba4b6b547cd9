"""Claims about `areal-like dashboard`: what is checked before it serves, what it prints, how it ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import urllib.request

import pytest
from report_run import report_run

from areal_like.errors import UserError
from controller.cli.main import main
from controller.dashboard import command
from controller.dashboard.access import TOKEN_VARIABLE, Access
from controller.dashboard.command import checked, dashboard, greeting
from controller.dashboard.server import Dashboard

TOKEN = "a-token-of-enough-signs"


@pytest.fixture(autouse=True)
def without_a_token_in_the_environment(monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)


def test_a_folder_that_is_none_and_one_that_is_a_run_are_refused_with_the_right_one(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        checked(str(tmp_path / "absent"))
    folder = report_run(tmp_path, "mine", num_steps=1, has_pulses=False, has_traces=False, has_ledger=False)
    with pytest.raises(UserError, match=f"not a folder of runs.*areal-like dashboard {re.escape(str(tmp_path))}"):
        checked(str(folder.root))
    assert checked(str(tmp_path)) == tmp_path


def test_a_page_without_its_files_is_not_served(tmp_path, monkeypatch):
    def absent(name):
        raise UserError(f"{name} is not installed")

    monkeypatch.setattr(command, "asset", absent)
    monkeypatch.setattr(command, "_serve", lambda *_: pytest.fail("it is served"))
    with pytest.raises(UserError, match="is not installed"):
        dashboard(str(tmp_path), port=0)


def test_a_port_in_use_is_one_line_that_names_the_way_out(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["dashboard", str(tmp_path), "--port", str(port)]) == 2
    assert capsys.readouterr().err == (
        f"error: --host 127.0.0.1: port {port} is in use -> choose a different port with --port N, or use --port 0 for "
        "any free port\n"
    )


def test_an_address_of_another_machine_is_a_mistake_in_words(tmp_path, capsys):
    assert main(["dashboard", str(tmp_path), "--host", "192.0.2.1", "--port", "0"]) == 2
    assert re.match(
        r"error: --host 192.0.2.1: cannot listen on this address \(Cannot.*\) -> specify an address",
        capsys.readouterr().err,
    )


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--port", "70000"], "is not a port"),
        (["--port", "x"], "is not a whole number"),
        (["--token", "short"], "must consist of 16 to 200"),
        (["--host", "0.0.0.0", "--token", ""], "must consist of 16 to 200"),
    ],
)
def test_bad_options_are_refused(tmp_path, capsys, words, complaint):
    try:
        status = main(["dashboard", str(tmp_path), *words])
    except SystemExit as end:
        status = end.code
    assert status == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "token", "address", "line"),
    [
        ("127.0.0.1", None, "http://127.0.0.1:80/", "token for actions .*: "),
        ("127.0.0.1", TOKEN, f"http://127.0.0.1:80/?token={TOKEN}", "Ctrl-C"),
        ("::1", None, "http://[::1]:80/", "actions"),
        ("0.0.0.0", TOKEN, f"http://0.0.0.0:80/?token={TOKEN}", "plain HTTP"),
    ],
)
def test_the_command_prints_the_address_and_what_needs_the_token(tmp_path, host, token, address, line):
    lines = greeting(Dashboard(tmp_path, Access.of(host, token)), 80)
    assert lines[0].endswith(address)
    assert re.search(line, "\n".join(lines))


def test_it_serves_until_a_signal_and_ends_with_0(tmp_path):
    found: list[str] = []

    def look() -> None:
        address = found[0].rsplit(": ", 1)[1]
        with urllib.request.urlopen(address) as answer:
            found.append(answer.read().decode())
        os.kill(os.getpid(), signal.SIGTERM)

    def announce(line: str) -> None:
        found.append(line)
        if "Ctrl-C" in line:
            threading.Timer(0.01, look).start()

    assert dashboard(str(tmp_path), port=0, announce=announce) == 0
    assert "<title>areal-like dashboard</title>" in found[-1]
