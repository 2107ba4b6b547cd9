"""The tool `python`: runs a program of the policy's in the sandbox of the scorer `code`, and shows what it prints.

Owns: the tool's words and limits, one supervisor of sandboxes for each process. Refuses: the sandbox itself
(services/reward/sandbox) and running anything in this process.

Each call is a fresh program: nothing is left of it for the next one.
"""

from __future__ import annotations

from functools import lru_cache

from areal_like.errors import OperationError, UserError
from areal_like.tools import Tool, tool_of
from services.reward.judging.client import Judges, NoSandbox
from services.reward.judging.problem import Printout, Task
from services.reward.sandbox.demands import SANDBOX_REMEDY
from services.reward.sandbox.limits import Limits

WEAKEST_LAYER = "landlock"
"""Weaker ones would let a program read files of the machine, and say them to the policy."""
LIMITS = Limits(time_s=3.0, memory_bytes=512 << 20, max_output_bytes=64 << 10)
"""The time is below the usual `call_timeout_s`, so that the policy is shown which limit it was."""


class _SandboxFailed(OperationError):
    """No program is to blame."""


@lru_cache(maxsize=1)
def _judges() -> Judges:
    """The supervisor of this process. Raises UserError where no sandbox is strong enough."""
    judges = Judges(WEAKEST_LAYER)
    try:
        judges.start()
    except NoSandbox as error:
        what = f"no sandbox as strong as `{WEAKEST_LAYER}` works here: {error}"
        raise UserError(what, where="reward.environment.options.tools python", remedy=SANDBOX_REMEDY) from None
    return judges


def python(code: str) -> str:
    """Run a Python program and return what it prints. Nothing is kept between calls.

    Args:
        code: the whole program; print what you want to see.
    """
    task = Task(program=code, problem=Printout(), limits=LIMITS.as_dict(), total_limit_s=LIMITS.time_s)
    judges = _judges()
    try:
        outcome = judges.judge(task)
    except BaseException:  # it was interrupted by the call's deadline: its answer must not be taken for the next one's
        judges.close()
        raise
    if "failed" in outcome:
        raise _SandboxFailed(str(outcome["failed"]))
    failed = f"[the program failed: {outcome['failure']}]" if outcome["failure"] else ""
    parts = [outcome["printed"].rstrip("\n"), _own_lines(outcome["errors"]), failed]
    return "\n".join(part for part in parts if part) or "[the program printed nothing]"


def _own_lines(errors: str) -> str:
    """Without the lines of a traceback that are of the sandbox."""
    place = errors.find('  File "program.py"')
    return errors[max(place, 0) :].strip("\n")


def python_tool() -> Tool:
    """Make the tool. Raises UserError where no sandbox is strong enough."""
    _judges()
    return tool_of(python)
