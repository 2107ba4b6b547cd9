"""Settings of the section data: what the policy is trained and evaluated on."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from areal_like import limits
from areal_like.settings import Settings
from controller.config.curriculum_settings import CurriculumSettings


class DataSource(Settings):
    """Where rows come from: exactly one of `path`, `dataset` and `generator`."""

    path: str | None = None
    """JSON Lines (.jsonl, .jsonl.gz), .json or .parquet; a file or a glob; relative to the current folder."""
    dataset: str | None = None
    """A Hugging Face dataset: hub name or local folder (needs the extra `[datasets]`)."""
    generator: str | None = None
    """`running_sum`, `tool_sum`, `guess_number`, `reasoning_gym`, `episodes` (for environments with tasks of their
    own), or `module:function` of your own, called as function(seed, split, limit=..., options=...)."""
    split: str | None = None
    """Split of a dataset or generator; null: `train`, and for data.eval `eval` of a generator, `test` of a dataset."""
    config: str | None = None
    """Configuration (subset) of a dataset, such as `main` for GSM8K."""
    limit: int | None = Field(None, gt=0, le=limits.ROWS)
    """Take the first rows only; null: all (a generator makes 20000)."""
    columns: dict[str, str | None] = Field(default_factory=dict)
    """Your column for `prompt`, `messages`, `answer` or `response`; dots select nested columns; answer: null means
    that there is none. GSM8K's and MATH's published columns need no mapping."""
    template: str | None = None
    """Builds the prompt from several columns: a Jinja template over them, such as `{{ text }} {{ tests[0] }}`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the generator."""

    @property
    def kind(self) -> str:
        """`path`, `dataset` or `generator`: the first that is given; empty if none is."""
        return next((kind for kind in ("path", "dataset", "generator") if getattr(self, kind) is not None), "")


class MixedSource(DataSource):
    """One more set of rows, and how often it is drawn from."""

    ratio: float = Field(1.0, gt=0)
    """Draws from this set for each one from data.train."""
    end_ratio: float | None = Field(None, gt=0)
    """The ratio of the last step, which `ratio` moves to in a straight line; null: it stays."""


class DataSettings(Settings):
    """What the policy is trained and evaluated on."""

    train: DataSource
    """Rows that prompts are drawn from."""
    mix: tuple[MixedSource, ...] = ()
    """Further sets that prompts are drawn from, each with its ratio to data.train."""
    eval: DataSource | None = None
    """Held-out rows; null: no evaluation, and no accuracy in the summary."""
    shuffle: bool = True
    """Shuffle each epoch, as a pure function of the data seed."""
    seed: int | None = Field(None, ge=0, lt=2**63)
    """Data seed: draw order and generated rows; null: the run's seed."""
    epochs: int | None = Field(None, gt=0, le=limits.STEPS)
    """Maximum number of passes over the rows; the run ends when they are used up; null: as many as num_steps needs."""
    on_long_prompt: Literal["drop", "stop"] = "drop"
    """A prompt that leaves no room for an answer in the context: drop its group (counted), or stop the run."""
    curriculum: CurriculumSettings | None = None
    """Draw rows less often that were always or never solved lately; `{}` takes the defaults; null: every row alike."""
