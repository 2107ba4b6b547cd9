"""Combines several scorers: gates, the weighted sum, its components, and checks of their values.

Processes and time limits are in pool.py, scorers in scorers/, and their creation in make_scorer.py. If any scorer that
is run gives no score, the whole has none, because a missing part is not zero. If any scorer that is run does not score,
the whole does not: a part that is missing is no zero.

    reward = otherwise of the first gate whose value is below at_least; the scorers after it are not run
           = clip(sum of weight * clip(value)) where all gates are passed

A scorer with `held_out: true` is run for every answer, so that its mean does not depend on what the gates let pass.

Gates come first, in configuration order, then the others. Components of a verdict: each scorer's value, neither
weighted nor clipped, under the scorer's name, its further parts as `name.part`; `correct` keeps its bare name (the
first scorer in the configuration's order that gives it wins; an answer that did not pass a gate has `correct` 0). The
verdict's reason names the gate that was not passed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from areal_like.external.errors import ExternalStop
from areal_like.secret_values import without_secrets
from areal_like.verdict import MAX_REASON_CHARS
from services.reward.config import ClipSettings, GateSettings, ScorerSettings, scorer_names
from services.reward.job import Job, Outcome
from services.reward.make_scorer import make_scorer
from services.reward.scorers.port import CannotJudge, Scorer, ScorerInput, TookTooLong

MAX_COMPONENTS = 64


class NotANumber(Exception):
    """A scorer returned a value that cannot be a reward."""


@dataclass(frozen=True)
class Part:
    """One scorer of the sum; `name` is unique among them."""

    name: str
    weight: float
    scorer: Scorer
    gate: GateSettings | None = None
    clip: ClipSettings | None = None
    is_held_out: bool = False

    def stops(self, value: float) -> bool:
        """Whether this value does not pass the gate."""
        return self.gate is not None and value < self.gate.at_least


@dataclass
class Total:
    """The combined result of the scorers that ran."""

    value: float
    components: dict[str, float]
    remarks: list[str]
    scorer_s: dict[str, float]


class WeightedSum:
    """All scorers of the configuration, called one after the other on each answer.

    is_shared: by several runs, so that a scorer's ExternalStop is the verdict `invalid` and is not raised.
    """

    def __init__(self, parts: tuple[Part, ...], clip: ClipSettings | None = None, *, is_shared: bool = False) -> None:
        self._parts = {part.name: part for part in parts}
        self._in_turn = sorted(parts, key=lambda part: part.gate is None)  # stable: gates first
        self._clip, self._is_shared = clip, is_shared
        self.label = "+".join(f"{part.name}@{part.scorer.version}" for part in parts)

    @staticmethod
    def from_settings(
        scorers: tuple[ScorerSettings, ...], clip: ClipSettings | None = None, *, is_shared: bool = False
    ) -> WeightedSum:
        """Load all scorers. Raises UserError."""
        parts: dict[str, Part] = {}
        for name, settings in zip(scorer_names(scorers), scorers, strict=True):
            parts[name] = Part(
                name, settings.weight, make_scorer(settings), settings.gate, settings.clip, settings.held_out
            )  # fmt: skip
        return WeightedSum(tuple(parts.values()), clip, is_shared=is_shared)

    @property
    def names(self) -> list[str]:
        """One name per scorer, in order."""
        return list(self._parts)

    @property
    def volatile(self) -> list[str]:
        """Names of the scorers that declare that they may score the same answer differently."""
        return [part.name for part in self._parts.values() if not getattr(part.scorer, "is_deterministic", True)]

    def warm_up(self) -> None:
        """Load what the first answer would otherwise have to wait for."""
        for part in self._parts.values():
            part.scorer.warm_up()

    def score(self, job: Job, began: Callable[[str], None]) -> Outcome:
        """Score one answer; exceptions of scorers are not raised, except ExternalStop if the service is not shared.
        `began` is called with each scorer before it runs."""
        if job.scorer and job.scorer not in self._parts:
            reason = f"unknown scorer {job.scorer!r}; this service has {', '.join(self._parts)}"
            return Outcome(job_id=job.job_id, kind="invalid", reason=reason[:MAX_REASON_CHARS])
        sample = ScorerInput(
            row=job.row, response=job.response, finish_reason=job.finish_reason, num_tokens=job.num_tokens
        )
        if job.scorer:
            alone = Part(job.scorer, 1.0, self._parts[job.scorer].scorer)
            total = self._run([alone], None, job.job_id, sample, began)
        else:
            total = self._run(self._in_turn, self._clip, job.job_id, sample, began)
        if isinstance(total, Outcome):
            return total
        if not math.isfinite(total.value):
            reason = "the weighted sum is not finite"
            return Outcome(job_id=job.job_id, kind="invalid", reason=reason, scorer_s=total.scorer_s)
        return Outcome(
            job_id=job.job_id,
            kind="scored",
            value=total.value,
            components=total.components,
            reason="; ".join(total.remarks)[:MAX_REASON_CHARS],
            scorer_s=total.scorer_s,
        )

    def _run(
        self,
        parts: list[Part],
        clip: ClipSettings | None,
        job_id: int,
        sample: ScorerInput,
        began: Callable[[str], None],
    ) -> Total | Outcome:
        """Run one part after the other. Returns an Outcome if one gives no score."""
        total = Total(0.0, {}, [], {})
        found: dict[str, dict[str, float]] = {}
        stopped_by: Part | None = None
        for part in parts:
            if stopped_by is not None and not part.is_held_out:
                continue
            began(part.name)
            started_s = time.perf_counter()
            kind, reason, values = _judge(part, sample, is_shared=self._is_shared)
            total.scorer_s[part.name] = time.perf_counter() - started_s
            if kind != "scored":
                return Outcome(job_id=job_id, kind=kind, reason=reason, scorer=part.name, scorer_s=total.scorer_s)
            total.remarks += [reason] if reason else []
            found[part.name] = values
            if part.stops(values["value"]):
                stopped_by = part
            total.value += part.weight * _clipped(values["value"], part.clip)
        total.value = _clipped(total.value, clip)
        for name in self._parts:  # in the configuration's order, whatever ran first
            for key, value in found.get(name, {}).items():
                total.components.setdefault(_component_name(name, key), value)
        if stopped_by is not None and stopped_by.gate is not None:
            total.value = stopped_by.gate.otherwise
            total.components["correct"] = 0.0
            total.remarks.append(f"{stopped_by.name}: the gate was not passed")
        return total


def _clipped(value: float, bounds: ClipSettings | None) -> float:
    if bounds is None or not math.isfinite(value):  # a value that is not a number is rejected, not clipped
        return value
    value = value if bounds.min is None else max(value, bounds.min)
    return value if bounds.max is None else min(value, bounds.max)


def _component_name(scorer: str, key: str) -> str:
    if key == "value":
        return scorer
    return key if key == "correct" else f"{scorer}.{key}"


def _judge(part: Part, sample: ScorerInput, *, is_shared: bool) -> tuple[str, str, dict[str, float]]:
    """Run one scorer; returns kind, reason and values. Exceptions are caught here and become verdicts.

    The reason of a score is the scorer's remark on it, if it made one.
    """
    try:
        values = dict(part.scorer.score(sample))
        remark = values.pop("remark") if isinstance(values.get("remark"), str) else ""
        remark_text = f"{part.name}: {without_secrets(remark)}"[:MAX_REASON_CHARS] if remark else ""
        return "scored", remark_text, _checked(values)
    except ExternalStop as error:
        if not is_shared:
            raise
        kind, what = "invalid", str(error)
    except CannotJudge as error:
        kind, what = "invalid", str(error)
    except TookTooLong as error:
        kind, what = "timed_out", str(error)
    except NotANumber as error:
        kind, what = "invalid", str(error)
    except BaseException as error:  # the user's code may raise anything, SystemExit included
        kind, what = "crashed", f"{type(error).__name__}: {_last_line(error)}"
    return kind, f"{part.name}: {without_secrets(what)}"[:MAX_REASON_CHARS], {}


def _last_line(error: BaseException) -> str:
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # an exception whose own text raises
        return "(the message cannot be shown)"
    return lines[-1] if lines else ""


def _checked(values: Mapping[str, Any]) -> dict[str, float]:
    if len(values) > MAX_COMPONENTS:
        raise NotANumber(f"returned {len(values)} components, but at most {MAX_COMPONENTS} are allowed")
    checked = {}
    for key, value in values.items():
        what = "value" if key == "value" else f"component {str(key)[:40]!r}"
        try:
            number = float(value) if not isinstance(value, str | bytes) else None
        except (TypeError, ValueError, OverflowError):
            number = None
        if number is None:
            raise NotANumber(f"{what} must be a number, not {type(value).__name__}")
        if not math.isfinite(number):
            raise NotANumber(f"{what} is {number}")
        checked[str(key)] = number
    if "value" not in checked:
        raise NotANumber("returned no value")
    return checked
