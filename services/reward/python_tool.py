"""The tool `python`: runs a program of the policy in the sandbox of the scorer `code`, and returns its output.

Nothing runs in this process; each process has one supervisor of sandboxes. The sandbox is in services/reward/sandbox.

Each call runs a new program; nothing is kept for the next one.
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
"""With a weaker layer a program could read files of the machine and show them to the policy."""
LIMITS = Limits(time_s=3.0, memory_bytes=512 << 20, max_output_bytes=64 << 10)
"""The time limit is below the usual `call_timeout_s`, so that the policy sees which limit was reached."""


class _SandboxFailed(OperationError):
    """The sandbox failed; the program is not at fault."""


@lru_cache(maxsize=1)
def _judges() -> Judges:
    """The supervisor of this process. Raises UserError if no sandbox is strong enough."""
    judges = Judges(WEAKEST_LAYER)
    try:
        judges.start()
    except NoSandbox as error:
        what = f"no sandbox layer as strong as `{WEAKEST_LAYER}` works on this machine: {error}"
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
    except (
        BaseException
    ):  # interrupted by the call's deadline: the pending answer must not be taken for the next call's
        judges.close()
        raise
    if "failed" in outcome:
        raise _SandboxFailed(str(outcome["failed"]))
    failed = f"[the program failed: {outcome['failure']}]" if outcome["failure"] else ""
    parts = [outcome["printed"].rstrip("\n"), _own_lines(outcome["errors"]), failed]
    return "\n".join(part for part in parts if part) or "[the program printed nothing]"


def _own_lines(errors: str) -> str:
    """The text of errors without the sandbox's lines of a traceback."""
    place = errors.find('  File "program.py"')
    return errors[max(place, 0) :].strip("\n")


def python_tool() -> Tool:
    """Make the tool. Raises UserError if no sandbox is strong enough."""
    _judges()
    return tool_of(python)
