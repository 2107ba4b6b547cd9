"""Several scorers as one: the weighted sum, its components, and what counts as a number.

Owns: making scorers from settings, their names, the sum. Refuses: processes and time limits (pool), single rules
(scorers/). If any scorer of the sum does not score, the whole does not: a part that is missing is no zero.

Components of a verdict: each scorer's unweighted value under the scorer's name, its further parts as `name.part`;
`correct` keeps its bare name (the first scorer that gives it wins).
"""

from __future__ import annotations

import difflib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import pydantic

from areal_like.config import Settings
from areal_like.errors import UserError
from services.config import BUILT_IN_SCORERS, CodeOptions, ScorerSettings
from services.reward.job import MAX_REASON_CHARS, Job, Outcome
from services.reward.scorers.port import CannotJudge, Scorer, ScorerInput

MAX_COMPONENTS = 64

_S = TypeVar("_S", bound=Settings)


class NotANumber(Exception):
    """A scorer gave something that cannot be a reward."""


def make_scorer(settings: ScorerSettings) -> Scorer:
    """The scorer these settings name. Raises UserError: no such scorer, bad options, a function that cannot be used."""
    where = f"reward scorer {settings.kind}"
    if ":" in settings.kind:
        from services.reward.scorers.user_function import UserFunctionScorer

        return UserFunctionScorer(settings.kind, settings.options)
    if settings.kind == "math":
        from services.reward.scorers.maths import MathOptions, MathScorer

        return MathScorer(_options(MathOptions, settings.options, where))
    if settings.kind == "code":
        from services.reward.scorers.programs import CodeScorer

        return CodeScorer(_options(CodeOptions, settings.options, where))
    if settings.kind == "format":
        from services.reward.scorers.response_format import FormatOptions, FormatScorer

        return FormatScorer(_options(FormatOptions, settings.options, where))
    if settings.kind == "running_sum":
        from services.reward.scorers.running_sum import RunningSumScorer

        if settings.options:
            raise UserError("takes no options", where=where)
        return RunningSumScorer()
    near = difflib.get_close_matches(settings.kind, BUILT_IN_SCORERS, n=1)
    known = f"there are {', '.join(BUILT_IN_SCORERS)} and module:function of your own"
    remedy = f"did you mean {near[0]}?" if near else known
    raise UserError("there is no such scorer", where=where, remedy=remedy)


def _options(kind: type[_S], options: Mapping[str, Any], where: str) -> _S:
    try:
        return kind.model_validate(dict(options))
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "as a whole"
        remedy = f"options are {', '.join(kind.model_fields)}"
        raise UserError(f"option {key}: {first['msg']}", where=where, remedy=remedy) from error


@dataclass(frozen=True)
class Part:
    """One scorer of the sum; `name` is unique among them."""

    name: str
    weight: float
    scorer: Scorer


class WeightedSum:
    """All scorers of the configuration, called one after the other on each answer."""

    def __init__(self, parts: tuple[Part, ...]) -> None:
        self._parts = {part.name: part for part in parts}
        self.label = "+".join(f"{part.name}@{part.scorer.version}" for part in parts)

    @staticmethod
    def from_settings(scorers: tuple[ScorerSettings, ...]) -> WeightedSum:
        """Load all scorers. Raises UserError."""
        parts: dict[str, Part] = {}
        for settings in scorers:
            name, number = settings.kind, 2
            while name in parts:
                name, number = f"{settings.kind}#{number}", number + 1
            if not math.isfinite(settings.weight):
                raise UserError(f"weight {settings.weight} is not a finite number", where=f"reward scorer {name}")
            parts[name] = Part(name, settings.weight, make_scorer(settings))
        return WeightedSum(tuple(parts.values()))

    @property
    def names(self) -> list[str]:
        """One name per scorer, in order."""
        return list(self._parts)

    def warm_up(self) -> None:
        """Load what the first answer would otherwise wait for."""
        for part in self._parts.values():
            part.scorer.warm_up()

    def score(self, job: Job, began: Callable[[str], None]) -> Outcome:
        """Score one answer; never raises for what a scorer does. `began` is told each scorer before it runs."""
        if job.scorer and job.scorer not in self._parts:
            reason = f"unknown scorer {job.scorer!r}; this service has {', '.join(self._parts)}"
            return Outcome(job_id=job.job_id, kind="invalid", reason=reason[:MAX_REASON_CHARS])
        parts = [self._parts[job.scorer]] if job.scorer else list(self._parts.values())
        sample = ScorerInput(
            row=job.row, response=job.response, finish_reason=job.finish_reason, num_tokens=job.num_tokens
        )
        total = 0.0
        components: dict[str, float] = {}
        scorer_s: dict[str, float] = {}
        remarks: list[str] = []
        for part in parts:
            began(part.name)
            started_s = time.perf_counter()
            kind, reason, values = _judge(part, sample)
            scorer_s[part.name] = time.perf_counter() - started_s
            if kind != "scored":
                return Outcome(job_id=job.job_id, kind=kind, reason=reason, scorer=part.name, scorer_s=scorer_s)
            remarks += [reason] if reason else []
            total += values["value"] * (1.0 if job.scorer else part.weight)
            for key, value in values.items():
                components.setdefault(_component_name(part.name, key), value)
        if not math.isfinite(total):
            reason = "the weighted sum is not finite"
            return Outcome(job_id=job.job_id, kind="invalid", reason=reason, scorer_s=scorer_s)
        reason = "; ".join(remarks)[:MAX_REASON_CHARS]
        return Outcome(
            job_id=job.job_id, kind="scored", value=total, components=components, reason=reason, scorer_s=scorer_s
        )


def _component_name(scorer: str, key: str) -> str:
    if key == "value":
        return scorer
    return key if key == "correct" else f"{scorer}.{key}"


def _judge(part: Part, sample: ScorerInput) -> tuple[str, str, dict[str, float]]:
    """kind, reason and values of one scorer. The fault boundary of a sample: whatever is raised becomes data.

    The reason of a score is the scorer's remark on it, if it made one.
    """
    try:
        values = dict(part.scorer.score(sample))
        remark = values.pop("remark") if isinstance(values.get("remark"), str) else ""
        told = f"{part.name}: {remark}"[:MAX_REASON_CHARS] if remark else ""
        return "scored", told, _checked(values)
    except CannotJudge as error:
        kind, what = "invalid", str(error)
    except NotANumber as error:
        kind, what = "invalid", str(error)
    except BaseException as error:  # the user's code may raise anything, SystemExit included
        kind, what = "crashed", f"{type(error).__name__}: {_last_line(error)}"
    return kind, f"{part.name}: {what}"[:MAX_REASON_CHARS], {}


def _last_line(error: BaseException) -> str:
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # an exception whose own text raises
        return "(its text cannot be shown)"
    return lines[-1] if lines else ""


def _checked(values: Mapping[str, Any]) -> dict[str, float]:
    if len(values) > MAX_COMPONENTS:
        raise NotANumber(f"gave {len(values)} components, at most {MAX_COMPONENTS} are kept")
    checked = {}
    for key, value in values.items():
        what = "value" if key == "value" else f"component {str(key)[:40]!r}"
        try:
            number = float(value) if not isinstance(value, str | bytes) else None
        except (TypeError, ValueError, OverflowError):
            number = None
        if number is None:
            raise NotANumber(f"{what} is not a number but {type(value).__name__}")
        if not math.isfinite(number):
            raise NotANumber(f"{what} is {number}")
        checked[str(key)] = number
    if "value" not in checked:
        raise NotANumber("gave no value")
    return checked
