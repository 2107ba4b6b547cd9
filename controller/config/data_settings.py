"""Settings of the section data: what the policy is trained and evaluated on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from areal_like import limits
from areal_like.red_team import RED_TEAM
from areal_like.settings import Settings
from controller.config.curriculum_settings import CurriculumSettings


class DataSource(Settings):
    """Where rows come from: exactly one of `path`, `dataset` and `generator`."""

    path: str | None = None
    """JSON Lines (.jsonl, .jsonl.gz), .json or .parquet; a file or a glob; relative to the current folder."""
    dataset: str | None = None
    """A Hugging Face dataset: hub name or local folder (needs the `[datasets]` extra)."""
    generator: str | None = None
    """`running_sum`, `tool_sum`, `guess_number`, `reasoning_gym`, `episodes` (for environments that generate their own
    tasks), `traffic` (for the workflow of this name), or `module:function` of your own, called as function(seed, split,
    limit=..., options=...).
    """
    split: str | None = None
    """Split of a dataset or generator; null: `train`, and for data.eval `eval` of a generator, `test` of a dataset."""
    config: str | None = None
    """Configuration (subset) of a dataset, such as `main` for GSM8K."""
    limit: int | None = Field(None, gt=0, le=limits.ROWS)
    """Use only the first rows; null: all (a generator makes 20000)."""
    columns: dict[str, str | None] = Field(default_factory=dict)
    """Your column for `prompt`, `messages`, `answer` or `response`; dots select nested columns; `answer: null` means
    that there is none. The columns of GSM8K and MATH as published need no mapping.
    """
    template: str | None = None
    """Builds the prompt from several columns: a Jinja template over them, such as `{{ text }} {{ tests[0] }}`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the generator."""
    system_prompt: str | None = Field(None, min_length=1, max_length=limits.CHARACTERS)
    """Put before the messages, or the prompt, of every row as the system's message; needs a chat template."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the chat template, such as `enable_thinking: false`."""

    @property
    def kind(self) -> str:
        """`path`, `dataset` or `generator`: the first that is given; empty if none is."""
        return next((kind for kind in ("path", "dataset", "generator") if getattr(self, kind) is not None), "")

    @property
    def chat(self) -> dict[str, Any]:
        """What every row says of the chat template, as `areal_like.prompts.CHAT_COLUMN` has it"""
        chat: dict[str, Any] = {} if self.system_prompt is None else {"system_prompt": self.system_prompt}
        return chat | ({"kwargs": self.chat_template_kwargs} if self.chat_template_kwargs else {})


class StageSettings(Settings):
    """A stage that removes rows; a name alone is `kind`."""

    kind: str
    """A built-in stage (docs/cleaning.md), or your own `module:NAME`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the stage."""

    @model_validator(mode="before")
    @classmethod
    def _name_is_kind(cls, data: Any) -> Any:
        return {"kind": data} if isinstance(data, str) else data


class TrainSource(DataSource):
    """Rows that prompts are drawn from."""

    stages: tuple[StageSettings, ...] = ()
    """Stages of `areal-like data clean` that remove rows before a run starts; the kept rows and what was removed are
    in the run's folder `data/train`. Needs `path`."""
    follow: bool = False
    """The file of `path` (.jsonl), or the .jsonl files of the folder, grow while the run trains: lines and files that
    were added enter at the next epoch."""
    new_share: float | None = Field(None, gt=0, le=1)
    """With `follow`: share of the draws that are rows which were added since the epoch began, as long as there are any;
    null: they wait for the next epoch."""


class MixedSource(DataSource):
    """One more set of rows, and how often it is drawn from."""

    ratio: float = Field(1.0, gt=0)
    """Draws from this set for each one from data.train."""
    end_ratio: float | None = Field(None, gt=0)
    """The ratio at the last step, to which `ratio` changes linearly; null: constant."""


class DataSettings(Settings):
    """What the policy is trained and evaluated on."""

    train: TrainSource
    """Rows that prompts are drawn from."""
    mix: tuple[MixedSource, ...] = ()
    """Further sets that prompts are drawn from, each with its ratio to data.train."""
    eval: DataSource | None = None
    """Held-out rows; null: no evaluation, and no accuracy in the summary. A mapping of names to sources means
    data.eval_sets."""
    eval_sets: dict[str, DataSource] = Field(default_factory=dict)
    """Several sets of held-out rows by name, instead of data.eval. Each has numbers of its own (`accuracy/NAME`), and
    `accuracy` is their mean."""
    red_team: DataSource | None = None
    """Prompts that the policy should refuse, evaluated together with data.eval: `red_team_refused` and
    `red_team_unsafe` are shares of the answers, judged by rollout.red_team. They do not count for the accuracy."""
    shuffle: bool = True
    """Shuffle each epoch, as a pure function of the data seed."""
    seed: int | None = Field(None, ge=0, lt=2**63)
    """Data seed: draw order and generated rows; null: the run's seed."""
    epochs: int | None = Field(None, gt=0, le=limits.STEPS)
    """Maximum number of passes over the rows; the run ends when they are used up; null: as many as num_steps needs."""
    on_long_prompt: Literal["drop", "stop"] = "drop"
    """What to do with a prompt that leaves no room for an answer in the context: drop its group (counted), or stop the
    run. It holds for each row that can never run, also where a workflow or a teacher refuses it. A prompt that a stage
    of `rollout.safety` refuses is always dropped.
    """
    curriculum: CurriculumSettings | None = None
    """Draw rows less often that were recently always or never solved; `{}` uses the defaults; null: all rows equally.
    """

    @model_validator(mode="before")
    @classmethod
    def _named_sources_are_sets(cls, data: Any) -> Any:
        """`eval: {NAME: {...}}` is `eval_sets`; a set that is given there too, such as by an override, is merged."""
        given = data.get("eval") if isinstance(data, Mapping) else None
        if not isinstance(given, Mapping) or not given or not _are_sources(given):
            return data
        more = data.get("eval_sets") or {}
        if not isinstance(more, Mapping):
            return data
        merged = {name: {**given.get(name, {}), **(more.get(name) or {})} for name in {**given, **more}}
        return {**data, "eval": None, "eval_sets": merged}

    @property
    def eval_sources(self) -> dict[str, DataSource]:
        """Sets of held-out rows by name; a single one, data.eval, has the empty name, and the last one may be
        `red_team`"""
        sets = dict(self.eval_sets) if self.eval is None else {"": self.eval}
        return sets if self.red_team is None else {**sets, RED_TEAM: self.red_team}

    @property
    def accuracy_sets(self) -> tuple[str, ...]:
        """Names of the sets that the accuracy is computed from"""
        return tuple(name for name in self.eval_sources if not (name == RED_TEAM and self.red_team is not None))


def eval_key(name: str, data: DataSettings) -> str:
    """Key of a set of held-out rows in the configuration."""
    if name == RED_TEAM and data.red_team is not None:
        return "data.red_team"
    return f"data.eval_sets.{name}" if name else "data.eval"


def _are_sources(given: Mapping[str, Any]) -> bool:
    """Whether this names sources, and is not one."""
    return not given.keys() & DataSource.model_fields.keys() and all(isinstance(one, Mapping) for one in given.values())
