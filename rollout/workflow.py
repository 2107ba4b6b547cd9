"""How one sample is produced, as a port a user can implement, and the single-turn workflow behind it.

Owns: `Workflow`, `SampleTools` (what the worker lends it), `Sample` (what comes back), loading `module:Class`.
Refuses: leases, sockets, policy versions; a workflow never learns of them, and waiting for them happens inside `tools`.
"""

from __future__ import annotations

import importlib
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np

from areal_like.errors import UserError
from areal_like.import_check import check_own_module
from areal_like.trajectory import FinishReason, Segment, Trajectory
from areal_like.verdict import Verdict
from areal_like.wire.messages import SampleTask
from rollout.tokens import PromptTokens


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One complete answer: all its tokens, those of earlier leases included, and why it ended.

    routed_experts: with `rollout.engine.sglang.routed_experts`, int32 [prompt + answer - 1, layers, experts per token];
    None otherwise, for an answer that came complete from another worker, and where a server died before it reported
    them.
    """

    segment: Segment
    finish_reason: FinishReason
    routed_experts: np.ndarray | None = None


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One finished sample: what is trained on, its verdict, and the text people read in reports."""

    trajectory: Trajectory
    verdict: Verdict
    response_text: str


class SampleCut(Exception):
    """The answer is handed back unfinished and goes on in another lease: no error. A workflow lets it pass; one that
    swallows it changes nothing."""


class SampleTools(Protocol):
    """What a worker lends to a workflow, for one sample."""

    @property
    def tokens(self) -> PromptTokens:
        """The tokenizer side: `tokens.prompt(row)`, `tokens.encode(text)`, `tokens.decode(tokens_R)`."""
        ...

    async def generate(self, prompt_P: np.ndarray, *, max_new_tokens: int | None = None) -> Answer:
        """Generate one answer.

        Args:
            prompt_P: [P] int32 prompt tokens.
            max_new_tokens: longest answer; None for `sampling.max_new_tokens`.

        Returns:
            The complete answer, with the tokens of earlier leases.

        Raises:
            UserError: prompt and answer do not fit the context.
            SampleCut: the sample is handed back unfinished; let it pass.
        """
        ...

    async def score(self, response: str, answer: Answer) -> Verdict:
        """Ask the reward service.

        Args:
            response: the text that scorers see.
            answer: the answer it was decoded from.

        Returns:
            Exactly one verdict, whatever happens there.
        """
        ...


@runtime_checkable
class Workflow(Protocol):
    """Produces one sample. Made once per worker, without arguments; `run` is called many times at once.

    is_resumable: True promises that a sample is one `generate` call whose prompt depends on the row alone, so that its
    partial answer can be reported and continued elsewhere. With False (several turns, tools) a lost sample starts
    again.
    """

    is_resumable: bool

    async def run(self, task: SampleTask, tools: SampleTools) -> Sample:
        """Produce one sample.

        Args:
            task: the data row and the sampling settings.
            tools: generation, scoring and the tokenizer.

        Returns:
            The sample that is trained on.
        """
        ...


class SingleTurn:
    """Prompt, answer, verdict."""

    is_resumable = True

    async def run(self, task: SampleTask, tools: SampleTools) -> Sample:
        prompt_P = tools.tokens.prompt(task.row)
        answer = await tools.generate(prompt_P)
        response = tools.tokens.decode(answer.segment.tokens_R)
        verdict = await tools.score(response, answer)
        trajectory = Trajectory.from_prompt(prompt_P, answer.segment, answer.finish_reason, answer.routed_experts)
        return Sample(trajectory=trajectory, verdict=verdict, response_text=response)


def load_workflow(name: str) -> Workflow:
    """Create the workflow that the configuration names.

    Args:
        name: `single_turn`, or the user's `module:Class`.

    Returns:
        An instance, made without arguments.

    Raises:
        UserError: there is no such module or class, or it is not a workflow.

    Example:
        >>> load_workflow("single_turn").is_resumable
        True
    """
    where = "rollout.workflow"
    if name == "single_turn":
        return SingleTurn()
    module_name, colon, class_name = name.partition(":")
    if not (colon and module_name and class_name):
        raise UserError(f"{name!r} is not a workflow", where=where, remedy="write single_turn, or module:Class")
    check_own_module(module_name, where)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything while it is imported
        raise UserError(
            f"module {module_name} cannot be imported ({type(error).__name__}: {error})", where=where
        ) from error
    made = getattr(module, class_name, None)
    if made is None:
        raise UserError(f"module {module_name} has no {class_name}", where=where)
    try:
        workflow = made()
    except Exception as error:  # as above: the user's own code
        raise UserError(f"{name} cannot be made without arguments ({error})", where=where) from error
    if not isinstance(workflow, Workflow):
        raise UserError(f"{name} needs `is_resumable` and `async run(task, tools)`", where=where)
    return workflow
