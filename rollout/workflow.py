"""The interface of workflows, which produce one sample, and the single-turn workflow.

It defines `Workflow`, `SampleTools` (the tools that the worker provides), `Sample` (the result), and the loading of
`module:Class`. A workflow does not see leases, sockets or policy versions; `tools` waits for versions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np

from areal_like.errors import UserError
from areal_like.import_path import check_arguments, import_object, is_import_path
from areal_like.trajectory import Trajectory, check_disjoint
from areal_like.verdict import Verdict
from areal_like.wire.messages import SampleTask
from rollout.config import BUILT_IN_WORKFLOWS
from rollout.environment_client import EnvironmentEpisode
from rollout.model_settings import MODELS_KEY
from rollout.models.port import CalledModel
from rollout.tokens import PromptTokens
from rollout.transcript import Answer, Transcript

OPTIONS_KEY = "rollout.workflow_options"


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One finished sample: the trajectories to train on, the verdict, and the text for reports.

    trajectory: the main trajectory; its finish reason is the sample's in reports. others: further trajectories of the
    same sample (forks, continuations after a compaction of the context, sub-agents). The verdict applies to all, and
    together they have the weight of one sample. Raises ValueError if an answer is trained on in two of them.
    """

    trajectory: Trajectory
    others: tuple[Trajectory, ...] = ()
    verdict: Verdict
    response_text: str

    def __post_init__(self) -> None:
        if self.others:
            check_disjoint((self.trajectory, *self.others))


class Resumed(msgspec.Struct, frozen=True, kw_only=True):
    """State from which an episode continues: its transcript up to the last checkpoint, and the workflow's state
    there.
    """

    transcript: Transcript
    state: Any


class SampleCut(Exception):
    """The answer is returned unfinished and continues in another lease. This is not an error, and a workflow should not
    catch it; catching it has no effect."""


class StateTooLarge(UserError):
    """The state of a checkpoint has more bytes than one may have."""


class SampleTools(Protocol):
    """The tools that a worker provides to a workflow, for one sample."""

    @property
    def tokens(self) -> PromptTokens:
        """Tokenisation: `tokens.prompt(row)`, `tokens.encode(text)`, `tokens.decode(tokens_R)`."""
        ...

    @property
    def models(self) -> Mapping[str, CalledModel]:
        """The models of `rollout.models` by name: `tools.models["judge"]`. Raises UserError for another name. A
        workflow that calls models lists their names in its attribute `models`."""
        ...

    async def generate(
        self,
        prompt: np.ndarray | Transcript,
        *,
        max_new_tokens: int | None = None,
        stop_token_ids: Sequence[int] | np.ndarray | None = None,
        temperature: float | None = None,
    ) -> Answer:
        """Generate one answer of the policy. Calls may run at the same time. Raises UserError if `rollout.models`
        declares roles of the policy, which must be called instead.

        Args:
            prompt: [P] int32 tokens that the answer follows, or the transcript so far. It is not changed: add the
                answer with `transcript.sampled(answer)`.
            max_new_tokens: longest answer; None for `sampling.max_new_tokens`.
            stop_token_ids: tokens that end this answer, in place of `sampling.stop_token_ids`. The model's
                end-of-sequence ids always do, unless `sampling.ignore_eos` is set.
            temperature: 0 is greedy; None for the run's. An answer at another temperature than the run's is not
                trained on (`Answer.is_trainable`).

        Returns:
            The complete answer, with the tokens of earlier leases. If earlier answers of the sample have filled the
                context, it is empty and has ended by `context`.

        Raises:
            UserError: the first prompt does not fit the context, or a setting is out of range.
            SampleCut: the sample is returned unfinished; do not catch it.
        """
        ...

    @property
    def resumed(self) -> Resumed | None:
        """State at the last `checkpoint` of an earlier lease of this sample; None: the sample begins here."""
        ...

    def checkpoint(self, transcript: Transcript, state: Any = None) -> None:
        """Make the episode durable up to this point: if its worker is lost or shuts down, another one continues from
        here.

        Call it after a turn, when the environment's answer is in the transcript. The next report to the controller, at
        most `rollout.progress_s` later, contains the newest checkpoint. A workflow that uses it must begin with
        `resumed`. It contains one transcript: tokens sampled in other trajectories of the sample are lost with the
        worker.

        Args:
            transcript: everything so far, always of the same trajectory.
            state: further state that the workflow needs to continue, such as the environment's: a JSON-like value of at
                most 1 MiB.

        Raises:
            StateTooLarge: a UserError; the previous checkpoint is kept.
            UserError: the state cannot be encoded, the workflow is resumable, or the transcript does not begin
                with the tokens that were checkpointed before.
        """
        ...

    async def score(self, response: str, answer: Answer | Trajectory) -> Verdict:
        """Request a verdict of the reward service.

        Args:
            response: the text that scorers see. Sampled and given text cannot be distinguished in it: facts that an
                environment knows belong in a `verdict` instead.
            answer: the answer, or the trajectory, that it was decoded from; scorers receive its finish reason and its
                number of sampled tokens.

        Returns:
            Exactly one verdict, even if the service fails.
        """
        ...

    def environment(self, record: Any = None) -> EnvironmentEpisode:
        """The sample's episode in `reward.environment`; use it in `async with`.

        Args:
            record: `EnvironmentEpisode.record` of a checkpoint, to continue from there; None: it begins with `reset`.
        """
        ...

    def verdict(
        self, value: float, *, components: Mapping[str, float] | None = None, reason: str = "", scorer: str = "workflow"
    ) -> Verdict:
        """Create a verdict without the reward service, for environments that know how an episode ended.

        Args:
            value: the reward. A number that is not finite gives a verdict of kind `invalid`, which is not a reward of
                zero.
            components: named parts for reports; an evaluation counts `correct` if it exists. reason: a note. scorer:
                its name in reports.

        Returns:
            The verdict.
        """
        ...


@runtime_checkable
class Workflow(Protocol):
    """Produces samples. It is created once per worker, with `rollout.workflow_options` as keyword arguments; `run` is
    called concurrently. A workflow that calls models of `rollout.models` has their names in an attribute `models`.

    is_resumable: True promises that a sample is one `generate` call whose prompt depends on the row alone, so that its
    partial answer can be reported and continued elsewhere. With False (several turns, tools) a lost sample starts
    again, or continues from its last checkpoint (`SampleTools.checkpoint`).
    """

    is_resumable: bool

    async def run(self, task: SampleTask, tools: SampleTools) -> Sample:
        """Produce one sample.

        Args:
            task: the data row and the sampling settings.
            tools: generation, scoring and the tokenizer.

        Returns:
            The finished sample.
        """
        ...


class PolicyAccess(Protocol):
    """What a worker provides to a workflow that answers clients outside of samples."""

    worker_index: int
    """Number of the worker, from 0."""
    num_slots: int
    """Answers that the engine generates at once."""

    @property
    def tokens(self) -> PromptTokens:
        """Tokenisation."""
        ...

    async def generate(self, prompt: Transcript, *, max_new_tokens: int | None = None) -> Answer:
        """Generate an answer that belongs to no sample, with the newest loaded version; see `SampleTools.generate`."""
        ...

    def report(self, text: str) -> None:
        """Show the user of the run a warning, and record it in the ledger (`incidents`)."""
        ...


@runtime_checkable
class ServingWorkflow(Workflow, Protocol):
    """A workflow whose samples are conversations of clients outside the run. While one waits, its phase is `traffic`,
    and the run is not stalled."""

    def serving(self, policy: PolicyAccess) -> AbstractAsyncContextManager[None]:
        """Answer clients until the block ends. It is entered once, before the first `run`."""
        ...

    def traffic_counters(self) -> Mapping[str, float]:
        """Counters that never decrease, for the worker's heartbeat."""
        ...


class SingleTurn:
    """Generates one answer to a prompt and scores it."""

    is_resumable = True

    async def run(self, task: SampleTask, tools: SampleTools) -> Sample:
        prompt_P = tools.tokens.prompt(task.row)
        answer = await tools.generate(prompt_P)
        response = tools.tokens.decode(answer.segment.tokens_R)
        verdict = await tools.score(response, answer)
        trajectory = Trajectory.from_prompt(prompt_P, answer.segment, answer.finish_reason, answer.routed_experts)
        return Sample(trajectory=trajectory, verdict=verdict, response_text=response)


def load_workflow(name: str, options: Mapping[str, Any] | None = None) -> Workflow:
    """Create the workflow that the configuration names.

    Args:
        name: a built-in workflow, or the user's `module:Class`.
        options: keyword arguments of its constructor.

    Returns:
        The workflow.

    Raises:
        UserError: there is no such module or class, it does not take these options, or it is not a workflow.

    Example:
        >>> load_workflow("single_turn").is_resumable
        True
    """
    where = "rollout.workflow"
    options = dict(options or {})
    path = BUILT_IN_WORKFLOWS.get(name, name)
    if not is_import_path(path):
        known = f"write {', '.join(BUILT_IN_WORKFLOWS)}, or module:Class"
        raise UserError(f"{name!r} is not a workflow", where=where, remedy=known)
    kind = import_object(path, where)
    check_arguments(name, kind, options, OPTIONS_KEY)
    try:
        workflow = kind(**options)
    except UserError:
        raise
    except Exception as error:  # the user's own code may raise anything
        raise UserError(f"{name} cannot be created with these options ({error})", where=OPTIONS_KEY) from error
    if not isinstance(workflow, Workflow):
        raise UserError(f"{name} must define `is_resumable` and `async run(task, tools)`", where=where)
    return workflow


def check_models(workflow: Workflow, declared: Sequence[str], teacher: str = "") -> None:
    """Compare the models that a workflow calls (its attribute `models`) with those that are declared.

    teacher: the one that `trainer.teacher.model` names, which need not be called.

    Raises:
        UserError: one is not declared, or one is declared and not called.
    """
    name = type(workflow).__name__
    called = getattr(workflow, "models", ())
    if isinstance(called, str) or not all(isinstance(one, str) for one in called):
        what = f"the attribute `models` of {name} must be a tuple of model names, not {called!r}"
        raise UserError(what, where="rollout.workflow", remedy='set the attribute, for example, to models = ("judge",)')
    for missing in (one for one in called if one not in declared):
        what = f"{name} calls a model `{missing}`, which is not declared"
        raise UserError(what, where=MODELS_KEY, remedy=f"declare the model: {MODELS_KEY}: [{{name: {missing}, ...}}]")
    for unused in (one for one in declared if one not in called and one != teacher):
        what = f"`{unused}` is declared, but {name} does not call it"
        raise UserError(
            what, where=MODELS_KEY, remedy=f"remove the model from {MODELS_KEY}, or add its name to {name}.models"
        )
