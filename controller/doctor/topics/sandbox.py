"""Checks of the sandbox layers that can confine a program written by a model. Each is tested in a separate process.

The quickstart requires none of them.
"""

from __future__ import annotations

import json
import sys

from controller.doctor.finding import NOT_HERE, Check, Finding, absent, ok, warning
from controller.doctor.machine import Machine

TOPIC = "Sandbox"
BWRAP = ("--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--ro-bind", "/", "/")
BWRAP_PRIVATE = ("--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp")
BWRAP_TRIAL = ("--", "/bin/sh", "-c", "echo >/usr/.areal_like-doctor 2>/dev/null && echo writable; echo inside")
LAYERS_MODULE = "services.reward.sandbox.layers"
STRONG_LAYERS = ("namespaces", "landlock")
"""Layers that the default of option `require` accepts, strongest first."""
CLONE_SETTING = "/proc/sys/kernel/unprivileged_userns_clone"
APPARMOR_SETTING = "/proc/sys/kernel/apparmor_restrict_unprivileged_userns"
MAX_SETTING = "/proc/sys/user/max_user_namespaces"


def namespaces(machine: Machine) -> Finding:
    """Check Linux namespaces of processes, network, files and ids."""
    if not machine.is_linux:
        return NOT_HERE
    answer = machine.probe("namespaces", deadline_s=10)
    if not answer.data:
        return warning(
            f"the namespaces of the kernel cannot be tested: {answer.fault}",
            "report this error with the output of areal-like doctor --json",
        )
    faults = answer.data["faults"]
    refused = {name: fault for name, fault in faults.items() if fault}
    if not refused:
        return ok(f"{', '.join(faults)}{' (as root)' if answer.data['uid'] == 0 else ''}", **answer.data)
    words = ", ".join(f"{name} ({fault})" for name, fault in refused.items())
    return warning(
        f"refused: {words}",
        f"{_who_refuses(machine, words)}; without namespaces, the scorer `code` can only use weaker layers "
        "of the sandbox",
        **answer.data,
    )


def _who_refuses(machine: Machine, fault: str) -> str:
    """The setting that forbids it, with the command that changes it."""
    if machine.text(CLONE_SETTING) == "0":
        return "sysctl kernel.unprivileged_userns_clone=1"
    if machine.text(APPARMOR_SETTING) == "1":
        return "AppArmor forbids user namespaces: sysctl kernel.apparmor_restrict_unprivileged_userns=0"
    if machine.text(MAX_SETTING) == "0":
        return "sysctl user.max_user_namespaces=15000"
    if "No space left" in fault or "ENOSPC" in fault:
        return "the number or the nesting depth of namespaces is limited: sysctl user.max_user_namespaces=15000"
    return (
        "the container forbids namespaces: docker run --security-opt seccomp=unconfined (or use a profile that allows "
        "unshare)"
    )


def bubblewrap(machine: Machine) -> Finding:
    """Check that bubblewrap is installed and works."""
    if not machine.is_linux:
        return NOT_HERE
    path = machine.which("bwrap")
    if not path:
        return absent("not installed", "for code rewards: apt install bubblewrap")
    words = machine.run([path, "--version"], deadline_s=5).out.split()
    version = words[-1] if words else "of unknown version"
    named = f"bubblewrap {version}"
    ran = machine.run([path, *BWRAP, *BWRAP_PRIVATE, *BWRAP_TRIAL], deadline_s=10)
    if "inside" in ran.out and "writable" not in ran.out:
        return ok(f"{named} works with all namespaces and a read-only root", version=version, path=path)
    bare = machine.run([path, *BWRAP, *BWRAP_TRIAL], deadline_s=10)
    if "inside" in bare.out and "writable" not in bare.out:
        return warning(
            f"{named} works only without private /proc, /dev and /tmp mounts ({ran.fault or ran.err.strip()})",
            "the container hides /proc; start it with docker run --security-opt systempaths=unconfined",
            version=version, path=path,
        )  # fmt: skip
    if "writable" in ran.out + bare.out:
        return warning(
            f"{named} does not keep the root folder read-only", "update bubblewrap", version=version, path=path
        )
    fault = bare.fault or bare.err.strip() or "no output"
    return warning(
        f"{named} does not work on this machine: {fault}", _who_refuses(machine, fault), version=version, path=path
    )


def seccomp(machine: Machine) -> Finding:
    """Check seccomp filters."""
    if not machine.is_linux:
        return NOT_HERE
    answer = machine.probe("seccomp_filter", deadline_s=10)
    fault = answer.data.get("fault", answer.fault) if answer.data else answer.fault
    if fault:
        return warning(
            f"a filter cannot be installed: {fault}",
            "the kernel or the container forbids seccomp filters; other layers of the sandbox remain available",
        )
    return ok("a filter can be installed and is enforced")


def resource_limits(machine: Machine) -> Finding:
    """Check limits on memory, time, files and processes of one program."""
    answer = machine.probe("resource_limits", deadline_s=20)
    if not answer.data:
        return warning(
            f"the resource limits cannot be tested: {answer.fault}",
            "report this error with the output of areal-like doctor --json",
        )
    limits = answer.data["limits"]
    bound = [name for name, state in limits.items() if state == "bound"]
    loose = [name for name, state in limits.items() if state != "bound"]
    is_root = answer.data["uid"] == 0
    if loose == ["processes"] and is_root:
        return ok(f"{', '.join(bound)} are enforced (the number of processes is not, for root)", **answer.data)
    if loose:
        return warning(
            f"these limits are not enforced: {', '.join(loose)}",
            "this system does not enforce these limits; use Linux, or a different layer of the sandbox", **answer.data,
        )  # fmt: skip
    return ok(f"{', '.join(bound)} are enforced", **answer.data)


def code_rewards(machine: Machine) -> Finding:
    """Check which layer scorer `code` would use, with the same tests as the scorer."""
    ran = machine.run([sys.executable, "-P", "-m", LAYERS_MODULE, ""], deadline_s=90)
    try:
        layers = json.loads(ran.out)
        chosen, words, parts = layers["chosen"], layers["words"], layers["parts"]
    except (ValueError, KeyError, TypeError):
        return warning(
            f"the scorer `code` cannot be tested: {ran.fault or ran.err.strip()[-200:]}",
            "report this error with the output of areal-like doctor --json",
        )
    if chosen in STRONG_LAYERS:
        return ok(f"programs run in layer {chosen}: {words}", chosen=chosen, parts=parts)
    faults = "; ".join(f"{name}: {parts[name]}" for name in STRONG_LAYERS if name in parts)
    return warning(
        f"the scorer `code` cannot start: {faults or words}",
        "apt install bubblewrap, or use a kernel with Landlock (Linux 5.13 or newer), or set the option `require` of "
        "the scorer to accept a weaker layer, in which programs can read your files",
        chosen=chosen, parts=parts,
    )  # fmt: skip


CHECKS = (
    Check(TOPIC, "namespaces", namespaces, deadline_s=15),
    Check(TOPIC, "bubblewrap", bubblewrap, deadline_s=30),
    Check(TOPIC, "seccomp", seccomp, deadline_s=15),
    Check(TOPIC, "resource limits", resource_limits, deadline_s=30),
    Check(TOPIC, "code rewards", code_rewards, deadline_s=100),
)
