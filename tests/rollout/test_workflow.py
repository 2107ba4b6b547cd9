"""Workflows of a user's own: how they are found, and what becomes of their failures."""

from __future__ import annotations

import asyncio
import re
import sys
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from areal_like.errors import UserError
from areal_like.import_path import import_object
from areal_like.trajectory import Segment, Trajectory
from areal_like.verdict import Verdict
from areal_like.wire import messages as m
from rollout.check_workflow import check
from rollout.config import BUILT_IN_WORKFLOWS
from rollout.transcript import Answer, Transcript
from rollout.workflow import Sample, SampleCut, SingleTurn, check_models, load_workflow


class RaisesAfterTheAnswer(SingleTurn):
    async def run(self, task, tools):
        prompt_P = tools.tokens.prompt(task.row)
        await tools.generate(prompt_P)
        raise RuntimeError("parser lost")


class RaisesBeforeTheAnswer(SingleTurn):
    async def run(self, task, tools):
        if task.sample_index == 0:
            raise KeyError("answer_key")
        return await super().run(task, tools)


class ReturnsNonsense(SingleTurn):
    async def run(self, task, tools):
        await super().run(task, tools)
        return 1.0


class SwallowsTheCut(SingleTurn):
    async def run(self, task, tools):
        try:
            return await super().run(task, tools)
        except SampleCut:
            return "all is well"


class GeneratesTwice(SingleTurn):
    async def run(self, task, tools):
        prompt_P = tools.tokens.prompt(task.row)
        await tools.generate(prompt_P)
        return await super().run(task, tools)


class TextForATrajectory(SingleTurn):
    async def run(self, task, tools):
        return msgspec.structs.replace(await super().run(task, tools), trajectory="the answer")


class NumberForAVerdict(SingleTurn):
    async def run(self, task, tools):
        return msgspec.structs.replace(await super().run(task, tools), verdict=1.0)


class OwnVerdict(SingleTurn):
    async def run(self, task, tools):
        prompt_P = tools.tokens.prompt(task.row)
        answer = await tools.generate(prompt_P)
        trajectory = Trajectory.from_prompt(prompt_P, answer.segment, answer.finish_reason)
        return Sample(
            trajectory=trajectory, verdict=Verdict(kind="scored", value=0.5, components={"a": "b"}), response_text=""
        )


class TwoTurns:
    """Asks, gets a reply, asks again: the tokens of the reply are not its own."""

    is_resumable = False

    async def run(self, task, tools):
        transcript = Transcript(tools.tokens.prompt(task.row), encode=tools.tokens.encode)
        transcript.sampled(await tools.generate(transcript, max_new_tokens=3))
        transcript.given("!")
        transcript.sampled(await tools.generate(transcript, max_new_tokens=2))
        return Sample(trajectory=transcript.close(), verdict=tools.verdict(0.25), response_text="two turns")


def test_exception_after_the_answer_gives_a_crashed_verdict_with_the_answer(rig, fake):
    async def scenario(r):
        await r.ready()
        r.lease(fake.task(1))
        await r.until(lambda: r.got(m.SampleFinished), "finished")
        [done] = r.got(m.SampleFinished)
        assert done.verdict.kind == "crashed"
        assert "RuntimeError: parser lost" in done.verdict.reason
        assert done.trajectory.tokens_T[2:].tolist() == fake.answer_of(fake.task())
        await r.until(lambda: r.beat().counters.get("workflow_crashes") == 1.0, "count")

    rig(scenario, workflow=RaisesAfterTheAnswer())


def test_exception_before_the_answer_rejects_that_sample_alone(rig, fake):
    async def scenario(r):
        await r.ready()
        r.lease(fake.task(1), fake.task(2, index=1))
        await r.until(lambda: r.got(m.SampleReturned) and r.got(m.SampleFinished), "both ends")
        [back] = r.got(m.SampleReturned)
        assert back.reason == "rejected"
        assert back.detail.startswith("the workflow raised KeyError")
        assert r.got(m.SampleFinished)[0].lease_id == 2

    rig(scenario, workflow=RaisesBeforeTheAnswer())


@pytest.mark.parametrize(
    ("workflow", "words"),
    [
        (ReturnsNonsense, "not float"), (OwnVerdict, "cannot be sent"), (TextForATrajectory, "must be a Trajectory"),
        (NumberForAVerdict, "its `verdict` must be a Verdict"),
    ],
)  # fmt: skip
def test_workflow_that_returns_something_else_crashes_its_sample(rig, fake, workflow, words):
    async def scenario(r):
        await r.ready()
        r.lease(fake.task(1))
        await r.until(lambda: r.got(m.SampleFinished), "finished")
        assert r.got(m.SampleFinished)[0].verdict.kind == "crashed"
        assert words in r.got(m.SampleFinished)[0].verdict.reason

    rig(scenario, workflow=workflow())


def test_workflow_that_swallows_a_cut_still_hands_the_sample_back(rig, fake):
    async def scenario(r):
        await r.ready()
        r.lease(fake.task(1, segment_tokens=2))
        await r.until(lambda: r.got(m.SampleReturned), "returned")
        assert r.got(m.SampleReturned)[0].reason == "segment"
        assert len(r.reports[1][1]) == 2
        assert not r.got(m.SampleFinished)

    rig(scenario, workflow=SwallowsTheCut())


def test_resumable_workflow_may_generate_only_once(rig, fake):
    async def scenario(r):
        await r.ready()
        r.lease(fake.task(1))
        await r.until(lambda: r.got(m.SampleReturned), "returned")
        assert "is_resumable" in r.got(m.SampleReturned)[0].detail

    rig(scenario, workflow=GeneratesTwice())


def test_two_turns_make_one_trajectory_and_report_no_partial_work(rig, fake):
    async def scenario(r):
        await r.ready()
        r.engine.allow(2)
        r.lease(fake.task(1, segment_tokens=1))
        await r.until(lambda: r.engine.num_tokens == 2, "tokens")
        beats = r.hub.counters["received"]
        await r.until(lambda: r.hub.counters["received"] > beats + 2, "time for reports")
        assert not r.got(m.Progress)
        r.engine.allow(100)
        await r.until(lambda: r.got(m.SampleFinished), "finished")
        trajectory = r.got(m.SampleFinished)[0].trajectory
        assert trajectory.loss_mask_T.tolist() == [False] * 2 + [True] * 3 + [False] + [True] * 2
        first, second = r.engine.requests
        assert second.seed == (first.seed + 0x9E3779B97F4A7C15) % 2**63, "the same in every life of the run"
        assert second.prompt_P.tolist() == trajectory.tokens_T[:6].tolist()
        assert trajectory.tokens_T[5] == ord("!")
        assert r.got(m.SampleFinished)[0].verdict.value == 0.25
        assert not r.questions, "the workflow's own verdict needs no reward service"
        assert first.share_key == second.share_key == -1
        assert first.session_key == second.session_key == 1
        assert r.engine.ended_sessions == [1]

    rig(scenario, workflow=TwoTurns())


def test_text_that_is_not_unicode_travels_with_replacements(rig, fake):
    class Surrogate(SingleTurn):
        async def run(self, task, tools):
            prompt_P = tools.tokens.prompt(task.row)
            answer = await tools.generate(prompt_P)
            verdict = await tools.score("\ud800", answer)
            trajectory = Trajectory.from_prompt(prompt_P, answer.segment, answer.finish_reason)
            return Sample(trajectory=trajectory, verdict=verdict, response_text="\udfff")

    async def scenario(r):
        await r.ready()
        r.lease(fake.task(1))
        await r.until(lambda: r.got(m.SampleFinished), "finished")
        assert r.got(m.SampleFinished)[0].response_text == "?"
        assert r.questions[0].response == "?"

    rig(scenario, workflow=Surrogate())


MODULE = """
class Good:
    is_resumable = True
    async def run(self, task, tools):
        ...

class Incomplete:
    pass

class NeedsArguments:
    is_resumable = True
    def __init__(self, x, *, depth=1):
        self.made_with = (x, depth)
    async def run(self, task, tools):
        ...

class Refuses(Good):
    def __init__(self):
        raise ValueError("too deep")
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "users_own_workflow.py").write_text(MODULE)
    (tmp_path / "users_broken_workflow.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "users_own_workflow"
    sys.modules.pop("users_own_workflow", None)


def test_users_workflow_is_found_by_name(user_module):
    assert type(load_workflow(f"{user_module}:Good")).__name__ == "Good"
    assert isinstance(load_workflow("single_turn"), SingleTurn)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("several_turns", "is not a workflow"),
        ("users_own_workflow:", "is not a workflow"),
        ("users_own_workflow:Missing", "has no attribute Missing"),
        ("users_own_workflow:Incomplete", "is_resumable"),
        (
            "users_own_workflow:NeedsArguments",
            r"options of users_own_workflow:NeedsArguments are not valid \(missing: x\)",
        ),
        ("users_own_workflow:Refuses", "cannot be created with these options .too deep"),
        ("users_broken_workflow:Any", "ZeroDivisionError"),
        ("no_such_module_at_all:Any", "ModuleNotFoundError"),
    ],
)
def test_workflow_that_cannot_be_used_is_the_users_mistake(user_module, name, words):
    with pytest.raises(UserError, match=words):
        load_workflow(name)


def test_a_workflow_is_made_with_its_options(user_module):
    made = load_workflow(f"{user_module}:NeedsArguments", {"x": 3, "depth": [1]})
    assert made.made_with == (3, [1])


@pytest.mark.parametrize(
    ("name", "options", "words", "remedy"),
    [
        ("NeedsArguments", {"deep": 1, "a": 2}, "unknown: a, deep; missing: x", "use these options: x, depth"),
        ("NeedsArguments", {"x": 1, "deep": 1}, r"unknown: deep\)$", "use these options: x, depth"),
        ("Good", {"x": 1}, r"unknown: x\)$", "remove all options; users_own_workflow:Good has none"),
        (
            "single_turn",
            {"x": 1},
            r"options of single_turn are not valid \(unknown: x\)$",
            "remove all options; single_turn has none",
        ),
    ],
)
def test_options_that_a_workflow_does_not_take_are_one_mistake(user_module, name, options, words, remedy):
    with pytest.raises(UserError) as mistake:
        load_workflow(name if name == "single_turn" else f"{user_module}:{name}", options)
    assert re.search(words, mistake.value.what)
    assert (mistake.value.where, mistake.value.remedy) == ("rollout.workflow_options", remedy)


class Tools:
    """What a worker lends, with one answer of two tokens after a prompt of three."""

    tokens = type("Tokens", (), {
        "prompt": staticmethod(lambda row: np.arange(3, dtype=np.int32)), "decode": staticmethod(lambda tokens_R: "ab"),
    })  # fmt: skip

    def __init__(self, experts):
        self._experts = experts

    async def generate(self, prompt_P):
        segment = Segment(np.zeros(2, np.int32), np.full(2, -1.0, np.float32), np.zeros(2, np.int32))
        return Answer(segment=segment, finish_reason="stop", routed_experts=self._experts)

    async def score(self, response, answer):
        return Verdict(kind="scored", value=1.0)


@pytest.mark.parametrize("experts", [None, np.ones((4, 2, 2), np.int32)])
def test_experts_that_the_engine_reports_are_part_of_the_sample(experts):
    sample = asyncio.run(SingleTurn().run(SimpleNamespace(row={}), Tools(experts)))
    kept = sample.trajectory.routed_experts
    assert (kept is None) if experts is None else np.array_equal(kept, experts)


def test_only_the_workflow_of_one_answer_can_be_continued_from_its_tokens() -> None:
    kinds = {name: import_object(path, "") for name, path in BUILT_IN_WORKFLOWS.items()}
    assert {name for name, kind in kinds.items() if kind.is_resumable} == {"single_turn"}


def calls(*models, name="Calls"):
    return type(name, (), {"is_resumable": False, "models": models, "run": None})()


def test_a_workflow_calls_exactly_the_declared_models() -> None:
    check_models(calls("judge", "rival"), ["rival", "judge"])
    check_models(SingleTurn(), [])
    with pytest.raises(UserError, match="Calls calls a model `judge`, which is not declared") as missing:
        check_models(calls("judge"), [])
    with pytest.raises(UserError, match="`rival` is declared, but Calls does not call it") as unused:
        check_models(calls("judge"), ["judge", "rival"])
    assert missing.value.where == unused.value.where == "rollout.models"
    with pytest.raises(UserError, match="`judge` is declared, but SingleTurn does not call it"):
        check_models(SingleTurn(), ["judge"])


def test_a_teacher_need_not_be_called_but_may_be():
    check_models(SingleTurn(), ["judge"], teacher="judge")
    check_models(calls("judge"), ["judge"], teacher="judge")
    with pytest.raises(UserError, match="`rival` is declared, but SingleTurn does not call it"):
        check_models(SingleTurn(), ["judge", "rival"], teacher="judge")


@pytest.mark.parametrize("models", ["judge", (1,)])
def test_what_a_workflow_calls_must_be_names(models: object) -> None:
    workflow = calls()
    workflow.models = models
    with pytest.raises(UserError, match="must be a tuple of model names"):
        check_models(workflow, ["judge"])


def test_the_look_before_a_run_compares_them(user_module) -> None:
    check(f"{user_module}:Good", {"options": {}, "models": []})
    check(f"{user_module}:Good", {"options": {}, "models": ["judge"], "teacher": "judge"})
    with pytest.raises(UserError, match="`judge` is declared, but Good does not call it"):
        check(f"{user_module}:Good", {"options": {}, "models": ["judge"]})
