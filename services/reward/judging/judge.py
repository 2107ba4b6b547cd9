"""One program judged: the trusted process in which its tests run. Forked for one program, then gone.

Owns: this process's own bounds, choosing between the kinds of tests, what its end means. Refuses: waiting for itself: a
judge that hangs over what a program gave it is ended by the supervisor, and the program has failed.
"""

from __future__ import annotations

import contextlib
import resource
from typing import Any

from services.reward.judging import assertions, streams
from services.reward.judging.deadline import Deadline
from services.reward.judging.problem import Asserts, Findings, Task, Unjudgeable
from services.reward.sandbox.cell import SandboxFailed
from services.reward.sandbox.layers import Sandbox
from services.reward.sandbox.limits import Limits

OWN_MEMORY_BYTES = 2 << 30
"""Address space of the judge itself: what a program answers is bounded, what a test computes from it is not."""


def judge(task: Task, sandbox: Sandbox) -> dict[str, Any]:
    """`Findings` as a dict, or {"unjudgeable": why} or {"failed": why} where no program is to blame."""
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (OWN_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    try:
        return _findings(task, sandbox).as_dict()
    except Unjudgeable as error:
        return {"unjudgeable": str(error)}
    except SandboxFailed as error:
        return {"failed": str(error)}


def _findings(task: Task, sandbox: Sandbox) -> Findings:
    source = task.program.encode("utf-8", "surrogatepass")
    limits, deadline = Limits.of(task.limits), Deadline(task.total_limit_s)
    problem = task.problem
    if isinstance(problem, Asserts):
        return assertions.judge_asserts(
            problem,
            assertions.Conditions(sandbox, source, limits, deadline, task.partial_credit, task.float_tolerance),
        )
    return streams.judge_streams(
        problem,
        streams.Conditions(sandbox, source, limits, deadline, task.partial_credit, task.compare, task.float_tolerance),
    )
