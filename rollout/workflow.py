"""How one sample is produced, as a port a user can implement, and the single-turn workflow behind it.

Owns: `Workflow`, `SampleTools` (what the worker lends it), `Sample` (what comes back), loading `module:Class`.
Refuses: leases, sockets, policy versions; a workflow never learns of them, and waiting for them happens inside `tools`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """One finished sample: what is trained on, its verdict, and the text people read in reports.

    trajectory: of an episode of several trajectories the main one; reports take its finish reason for the sample's.
    others: further trajectories of the same sample (forks, what followed a compaction of the context, sub-agents).
    The one verdict counts for all, and together they weigh as one sample. Raises ValueError where an answer is trained
    on in two of them.
    """

    trajectory: Trajectory
    others: tuple[Trajectory, ...] = ()
    verdict: Verdict
    response_text: str

    def __post_init__(self) -> None:
        if self.others:
            check_disjoint((self.trajectory, *self.others))


class Resumed(msgspec.Struct, frozen=True, kw_only=True):
    """Where an episode goes on: its transcript up to the last checkpoint, and the workflow's state there."""

    transcript: Transcript
    state: Any


class SampleCut(Exception):
    """The answer is handed back unfinished and goes on in another lease: no error. A workflow lets it pass; one that
    swallows it changes nothing."""


class StateTooLarge(UserError):
    """The state of a checkpoint has more bytes than one may have."""


class SampleTools(Protocol):
    """What a worker lends to a workflow, for one sample."""

    @property
    def tokens(self) -> PromptTokens:
        """The tokenizer side: `tokens.prompt(row)`, `tokens.encode(text)`, `tokens.decode(tokens_R)`."""
        ...

    @property
    def models(self) -> Mapping[str, CalledModel]:
        """The models of `rollout.models` by name: `tools.models["judge"]`. Another name is a UserError. A workflow that
        calls models names them in its attribute `models`."""
        ...

    async def generate(
        self,
        prompt: np.ndarray | Transcript,
        *,
        max_new_tokens: int | None = None,
        stop_token_ids: Sequence[int] | np.ndarray | None = None,
        temperature: float | None = None,
    ) -> Answer:
        """Generate one answer of the policy. Calls may run at the same time. A UserError where `rollout.models` gives
        the policy roles: it is called by these.

        Args:
            prompt: [P] int32 tokens that the answer follows, or the transcript so far. It is not changed: add the
                answer by `transcript.sampled(answer)`.
            max_new_tokens: longest answer; None for `sampling.max_new_tokens`.
            stop_token_ids: tokens that end this answer, in place of `sampling.stop_token_ids`. The model's
                end-of-sequence ids always do, unless `sampling.ignore_eos` is set.
            temperature: 0 is greedy; None for the run's. An answer at another temperature than the run's is not
                trained on (`Answer.is_trainable`).

        Returns:
            The complete answer, with the tokens of earlier leases. Where earlier answers of the sample have filled the
            context it is empty and has ended by `context`.

        Raises:
            UserError: the first prompt does not fit the context, or a setting is out of range.
            SampleCut: the sample is handed back unfinished; let it pass.
        """
        ...

    @property
    def resumed(self) -> Resumed | None:
        """Where an earlier lease of this sample left off, by its last `checkpoint`; None: the sample begins here."""
        ...

    def checkpoint(self, transcript: Transcript, state: Any = None) -> None:
        """Make the episode durable up to here: if its worker is lost or leaves, another one goes on from this point.

        Call it after a turn, when the environment's answer is in the transcript. The next report to the controller, at
        most `rollout.progress_s` later, takes the newest checkpoint with it. A workflow that uses it must begin with
        `resumed`. It holds one transcript: what was sampled in other trajectories of the sample is lost with the
        worker.

        Args:
            transcript: everything so far, always of the same trajectory.
            state: what else the workflow needs to go on, such as the environment's state: a JSON-like value of at most
                1 MiB.

        Raises:
            StateTooLarge: a UserError; the checkpoint before is kept.
            UserError: the state cannot be encoded, the workflow is resumable already, or the transcript does not begin
                with the tokens that were checkpointed before.
        """
        ...

    async def score(self, response: str, answer: Answer | Trajectory) -> Verdict:
        """Ask the reward service.

        Args:
            response: the text that scorers see. Sampled and given text look alike in it: what an environment knows
                belongs in a `verdict` instead.
            answer: the answer, or the trajectory, that it was decoded from; scorers receive its finish reason and its
                number of sampled tokens.

        Returns:
            Exactly one verdict, whatever happens there.
        """
        ...

    def environment(self, record: Any = None) -> EnvironmentEpisode:
        """The sample's episode in `reward.environment`; use it in `async with`.

        Args:
            record: `EnvironmentEpisode.record` of a checkpoint, to go on from there; None: it begins by `reset`.
        """
        ...

    def verdict(
        self, value: float, *, components: Mapping[str, float] | None = None, reason: str = "", scorer: str = "workflow"
    ) -> Verdict:
        """Make the verdict here, without the reward service: for environments, which know how an episode ended.

        Args:
            value: the reward. A number that is not finite gives a verdict of kind `invalid`, which is no zero.
            components: named parts for reports; an evaluation counts `correct` where there is one.
            reason: a remark.
            scorer: the name under which reports show it.

        Returns:
            The verdict.
        """
        ...


@runtime_checkable
class Workflow(Protocol):
    """Produces one sample. Made once per worker, with `rollout.workflow_options` as keyword arguments; `run` is called
    many times at once. One that calls models of `rollout.models` has their names in an attribute `models`.

    is_resumable: True promises that a sample is one `generate` call whose prompt depends on the row alone, so that its
    partial answer can be reported and continued elsewhere. With False (several turns, tools) a lost sample starts
    again, or goes on from its last checkpoint (`SampleTools.checkpoint`).
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
    except Exception as error:  # as above: the user's own code
        raise UserError(f"{name} cannot be made with these options ({error})", where=OPTIONS_KEY) from error
    if not isinstance(workflow, Workflow):
        raise UserError(f"{name} needs `is_resumable` and `async run(task, tools)`", where=where)
    return workflow


def check_models(workflow: Workflow, declared: Sequence[str]) -> None:
    """Compare the models that a workflow calls (its attribute `models`) with those that are declared.

    Raises:
        UserError: one is not declared, or one is declared and not called.
    """
    name = type(workflow).__name__
    called = getattr(workflow, "models", ())
    if isinstance(called, str) or not all(isinstance(one, str) for one in called):
        what = f"the attribute `models` of {name} must be names of models, not {called!r}"
        raise UserError(what, where="rollout.workflow", remedy='such as models = ("judge",)')
    for missing in (one for one in called if one not in declared):
        what = f"{name} calls a model `{missing}` that is not declared"
        raise UserError(what, where=MODELS_KEY, remedy=f"{MODELS_KEY}: [{{name: {missing}, ...}}]")
    for unused in (one for one in declared if one not in called):
        what = f"`{unused}` is declared, and {name} does not call it"
        raise UserError(what, where=MODELS_KEY, remedy=f"remove it from {MODELS_KEY}, or name it in {name}.models")
