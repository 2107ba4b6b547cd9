"""The run of one lease in a worker: wait for the version, generate, score, and report how it ended.

`SampleRun` provides the tools of the workflow and the state of the lease. Sockets and the lease book are in worker.py;
how a sample is made is decided by the workflow.

Positions: `base` tokens of the answer came with the lease; new tokens follow; the first `reported` new ones have been
reported to the controller. A report therefore starts at answer position base + reported.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from areal_like.errors import EngineError, UserError
from areal_like.red_team import RED_TEAM, RED_TEAM_COLUMN
from areal_like.safety import Looked
from areal_like.secret_values import without_secrets
from areal_like.trace import move_name
from areal_like.trajectory import Segment, Trajectory
from areal_like.verdict import MAX_REASON_CHARS, REFUSED, Verdict
from areal_like.wire.messages import ReturnReason, SampleTask, Sampling
from rollout.activity import Phase
from rollout.answering import STOPS, PolicyCall, answer_of, call_sampling, end_of, prompt_tokens, turn_seed
from rollout.engine.port import GenerationOutcome, GenerationRequest
from rollout.environment_client import EnvironmentEpisode
from rollout.model_settings import MODELS_KEY, CalledModelSettings
from rollout.models.calls import CalledModels, session_key
from rollout.models.teacher import with_teacher_logprobs
from rollout.models.trained import check_trained
from rollout.sample_context import SampleContext, arrow_of
from rollout.tokens import PromptTokens, stop_strings
from rollout.transcript import Answer, EndedBy, Transcript
from rollout.turns import Turns
from rollout.workflow import Resumed, Sample, SampleCut

SHORTEST_S = 2e-6
"""Shortest slice that an arrow can start from; the timeline has a resolution of microseconds."""


def printable(text: str) -> str:
    """`text` without lone surrogates, which cannot be encoded. Raises TypeError for anything other than text."""
    if not isinstance(text, str):
        raise TypeError(f"a response must be text, not {type(text).__name__}")
    return text.encode("utf-8", "replace").decode("utf-8")


def refusal(looked: Looked) -> Verdict:
    """The verdict of an answer that a stage refuses."""
    return Verdict(kind=REFUSED, reason=f"the answer was refused by the safety stage {looked.refused_by}")


def stage_crash(error: Exception) -> Verdict:
    """The verdict of an answer for which a stage of the user raises."""
    reason = printable(without_secrets(f"a safety stage raised {type(error).__name__}: {error}"))
    return Verdict(kind="crashed", reason=reason[:MAX_REASON_CHARS])


class SampleRun:
    """The tools of one sample, bound to its lease. Implements `workflow.SampleTools`."""

    def __init__(
        self, task: SampleTask, bench: SampleContext, *, is_resumable: bool, lane: str, own_phase: Phase = "start",
        is_traced: bool = True,
    ) -> None:  # fmt: skip
        self.task, self.is_resumable, self.lane = task, is_resumable, lane
        self._own_phase = own_phase
        self._bench = bench
        self._phase: Phase = "end"
        self._is_over = False
        self.phase = own_phase
        self.turns = Turns(task, is_resumable=is_resumable)
        self.base = len(task.prefix) if is_resumable else self.turns.num_before
        self.reported = 0
        """Number of new tokens that were reported to the controller."""
        self.new_tokens = Segment.empty()
        """New tokens of ended generations; those of running ones are read from the engine (`all_new`)."""
        self.answer: Answer | None = None
        """The last complete answer."""
        self.prompt_P: np.ndarray | None = None
        self.cut_reason: ReturnReason | None = None
        """Why the lease is returned, once it is."""
        self.cut_detail = ""
        """Why it can never run, if cut_reason is "rejected" or "refused", or what failed, if it is "cancelled"."""
        self.engine_error: EngineError | UserError | None = None
        self.request_id = 0
        self.timings = {"queue_s": 0.0, "generate_s": 0.0, "paused_s": 0.0, "score_s": 0.0, "version_wait_s": 0.0}
        self._stops = stop_strings(bench.tokens, task.sampling)
        self._num_turns = self.turns.num_turns
        self._last_version = self.turns.last_version
        """Highest version of all turns so far: versions never decrease along a trajectory (`stamped-versions`)."""
        self._calls: list[PolicyCall] = []
        """Running calls; a resumable workflow has at most one."""
        self._sampled: dict[int, Segment] = {}
        """If models are declared: answers of the policy in trained roles, by number."""
        self.models = CalledModels(self, bench.models, bench.request_ids, bench.version_deadline_s)
        self._asked_s = 0.0
        """Time of the last call of its environment."""
        self._arrow = arrow_of(task, bench.tracer) if is_traced else ""
        self._is_arriving = bool(task.moved_from and self._arrow and len(task.prefix))
        """The arrow from its previous worker ends at its first slice of generation."""
        self._arrow_s: float | None = None
        """A time within the slice where the sample's arrow starts: its last generation, else its scoring."""

    def cut(self, reason: ReturnReason, detail: str = "") -> None:
        """Have the lease returned for this reason; the first reason counts."""
        if self.cut_reason is None:
            self.cut_reason, self.cut_detail = reason, detail

    @property
    def phase(self) -> Phase:
        """The current phase of the sample; `end` once it has ended."""
        return self._phase

    @phase.setter
    def phase(self, phase: Phase) -> None:
        if self._is_over:  # a call that the workflow did not wait for
            return
        self._bench.doing.moved(self._phase, phase)
        self._phase = phase

    @property
    def is_red_team(self) -> bool:
        """Whether its row is one of data.red_team, which no scorer sees."""
        return self.task.purpose == "eval" and bool(self.task.row.get(RED_TEAM_COLUMN))

    @property
    def is_movable(self) -> bool:
        """Whether another worker can continue it without loss: its tokens can be moved, or it has none yet."""
        return not self.is_ending and (self.is_resumable or not self.request_id)

    @property
    def is_ending(self) -> bool:
        """Whether its tokens are complete, and it only waits for its verdict or for a teacher."""
        return self.phase in ("score", "teacher")

    # ------------------------------------------------------------ for the workflow

    @property
    def tokens(self) -> PromptTokens:
        """Tokenisation of prompts and answers."""
        return self._bench.tokens.for_row(self.task.row)

    async def generate(
        self,
        prompt: np.ndarray | Transcript,
        *,
        max_new_tokens: int | None = None,
        stop_token_ids: Sequence[int] | np.ndarray | None = None,
        temperature: float | None = None,
    ) -> Answer:
        """See `SampleTools.generate`. Raises EngineError if the engine failed; the worker then exits."""
        if self._bench.models.has_roles:
            what = "the policy has roles, so the workflow must call one of these roles"
            raise UserError(what, where=MODELS_KEY, remedy='use tools.models["ROLE"]')
        asked = {"max_new_tokens": max_new_tokens, "stop_token_ids": stop_token_ids, "temperature": temperature}
        return await self.generate_as(None, prompt, **asked)

    async def generate_as(
        self, role: CalledModelSettings | None, prompt: np.ndarray | Transcript, **asked: Any
    ) -> Answer:
        """Generate an answer of the policy, in a role if it has roles. `asked`: as in `generate`."""
        prompt_P = prompt_tokens(prompt)
        turn, self._num_turns = self._num_turns, self._num_turns + 1
        if turn and self.is_resumable:
            raise UserError(
                "a resumable workflow can generate only once", remedy="set is_resumable = False on the workflow"
            )
        sampling = call_sampling(self.task.sampling, self._bench.tokens.stop_ids, **asked)
        call = PolicyCall()
        self._calls.append(call)
        try:
            segment, ended_by, experts = await self._answer(call, prompt_P, sampling, turn, role)
        finally:
            self._calls.remove(call)
        is_trained = role is None or role.is_trained
        if is_trained and self._bench.models.declared:
            self._sampled[turn] = segment
        self.answer = answer_of(
            segment, ended_by, number=turn, experts=experts, model=role.name if role is not None else "",
            is_trainable=is_trained and sampling.temperature == self.task.sampling.temperature,
        )  # fmt: skip
        return self.answer

    async def _answer(
        self, call: PolicyCall, prompt_P: np.ndarray, sampling: Sampling, turn: int, role: CalledModelSettings | None
    ) -> tuple[Segment, EndedBy, np.ndarray | None]:
        """Generate an answer; returns all its tokens, the reason for the end, and its experts."""
        prefix = self.task.prefix if self.is_resumable else Segment.empty()
        if self._last_version >= 0 and len(prompt_P) >= self._bench.engine.capabilities.max_context:
            return Segment.empty(), "context", None
        self.prompt_P, experts = prompt_P, None
        while True:
            answer = prefix.joined(call.new_tokens)
            ended_by = self._end_of(answer, sampling, len(prompt_P))
            if ended_by is not None:
                break
            await self._wait_version(max(self.task.min_version, answer.last_version, self._last_version))
            outcome = await self._generate_once(call, prompt_P, answer, sampling, turn, role)
            if outcome is None:  # parked: its tokens are in new_tokens, and it waits for its version
                continue
            self._take(call, outcome)
            if outcome.end_reason == "segment" or outcome.end_reason == "cancelled":
                self.cut_reason = outcome.end_reason
                raise SampleCut(outcome.end_reason)
            answer, experts = prefix.joined(call.new_tokens), outcome.routed_experts
            ended_by = self._end_of(answer, sampling, len(prompt_P))
            if ended_by is None or (outcome.end_reason == "stop") != (
                ended_by in STOPS
            ):  # the engine's reason takes precedence
                ended_by = "stop_token" if outcome.end_reason == "stop" else "length"
            break
        return answer, ended_by, experts

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """See `models.calls.Caller`."""
        started_s = self._bench.clock.monotonic_s()
        try:
            yield
        finally:
            self.timings["models_s"] = self.timings.get("models_s", 0.0) + self._bench.clock.monotonic_s() - started_s

    @property
    def resumed(self) -> Resumed | None:
        """See `SampleTools.resumed`."""
        return self.turns.resumed(self._bench.tokens.encode)

    def checkpoint(self, transcript: Transcript, state: Any = None) -> None:
        """See `SampleTools.checkpoint`."""
        self.turns.take(transcript, state, self._num_turns)

    async def score(self, response: str, answer: Answer | Trajectory) -> Verdict:
        """See `SampleTools.score`. Invalid Unicode is sent with replacement characters."""
        response = printable(response)
        if self.is_red_team:
            return self.verdict(0.0, scorer=RED_TEAM)  # the final one is made of the whole answer (pool.py)
        if self._bench.safety is not None:
            try:
                looked = self._bench.safety.look(response, "answers")
            except Exception as error:  # a stage of the user may raise anything
                return stage_crash(error)
            if looked.refused_by:
                return refusal(looked)
            response = looked.text
        num_tokens = len(answer.segment) if isinstance(answer, Answer) else answer.num_sampled
        self.phase = "score"
        started_s, trace_s = self._bench.clock.monotonic_s(), self._bench.tracer.now_s()
        verdict = await self._bench.rewards.score(self.task, response, answer.finish_reason, num_tokens)
        waited_s = self._bench.clock.monotonic_s() - started_s
        self.timings["score_s"] += waited_s
        self._bench.score_wait_s += waited_s
        self._trace("score", trace_s, verdict=verdict.kind)
        if self._arrow_s is None:
            self._arrow_s = trace_s + SHORTEST_S / 2
        return verdict

    def environment(self, record: Any = None) -> EnvironmentEpisode:
        """See `SampleTools.environment`."""
        return self._bench.rewards.environments.episode(self.task, record, self._in_environment)

    def _in_environment(self, is_calling: bool) -> None:
        now_s = self._bench.clock.monotonic_s()
        if is_calling:
            self._asked_s = now_s
        else:
            self.timings["score_s"] += now_s - self._asked_s
            self._bench.score_wait_s += now_s - self._asked_s
        self.phase = "environment" if is_calling else self._own_phase

    def verdict(
        self, value: float, *, components: Mapping[str, float] | None = None, reason: str = "", scorer: str = "workflow"
    ) -> Verdict:
        """See `SampleTools.verdict`."""
        parts = {name: float(part) for name, part in (components or {}).items()}
        number = float(value)
        if not math.isfinite(number):
            reason = reason or f"a reward of {number} is not finite"
            return Verdict(kind="invalid", components=parts, reason=reason, scorer=scorer, failed_in=scorer)
        return Verdict(kind="scored", value=number, components=parts, reason=reason, scorer=scorer)

    # ------------------------------------------------------------ for the worker

    def check_trained(self, sample: Sample) -> None:
        """Raise UserError if models are declared and tokens of another model are trained."""
        if self._bench.models.declared:
            check_trained((sample.trajectory, *sample.others), self._sampled, self.turns.num_turns)

    def decode(self, tokens_R: np.ndarray) -> str:
        """Text of token ids, with special tokens."""
        return self._bench.tokens.decode(tokens_R, with_special_tokens=True)

    async def with_teacher_logprobs(self, sample: Sample) -> Sample:
        """Return the sample with log-probs of the teacher, if there is one and the sample is for training."""
        name = self._bench.models.teacher
        if not name or self.task.purpose != "train":
            return sample
        self.phase = "teacher"
        trajectory, *others = await with_teacher_logprobs(
            (sample.trajectory, *sample.others), self.models[name], self.task.sampling.temperature
        )
        return msgspec.structs.replace(sample, trajectory=trajectory, others=tuple(others))

    def all_new(self, running: Mapping[int, Segment]) -> Segment:
        """All new tokens so far that can be continued; `running` is `engine.progress()`. Up to the last checkpoint if
        the workflow is not resumable."""
        if not self.is_resumable:
            return self.turns.new_tokens
        generation = next((call.generation for call in self._calls if not call.is_parked), None)
        if generation is None:
            return self.new_tokens
        if generation.done():  # ended, but its task has not run yet
            has_outcome = not generation.cancelled() and generation.exception() is None
            return self.new_tokens.joined(generation.result().segment) if has_outcome else self.new_tokens
        return self.new_tokens.joined(running.get(self.request_id, Segment.empty()))

    def park(self, running: Mapping[int, Segment]) -> None:
        """Stop generating but keep the tokens in `running`; `generate` continues once the version may be sampled with.

        This never awaits: nothing may be reported between reading `running` and this call.
        """
        for call in self._calls:
            if call.generation is None or call.generation.done() or call.is_parked:
                continue
            if self.is_resumable:
                self.new_tokens = call.new_tokens = self.all_new(running)
            call.is_parked = True
            call.generation.cancel()

    def end(self) -> None:
        """Mark the sample as ended. Calls that its workflow did not wait for are cancelled."""
        self.phase = "end"
        self._is_over = True
        for generation in filter(None, (call.generation for call in self._calls)):
            generation.cancel()
        self.models.end_sessions()
        if self.request_id and not self.is_resumable:
            roles = [one for one in self._bench.models.declared.values() if one.is_role]
            for role in (*roles, None):
                self._bench.engine.end_session(self._session_key(role))

    # ------------------------------------------------------------ inside

    def _end_of(self, answer: Segment, sampling: Sampling, num_prompt: int) -> EndedBy | None:
        context = self._bench.engine.capabilities.max_context
        return end_of(
            answer, sampling, num_prompt, end_ids=self._bench.tokens.stop_ids, max_context=context, stops=self._stops
        )

    async def _wait_version(self, min_version: int) -> None:
        self.phase = "version"
        if self._bench.gate.version >= max(min_version, 0):
            return
        started_s, trace_s = self._bench.clock.monotonic_s(), self._bench.tracer.now_s()
        self._bench.version_waits += 1
        try:
            await self._bench.gate.wait(min_version, self._bench.version_deadline_s)
        finally:
            waited_s = self._bench.clock.monotonic_s() - started_s
            self.timings["version_wait_s"] += waited_s
            self._bench.version_wait_s += waited_s
            self._trace("wait:version", trace_s, version=min_version)

    async def _generate_once(
        self,
        call: PolicyCall,
        prompt_P: np.ndarray,
        answer: Segment,
        sampling: Sampling,
        turn: int,
        role: CalledModelSettings | None,
    ) -> GenerationOutcome | None:
        """Make one engine request; None if it was parked. Its segment_tokens counts all new tokens of this lease."""
        task = self.task
        left = task.segment_tokens - len(call.new_tokens) if task.segment_tokens and self.is_resumable else 0
        if task.segment_tokens and self.is_resumable and left <= 0:
            self.cut_reason = "segment"
            raise SampleCut("segment")
        self.request_id = next(self._bench.request_ids)
        request = GenerationRequest(
            request_id=self.request_id,
            prompt_P=prompt_P,
            prefix=answer,
            sampling=sampling,
            seed=turn_seed(task.seed, turn),
            segment_tokens=left,
            share_key=self._share_key() if turn == 0 else -1,
            session_key=-1 if self.is_resumable else self._session_key(role),
            stops=self._stops,
        )
        self.phase = "generate"
        trace_s = self._bench.tracer.now_s()
        call.generation = asyncio.ensure_future(self._bench.engine.generate(request))
        try:
            return await call.generation
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if call.is_parked and current is not None and not current.cancelling():
                return None
            raise
        except (UserError, EngineError) as error:
            if isinstance(error, EngineError):
                self.engine_error = error
            raise
        except Exception as error:  # after any other exception the engine is unusable: the process restarts
            self.engine_error = EngineError(f"{type(error).__name__}: {error}")
            raise self.engine_error from error
        finally:
            call.generation, call.is_parked = None, False
            self._arrow_s = self._trace("generate", trace_s, turn=turn)
            if self._is_arriving:
                self._is_arriving = False
                self._bench.tracer.arrow_end(self._move_name(self.base), self._arrow_s, self.lane)
            self.phase = "generate" if any(one.generation is not None for one in self._calls) else self._own_phase

    def _take(self, call: PolicyCall, outcome: GenerationOutcome) -> None:
        call.new_tokens = call.new_tokens.joined(outcome.segment)
        if self.is_resumable:
            self.new_tokens = call.new_tokens
        self._last_version = max(self._last_version, outcome.segment.last_version)
        for name in ("queue_s", "generate_s", "paused_s"):
            self.timings[name] += getattr(outcome, name)

    def _session_key(self, role: CalledModelSettings | None) -> int:
        """Key of a role's conversation; each role has a separate one."""
        return session_key(self.task.lease_id, self._bench.models.declared, role.name if role is not None else "")

    def _share_key(self) -> int:
        """Key of the prompt, distinct for training and evaluation, whose group ids may be equal. A workflow that is not
        resumable may use another prompt for each sample of a group, so its prompts are not shared."""
        return 2 * self.task.group_id + (self.task.purpose == "eval") if self.is_resumable else -1

    def draw_arrow(self) -> None:
        """Start the arrow of a finished sample, which leads to its score and to the step that uses it."""
        if self._arrow and self._arrow_s is not None:
            self._bench.tracer.arrow_start(self._arrow, self._arrow_s, self.lane)

    def draw_departure(self, num_new: int) -> None:
        """Start an arrow from the current slice to the next worker, for a sample that is returned with `num_new` new
        tokens."""
        if self._arrow and self.phase in ("generate", "version") and self.base + num_new:
            name = self._move_name(self.base + num_new)
            self._bench.tracer.arrow_start(name, self._bench.tracer.now_s(), self.lane)

    def _move_name(self, num_tokens: int) -> str:
        return move_name(self.task.group_id, self.task.sample_index, num_tokens)

    def _trace(self, name: str, start_s: float, **args: object) -> float:
        """Record a slice from `start_s` to now in the sample's lane, and return a time within it."""
        end_s = max(self._bench.tracer.now_s(), start_s + SHORTEST_S)
        if self._arrow:
            where = {"group": self.task.group_id, "sample": self.task.sample_index}
            self._bench.tracer.complete(name, start_s, end_s, self.lane, **where, **args)
        return (start_s + end_s) / 2
