"""Checks before a run starts whether the user's scorers and workflow can be imported and used as configured.

The code is imported in a short-lived process with a deadline, never in this one; processes that it leaves are killed.
The checks of the code are in the `checker` module: services/reward/check_functions.py, rollout/check_workflow.py.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_like.guard import guarded
from areal_like.guarded_process import end_guarded
from areal_like.process import describe_status
from areal_like.slow import print_slow
from controller.config.problems import Problem
from controller.launch.environments import child_environment

LAST_CHARS = 200
SLOW_S = 5.0
"""Wait after which a message explains the delay."""


def problems_of(
    checker: str,
    functions: Mapping[str, tuple[str, Mapping[str, Any]]],
    timeout_s: float,
    tries: Sequence[tuple[Mapping[str, Any], str]] = (),
    try_limit_s: float = 0.0,
) -> Iterator[Problem]:
    """`functions`: key of the configuration -> (module:name, options), imported and called by the module `checker`.

    tries: rows with answers for the calls, if `checker` calls them. try_limit_s: limit for all calls of one function.
    """
    if not functions:
        return
    keys = list(functions)
    with tempfile.TemporaryDirectory(prefix="areal_like-") as folder:
        source, target, said = (Path(folder) / name for name in ("in.json", "out.json", "said.txt"))
        source.write_text(json.dumps([{"name": name, "options": options} for name, options in functions.values()]))
        names = ", ".join(name for name, _ in functions.values())
        arguments = [checker, str(source), str(target)]
        if tries:
            arguments.append(str(Path(folder) / "tries.json"))
            Path(arguments[-1]).write_text(json.dumps({"answers": list(tries), "limit_s": try_limit_s}, default=str))
        status = _run(arguments, said, timeout_s, names)
        if target.is_file():
            for fault in json.loads(target.read_text()):
                key, (name, _) = keys[fault["index"]], functions[keys[fault["index"]]]
                key = fault["where"] if fault["where"].startswith(key) else key  # the code may name a nearer one
                yield Problem((key,), f"`{name}`: {fault['what']}", fault["remedy"])
            return
        last = (said.read_text(errors="replace").strip().splitlines() or [""])[-1][:LAST_CHARS]
    if status is None:
        what = f"importing {names} takes more than {timeout_s:g} s (launch.startup_timeout_s)"
        yield Problem(
            (keys[0],), what, "move slow code out of the top level of the module, so that it is not executed on import"
        )
    else:
        ended = f"{describe_status(status)}" + (f": {last}" if last else "")
        yield Problem((keys[0],), f"importing {names} ended the process with {ended}", "correct the module")


def _run(arguments: list[str], said: Path, timeout_s: float, names: str) -> int | None:
    """Run the process; return its exit status, or None after the deadline. No process that the module started outlives
    it, or this process.
    """
    with said.open("wb") as output:
        child = subprocess.Popen(
            guarded([sys.executable, "-P", "-m", *arguments]),
            env=child_environment(1, user_path=Path.cwd()),
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(min(SLOW_S, timeout_s))
        print_slow(f"importing {names}", SLOW_S, timeout_s)
        return child.wait(max(timeout_s - SLOW_S, 0.0))
    except subprocess.TimeoutExpired:
        return None
    finally:
        end_guarded(child)
