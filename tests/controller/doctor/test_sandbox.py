"""The doctor on sandbox layers: tried for real where they are, each refusal on a machine made up for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import pytest
from fake_machine import FakeMachine

from controller.doctor.machine import Machine, Ran
from controller.doctor.topics import sandbox

NO_FAULTS = {"user": "", "mount": "", "network": "", "ipc": "", "hostname": "", "pid": ""}
BWRAP = {"bwrap": "/usr/bin/bwrap"}


@pytest.mark.parametrize(
    ("files", "fault", "advice"),
    [
        ({sandbox.CLONE_SETTING: "0"}, "Operation not permitted", "unprivileged_userns_clone=1"),
        ({sandbox.APPARMOR_SETTING: "1"}, "Operation not permitted", "AppArmor"),
        ({sandbox.MAX_SETTING: "0"}, "No space left on device", "max_user_namespaces=15000"),
        ({}, "No space left on device", "the nesting depth"),
        ({}, "Operation not permitted", "docker run --security-opt"),
    ],
)
def test_refused_namespaces_are_a_warning_that_names_who_refuses(
    files: dict[str, str], fault: str, advice: str
) -> None:
    answers = {"namespaces": {"faults": {"user": fault}, "uid": 1000}}
    found = sandbox.namespaces(FakeMachine(files=files, answers=answers))
    assert (found.verdict, f"user ({fault})" in found.found) == ("warning", True)
    assert advice in found.advice


def test_namespaces_made_are_ok_and_root_is_mentioned() -> None:
    def look(uid: int) -> str:
        return sandbox.namespaces(FakeMachine(answers={"namespaces": {"faults": NO_FAULTS, "uid": uid}})).found

    assert look(1000) == "user, mount, network, ipc, hostname, pid"
    assert look(0).endswith("(as root)")


def bwrap(whole: Ran, bare: Ran) -> Callable[[Sequence[str]], Ran]:
    """bubblewrap that ends like this with and without private /proc, /dev and /tmp."""

    def says(argv: Sequence[str]) -> Ran:
        if "--version" in argv:
            return Ran(0, "bubblewrap 0.8.0\n")
        return whole if "--tmpfs" in argv else bare

    return says


INSIDE, REFUSED = Ran(0, "inside\n"), Ran(1, "", "bwrap: No permissions\n", "bwrap: No permissions")


@pytest.mark.parametrize(
    ("whole", "bare", "verdict", "words"),
    [
        (INSIDE, INSIDE, "ok", "bubblewrap 0.8.0 works with"),
        (REFUSED, INSIDE, "warning", "without private /proc"),
        (REFUSED, REFUSED, "warning", "does not work on this machine: bwrap: No permissions"),
        (Ran(0, "writable\ninside\n"), Ran(0, "writable\ninside\n"), "warning", "read-only"),
    ],
)
def test_bubblewrap_is_judged_by_what_it_does(whole: Ran, bare: Ran, verdict: str, words: str) -> None:
    found = sandbox.bubblewrap(FakeMachine(programs=BWRAP, says=bwrap(whole, bare)))
    assert found.verdict == verdict
    assert words in found.found


def test_missing_bubblewrap_is_absent_with_the_command_that_gets_it() -> None:
    found = sandbox.bubblewrap(FakeMachine())
    assert (found.verdict, "apt install bubblewrap" in found.advice) == ("absent", True)


def test_seccomp_by_what_its_trial_said() -> None:
    assert sandbox.seccomp(FakeMachine(answers={"seccomp_filter": {"fault": ""}})).verdict == "ok"
    for answer in ({"fault": "Invalid argument"}, "ended by SIGSYS"):
        assert sandbox.seccomp(FakeMachine(answers={"seccomp_filter": answer})).verdict == "warning"  # type: ignore[dict-item]


def test_resource_limits_that_do_not_hold_are_named() -> None:
    def look(uid: int, **states: str) -> tuple[str, str]:
        limits = {"memory": "bound", "file size": "bound", "processes": "bound", **states}
        found = sandbox.resource_limits(FakeMachine(answers={"resource_limits": {"limits": limits, "uid": uid}}))
        return found.verdict, found.found

    assert look(1000) == ("ok", "memory, file size, processes are enforced")
    assert look(0, processes="free")[0] == "ok", "root is never bound by the number of processes"
    assert look(1000, processes="free") == ("warning", "these limits are not enforced: processes")
    assert look(1000, memory="refused")[0] == "warning"
    assert sandbox.resource_limits(FakeMachine()).verdict == "warning"


def test_trials_that_die_are_a_warning() -> None:
    assert sandbox.namespaces(FakeMachine(answers={"namespaces": "ended by SIGSYS"})).verdict == "warning"


def test_layers_of_linux_are_not_on_other_systems() -> None:
    mac = FakeMachine(system="darwin")
    for look in (sandbox.namespaces, sandbox.bubblewrap, sandbox.seccomp):
        assert look(mac).found == "not on this system"


@pytest.mark.processes
@pytest.mark.parametrize("name", ["namespaces", "seccomp_filter", "resource_limits"])
def test_each_trial_ends_with_an_answer_on_this_machine(name: str) -> None:
    answer = Machine().probe(name)
    assert answer.data, answer.fault


def layers_say(chosen: str, **parts: str) -> FakeMachine:
    """A machine on which the scorer's own trial ends like this."""
    found = {"chosen": chosen, "words": "words", "parts": parts}
    return FakeMachine(says=lambda argv: Ran(0, json.dumps(found)))


def test_the_layer_that_code_rewards_take_is_named() -> None:
    found = sandbox.code_rewards(layers_say("landlock", namespaces="bubblewrap is not installed", landlock="works"))
    assert (found.verdict, found.found) == ("ok", "programs run in layer landlock: words")


@pytest.mark.parametrize("chosen", ["seccomp", "limits", ""])
def test_code_rewards_without_a_layer_that_hides_files_are_a_warning_with_a_remedy(chosen: str) -> None:
    found = sandbox.code_rewards(layers_say(chosen, namespaces="bubblewrap is not installed", landlock="no Landlock"))
    assert found.verdict == "warning"
    assert "namespaces: bubblewrap is not installed; landlock: no Landlock" in found.found
    assert "apt install bubblewrap" in found.advice
    assert "`require`" in found.advice


def test_a_trial_of_code_rewards_that_fails_is_a_warning() -> None:
    found = sandbox.code_rewards(FakeMachine(says=lambda argv: Ran(1, "", "boom", "boom")))
    assert (found.verdict, "boom" in found.found) == ("warning", True)
