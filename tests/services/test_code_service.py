"""The real reward service with the code scorer: hostile programs by the hundred together with honest ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from code_harness import layers_here
from hostile_programs import ADD, ADD_TESTS, PROGRAMS, SUM_TESTS
from reward_harness import PATIENCE_S, Service, wait_until

pytestmark = pytest.mark.e2e

LIMITS = {"time_limit_s": 0.5, "memory_limit_mb": 256}
SETTINGS = {"timeout_s": 300.0, "num_workers": 2, "num_spares": 1, "retries": 0, "scorers": [{"kind": "code"}]}
MANY_S = 500.0
"""Only a bound on a hang."""


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    if layers_here().chosen != "namespaces":
        pytest.skip(f"no namespaces here: {layers_here().parts.get('namespaces', layers_here().words)}")
    service = Service(tmp_path, SETTINGS)
    yield service
    service.close()


def sandboxes(service: Service, known: frozenset[int] = frozenset()) -> set[int]:
    """Processes of this service's sandboxes (its children, and those `known`), and of any on this machine that lost the
    process it was started by."""
    own, found = set(known), set()
    if service.process.poll() is None:
        own |= {child.pid for child in psutil.Process(service.process.pid).children(recursive=True)}
    for process in psutil.process_iter(["cmdline", "ppid"]):
        is_sandbox = any("marshal.loads(os.pread" in part for part in process.info["cmdline"] or [])
        if is_sandbox and (process.pid in own or process.info["ppid"] == 1):
            found.add(process.pid)
    return found


@pytest.mark.thorough
def test_every_hostile_program_gets_its_verdict_and_the_honest_ones_between_them_pass(service: Service) -> None:
    service.wait_full(3)
    pids, before = service.scoring_pids(), sandboxes(service)
    asked: dict[str, tuple[str, float]] = {}
    for group, programs in PROGRAMS.items():
        tests, value = (SUM_TESTS if "stream" in group else ADD_TESTS), float("passes" in group)
        for name, program in programs.items():
            if not program.isascii():  # a message of the run could not carry it
                continue
            request_id = service.post("code", deadline_s=MANY_S, program=program, tests=tests, **LIMITS)
            asked[request_id] = (f"{group}: {name}", value)
            request_id = service.post("code", deadline_s=MANY_S, program=ADD, tests=ADD_TESTS)
            asked[request_id] = (f"honest, after {group}: {name}", 1.0)
    wait_until(lambda: len(service.replies) == len(asked), "all verdicts", MANY_S)
    wrong = []
    for request_id, (name, value) in asked.items():
        (verdict,) = service.replies[request_id]
        if (verdict.kind, verdict.value) != ("scored", value):
            wrong.append((name, verdict.kind, verdict.value, verdict.reason))
    assert wrong == []
    # On a busy machine a killed program may end later than its verdict; its scoring process is replaced then.
    lost = pids - service.scoring_pids()
    assert len(lost) <= service.log.count("left processes running"), "a scoring process was lost over them"
    # A process that replaced one has sandbox processes of its own: their number is what must not grow.
    wait_until(lambda: len(sandboxes(service)) <= len(before), "the end of all programs", PATIENCE_S)
    assert verdict.scorer == "code@2/namespaces"


def test_killing_the_service_ends_every_program(service: Service) -> None:
    before = sandboxes(service)
    spins = "import os, signal\nos.fork()\nos.fork()\nsignal.signal(15, signal.SIG_IGN)\nwhile True: pass\n"
    for _ in range(2):
        service.post("code", program=spins, tests=ADD_TESTS, time_limit_s=4.0)
    wait_until(lambda: len(sandboxes(service) - before) >= 4, "programs to run")
    known = frozenset(sandboxes(service))
    service.process.kill()
    service.process.wait(PATIENCE_S)
    wait_until(lambda: not sandboxes(service, known) - before, "the end of all programs")


def test_a_killed_supervisor_costs_one_attempt(tmp_path: Path) -> None:
    if not layers_here().chosen:
        pytest.skip("no sandbox here")
    service = Service(tmp_path, SETTINGS | {"num_workers": 1, "num_spares": 0, "retries": 1})
    request_id = service.post("code", program="import time\ntime.sleep(1)\n" + ADD, tests=ADD_TESTS)
    (scoring,) = service.scoring_pids()
    supervisor = psutil.Process(scoring).children()[0]
    wait_until(lambda: supervisor.children(), "the program to run")
    supervisor.kill()
    verdict = service.verdict_of(request_id)
    assert (verdict.value, verdict.attempts) == (1.0, 2)
    service.close()


def test_a_service_that_cannot_confine_as_demanded_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    settings = {"scorers": [{"kind": "code", "options": {"require": "namespaces"}}]}
    service = Service(tmp_path, settings, wait=False)
    assert service.process.wait(PATIENCE_S) == 2, service.log
    last = service.log.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert "bubblewrap is not installed" in last
    service.close()
