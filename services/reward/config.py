"""Settings of the reward service. Does not import torch."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from areal_like import limits
from areal_like.external.needs import silent
from areal_like.external.settings import EndpointOptions
from areal_like.settings import Settings
from services.environment.config import EnvironmentSettings
from services.environment.loading import name_fault
from services.reward.code_options import CodeOptions
from services.reward.scorer_needs import needs_of, unreachable
from services.reward.scorer_options import OverlongOptions
from services.reward.scorer_registry import SCORERS

OnFailure = Literal["drop_sample", "drop_group"] | float
"""Handling of an answer without a score; a number is used as its reward."""


class GateSettings(Settings):
    """A condition on one scorer's value. Gates are scored first; if one is not passed, no further scorer is run."""

    at_least: float = 1.0
    """The smallest value of the scorer, unweighted and before `clip`, that passes."""
    otherwise: float = 0.0
    """The whole reward of an answer that does not pass; it counts as not correct."""


class ClipSettings(Settings):
    """Bounds to which a value is clipped."""

    min: float | None = None
    """Lower bound."""
    max: float | None = None
    """Upper bound."""

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> ClipSettings:
        if self.min is None and self.max is None:
            raise ValueError("no bound is set; set min or max")
        if self.min is not None and self.max is not None and self.min >= self.max:
            raise ValueError(f"min ({self.min:g}) must be less than max ({self.max:g})")
        return self


class ScorerSettings(Settings):
    """One scorer of the weighted sum."""

    kind: str
    """`math`, `code` or another of the built-in ones (docs/rewards.md), or your own `module:function`."""
    weight: float = 1.0
    """Factor of this component in the reward; 0 for a scorer that is only a gate."""
    held_out: bool = False
    """A judge that is not part of the reward (`weight: 0`): a run whose reward rises while this scorer falls gets the
    warning `reward_hacked`. It also scores answers that a gate stops."""
    gate: GateSettings | None = None
    """A gate: the answer passes depending on this scorer's value, or gets a reward at once."""
    clip: ClipSettings | None = None
    """Bounds of this component in the reward, before `weight`; the component itself is not changed."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the scorer."""
    retries: int | None = Field(None, ge=0, le=limits.STEPS)
    """Further attempts after `timed_out` or `crashed` in this scorer; null: `reward.retries`."""
    on_failure: OnFailure | None = None
    """What to do with an answer that has no score of this scorer after all attempts; null: `reward.on_failure`."""
    cache: bool = True
    """Exact duplicates may get the score of the first one, unless the scorer declares that it is not deterministic."""


class RewardSettings(Settings):
    """The reward service: a pool of processes that score answers."""

    scorers: tuple[ScorerSettings, ...] = (ScorerSettings(kind="math"),)
    """The scorers of the weighted sum. Evaluation averages the component `correct` (0 or 1) if a scorer returns it. []:
    nothing is scored, for workflows that create their own verdicts."""
    environment: EnvironmentSettings | None = None
    """Environment of episodes of several turns (`rollout.workflow: environment`); null: none. Without scorers and
    environment no service is started."""
    clip: ClipSettings | None = None
    """Bounds of the weighted sum; a gate's `otherwise` and `on_failure` are not clipped."""
    num_workers: int = Field(1, gt=0, le=limits.THREADS)
    """Number of scoring processes."""
    timeout_s: float = Field(30.0, gt=0, le=limits.SECONDS)
    """Wall-clock seconds after which a scoring process is killed and replaced; the verdict is then `timed_out`."""
    retries: int = Field(1, ge=0, le=limits.STEPS)
    """Further attempts after `timed_out` or `crashed`."""
    on_failure: OnFailure = "drop_sample"
    """What to do with an answer that has no score after all attempts; a number is used as its reward."""
    max_queue: int = Field(4096, gt=0, le=limits.GROUPS)
    """Number of requests that may wait in the service; further ones wait in the client, or are sent to another
    service.
    """
    num_spares: int = Field(1, ge=0, le=limits.THREADS)
    """Number of loaded scoring processes in addition to `num_workers`, which replace a killed one at once."""
    max_memory_mb: int = Field(4096, gt=0, le=limits.MEGABYTES)
    """Resident memory of a scoring process and its descendants; above it the process is killed and replaced."""
    recycle_after: int = Field(20_000, gt=0, le=limits.ROWS)
    """A scoring process is replaced after this many answers."""
    max_restarts: int = Field(5, ge=0, le=limits.STEPS)
    """Number of times that a dead service is restarted."""
    num_services: int = Field(1, gt=0, le=64)
    """Number of services that a run starts, each with `num_workers`; clients use the least loaded."""
    cache_mb: float = Field(64.0, ge=0, le=limits.MEGABYTES)
    """Size of a service's cache of scores of exact duplicates (same row, answer, scorer version); 0: no cache."""
    drain_s: float = Field(30.0, ge=0, le=limits.SECONDS)
    """Time that a service has, when it is stopped, for answers that it has accepted; further requests are refused, and
    sent to other services."""
    addresses: tuple[str, ...] = ()
    """Running services to use instead of starting any, `tcp://host:port`; the section `reward` is then defined by these
    services, except `on_failure`."""
    curve_dir: str | None = None
    """Folder with the keys of the services at `addresses` (`python -m services.reward keys`); null:
    ~/.config/areal_like/reward-keys, where a service that you start creates its own."""
    ask_for: str | None = None
    """The scorer of the services at `addresses` to use; null: their weighted sum of all scorers."""

    @property
    def keys_dir(self) -> Path:
        """`curve_dir` with `~` resolved, or the default folder of this user's services."""
        from areal_like.transport.credentials import service_keys_folder  # scoring processes need no transport

        return Path(self.curve_dir).expanduser() if self.curve_dir else service_keys_folder()

    @property
    def own_names(self) -> list[str]:
        """Names of the scorers; none if `scorers` has its default value, because then a shared service defines them."""
        is_default = self.scorers == type(self).model_fields["scorers"].default
        return [] if is_default else scorer_names(self.scorers)

    @property
    def failure_policies(self) -> dict[str, OnFailure]:
        """`on_failure` of the scorers that set it, by scorer name."""
        named = zip(scorer_names(self.scorers), self.scorers, strict=True)
        return {name: scorer.on_failure for name, scorer in named if scorer.on_failure is not None}

    @property
    def is_needed(self) -> bool:
        """Whether a service is needed."""
        return bool(self.scorers) or self.environment is not None

    @property
    def retries_of(self) -> dict[str, int]:
        """`retries` of the scorers that set it, by scorer name."""
        named = zip(scorer_names(self.scorers), self.scorers, strict=True)
        return {name: scorer.retries for name, scorer in named if scorer.retries is not None}


def scorer_names(scorers: tuple[ScorerSettings, ...]) -> list[str]:
    """Name of each scorer in verdicts and counters: its kind, with a number if a kind occurs again."""
    names: list[str] = []
    for scorer in scorers:
        name, number = scorer.kind, 2
        while name in names:
            name, number = f"{scorer.kind}#{number}", number + 1
        names.append(name)
    return names


def contradictions(reward: RewardSettings) -> Iterator[tuple[str, str, str]]:
    """Contradictions between settings: key below `reward`, fault, remedy. Single values are checked by pydantic.

    A program that uses up its limits must end before the scoring process that waits for it does.
    """
    yield from _contradictions_of_services(reward)
    if reward.environment is not None and (fault := name_fault(reward.environment.kind)):
        yield "environment.kind", *fault
    for index, scorer in enumerate(reward.scorers):
        found = SCORERS.get(scorer.kind)
        if found is None:
            continue
        where = f"scorers.{index}.options"
        try:
            options = found.options.model_validate(scorer.options)
        except ValidationError as error:
            yield _fault_of(error, found.options, where)
            continue
        if isinstance(options, CodeOptions):
            yield from _code_contradictions(options, reward, where)
        elif isinstance(options, EndpointOptions):
            needed_s = options.total_timeout_s + options.ROOM_S
            if needed_s > reward.timeout_s:
                what = f"{options.total_timeout_s:g} s is more than reward.timeout_s {reward.timeout_s:g} allows"
                yield (
                    f"{where}.total_timeout_s",
                    what,
                    f"set timeout_s to {needed_s:g} or more, or reduce total_timeout_s",
                )


def missing(reward: RewardSettings) -> Iterator[tuple[str, str, str]]:
    """Requirements of the scorers that this machine lacks: key below `reward`, fault, remedy."""
    for where, options in _usable_options(reward):
        for error in needs_of(options):
            yield f"{where}.options.{error.where}" if error.where else f"{where}.kind", error.what, error.remedy


def silent_endpoints(reward: RewardSettings) -> Iterator[tuple[str, str, str]]:
    """Servers of scorers and environments at which nothing listens now: key below `reward`, fault, remedy."""
    for where, options in _usable_options(reward):
        if (error := unreachable(options)) is not None:
            yield f"{where}.options.{error.where}", error.what, error.remedy
    environment = None if reward.addresses else reward.environment
    if environment is not None and environment.kind == "openenv":
        url = environment.options.get("url")
        if isinstance(url, str) and (error := silent(url, "url")) is not None:
            yield "environment.options.url", error.what, error.remedy


def _usable_options(reward: RewardSettings) -> Iterator[tuple[str, Settings]]:
    """Path and options of this run's own scorers with valid options; `contradictions` reports the others."""
    for index, scorer in enumerate(() if reward.addresses else reward.scorers):
        found = SCORERS.get(scorer.kind)
        if found is not None:
            with contextlib.suppress(ValidationError):
                yield f"scorers.{index}", found.options.model_validate(scorer.options)


def soft_zones(reward: RewardSettings) -> Iterator[tuple[str, int]]:
    """Path below `reward` of each scorer `overlong`, and the length in tokens at which its penalty begins."""
    for where, options in _usable_options(reward):
        if isinstance(options, OverlongOptions):
            yield where, options.max_tokens - options.soft_tokens


def _fault_of(error: ValidationError, kind: type[Settings], where: str) -> tuple[str, str, str]:
    """Key, fault and remedy of the first error in options."""
    first = error.errors()[0]
    key = ".".join(map(str, (where, *first["loc"])))
    known = (
        f"use one of the options {', '.join(kind.model_fields)}"
        if kind.model_fields
        else "remove this option; the scorer has none"
    )
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(first["loc"][-1]), kind.model_fields, n=1)
        return key, "there is no such option", f"did you mean {near[0]}?" if near else known
    what = str(first["msg"]).removeprefix("Value error, ")
    return key, what, f"set valid values; the options are {', '.join(kind.model_fields)}"


def _code_contradictions(options: CodeOptions, reward: RewardSettings, where: str) -> Iterator[tuple[str, str, str]]:
    needed_s = options.total_limit_s + options.ROOM_S
    if needed_s > reward.timeout_s:
        what = f"{options.total_limit_s:g} s for a program is more than reward.timeout_s {reward.timeout_s:g} allows"
        yield f"{where}.total_limit_s", what, f"set timeout_s to {needed_s:g} or more, or reduce total_limit_s"
    needed_mb = options.max_memory_limit_mb + options.ROOM_MB
    if needed_mb > reward.max_memory_mb:
        what = f"{options.max_memory_limit_mb} MB is more than reward.max_memory_mb {reward.max_memory_mb} allows"
        yield (
            f"{where}.max_memory_limit_mb",
            what,
            f"set max_memory_mb to {needed_mb} or more, or reduce max_memory_limit_mb",
        )


def _contradictions_of_services(reward: RewardSettings) -> Iterator[tuple[str, str, str]]:
    """Contradictions between the run's own services and those at `addresses`."""
    for index, address in enumerate(reward.addresses):
        if not re.fullmatch(r"tcp://[^/:]+:\d+|tcp://\[[^/]+\]:\d+", address):
            yield f"addresses.{index}", f"`{address}` is not a valid address", "write tcp://host:port"
        elif address in reward.addresses[:index]:
            yield f"addresses.{index}", f"`{address}` is listed twice", "list each service only once"
    if reward.addresses and reward.num_services != 1:
        yield (
            "num_services",
            "no services are started, because `addresses` lists running services",
            "remove one of the two keys",
        )
    for key in ("curve_dir", "ask_for"):
        if getattr(reward, key) is not None and not reward.addresses:
            yield key, "has no effect without `addresses`, because a run knows its own services", "remove this key"
