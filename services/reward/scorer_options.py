"""Options of the built-in scorers, except `code` (services/reward/code_options.py).

Does not import torch. Requirements on the machine are in scorer_needs.py, scorers in scorers/.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from areal_like import limits
from areal_like.external.settings import EndpointOptions, ModelEndpointOptions, checked_url
from areal_like.settings import DType, Settings


def _checked_regex(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"the pattern is not a valid regular expression ({error})") from error
    return pattern


Rule = Literal["pattern", "boxed", "marker", "last_number"]
"""Rules by which scorer `math` finds the final answer of a response."""
ALL_RULES: tuple[Rule, ...] = ("boxed", "marker", "last_number")


class MathOptions(Settings):
    """Options of scorer `math`: extraction and comparison of answers."""

    gold_field: str | None = None
    """Column of the gold answer; None: `answer`, `final_answer`, `gold`, or the box in `solution`."""
    rules: tuple[Rule, ...] = Field(ALL_RULES, min_length=1)
    """Rules for the final answer, in order; ["boxed"] accepts only boxed answers, ["pattern"] only matches of
    `pattern`."""
    pattern: str | None = None
    """Regular expression for the rule `pattern`; the first group (else all) of its last match is the answer."""
    must_stop: bool = False
    """A response truncated at the token limit counts as wrong."""
    float_digits: int = Field(6, ge=1, le=15)
    """Number of decimal places that are compared if one side is a decimal number."""
    max_response_chars: int = Field(50_000, gt=0, le=limits.CHARACTERS)
    """Number of characters at a response's end that are read."""
    max_answer_chars: int = Field(400, gt=0, le=limits.CHARACTERS)
    """A longer final answer is correct only if it equals the gold answer literally."""

    @field_validator("pattern")
    @classmethod
    def _pattern_compiles(cls, pattern: str | None) -> str | None:
        return None if pattern is None else _checked_regex(pattern)

    @model_validator(mode="after")
    def _pattern_and_rule_belong_together(self) -> MathOptions:
        if ("pattern" in self.rules) != (self.pattern is not None):
            raise ValueError(
                "rule `pattern` and option `pattern` must be set together, for example rules: [pattern, boxed],"
                " pattern: '<answer>(.*?)</answer>'"
            )
        return self


class FormatOptions(Settings):
    """Options of scorer `format`: conditions that an answer must all satisfy for a 1."""

    regex: str | None = None
    """Regular expression that must match (`re.search`, dot matches newlines); use ^ and $ to match the whole answer."""
    must_contain: tuple[str, ...] = ()
    """Texts that the answer must contain."""
    must_stop: bool = False
    """The model must have ended the answer, not the token limit."""

    @field_validator("regex")
    @classmethod
    def _regex_compiles(cls, pattern: str | None) -> str | None:
        return None if pattern is None else _checked_regex(pattern)

    @model_validator(mode="after")
    def _asks_for_something(self) -> FormatOptions:
        if self.regex is None and not self.must_contain and not self.must_stop:
            raise ValueError("the scorer checks nothing; set regex, must_contain or must_stop")
        return self


class NoOptions(Settings):
    """Options of scorer `running_sum`: there are none."""


class HttpOptions(EndpointOptions):
    """Options of scorer `http`: a server that scores answers."""

    url: str
    """Address that is sent `POST {"row", "response", "finish_reason", "num_tokens"}` as JSON."""
    columns: tuple[str, ...] | None = None
    """Columns of the row that are sent; null: all. A row without one of them is not scored."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Further headers; not for secrets: they are in the run's config.yaml."""
    is_deterministic: bool = True
    """Equal requests get equal scores, so exact duplicates may be answered from the cache."""

    @field_validator("url")
    @classmethod
    def _url_is_one(cls, url: str) -> str:
        return checked_url(url)

    @field_validator("headers")
    @classmethod
    def _no_secrets(cls, headers: dict[str, str]) -> dict[str, str]:
        for name, value in headers.items():
            if name.lower() in ("authorization", "proxy-authorization", "cookie", "x-api-key", "api-key"):
                raise ValueError(
                    f"the header `{name}` would be written into the run's config.yaml; use key_env or key_file"
                )
            if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name) or not value.isascii() or not value.isprintable():
                raise ValueError(
                    f"the HTTP header `{name}` has an invalid name or value; use printable ASCII characters"
                )
        return headers


class JudgeOptions(ModelEndpointOptions):
    """Options of scorer `llm_judge`: a model behind an OpenAI-compatible endpoint reads a rubric and gives a score."""

    rubric: str | None = None
    """Prompt of the judge, a Jinja template over `prompt`, `response`, `answer` and `row`."""
    rubric_file: str | None = None
    """File with the rubric."""
    system: str | None = None
    """System message."""
    parse: Literal["json", "regex"] = "json"
    """Source of the score: the last JSON object of the reply with `score_key`, or the last match of `score_regex`."""
    score_key: str = Field("score", min_length=1)
    """Key of the score in the JSON object."""
    score_regex: str = r"(?i)score\s*[:=]\s*\**\s*(-?\d+(?:\.\d+)?)"
    """Regular expression with one group: the score."""
    min_score: float = 0.0
    """Lowest score of the rubric; it becomes 0. A lower score is invalid."""
    max_score: float = 10.0
    """Highest score of the rubric; it becomes 1. A higher score is invalid."""
    correct_at: float | None = None
    """Score of the rubric from which an answer counts as correct; null: there is no component `correct`."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature of the judge; above 0 its scores are not cached."""
    max_tokens: int = Field(512, gt=0, le=limits.TOKENS)
    """Longest reply of the judge, in its tokens."""
    max_response_chars: int = Field(50_000, gt=0, le=limits.CHARACTERS)
    """Number of characters at an answer's end that the judge sees."""

    @field_validator("score_regex")
    @classmethod
    def _regex_has_a_group(cls, pattern: str) -> str:
        num_groups = re.compile(_checked_regex(pattern)).groups
        if num_groups != 1:
            raise ValueError(f"the pattern must have exactly one group, which captures the score, but has {num_groups}")
        return pattern

    @model_validator(mode="after")
    def _holds_together(self) -> JudgeOptions:
        if (self.rubric is None) == (self.rubric_file is None):
            raise ValueError("set exactly one of rubric and rubric_file")
        if self.rubric is not None and (fault := fault_of_template(self.rubric)):
            raise ValueError(f"the rubric {fault}")
        if self.min_score >= self.max_score:
            raise ValueError(f"min_score ({self.min_score:g}) must be less than max_score ({self.max_score:g})")
        if self.correct_at is not None and not self.min_score < self.correct_at <= self.max_score:
            raise ValueError(f"correct_at ({self.correct_at:g}) must be greater than min_score and at most max_score")
        names = {"model", "messages", "temperature", "max_tokens", "max_completion_tokens", "stream", "n"}
        if taken := sorted(names & set(self.extra_body)):
            raise ValueError(
                f"extra_body must not contain `{taken[0]}`, which areal_like sets; remove it from extra_body"
            )
        return self


TEMPLATE_NAMES = frozenset({"prompt", "response", "answer", "row"})
"""Names that a template may use."""


def fault_of_template(text: str, must_name: str = "response") -> str:
    """Why this Jinja template cannot be used, as a clause that follows its name; empty if it can."""
    from areal_like import templates  # most scoring processes need no Jinja

    if fault := templates.fault_of(text):
        return fault
    names = templates.names_in(text)
    if unknown := sorted(names - TEMPLATE_NAMES):
        return (
            f"uses the unknown name `{unknown[0]}`; the known names are {', '.join(sorted(TEMPLATE_NAMES))} (columns "
            "as row.NAME)"
        )
    if must_name not in names:
        return f"does not contain the answer; add {{{{ {must_name} }}}} to it"
    return ""


class OverlongOptions(Settings):
    """Options of scorer `overlong`: the soft penalty for long answers of DAPO (arXiv 2503.14476, section 3.4)."""

    max_tokens: int = Field(gt=0, le=limits.TOKENS)
    """L_max: length from which the whole penalty applies."""
    soft_tokens: int = Field(gt=0, le=limits.TOKENS)
    """L_cache: length of the zone below L_max in which the penalty grows linearly from 0."""
    penalty: float = Field(1.0, gt=0)
    """The whole penalty; the value is its negative."""
    cut_is_overlong: bool = False
    """An answer truncated at the token limit gets the whole penalty, whatever its length."""

    @model_validator(mode="after")
    def _zone_fits(self) -> OverlongOptions:
        if self.soft_tokens > self.max_tokens:
            raise ValueError(
                f"soft_tokens ({self.soft_tokens}) must not be greater than max_tokens ({self.max_tokens})"
            )
        return self


class LengthOptions(Settings):
    """Options of scorer `length`: 1 for a length between two bounds, less outside."""

    min_tokens: int = Field(0, ge=0, le=limits.TOKENS)
    """Shortest answer that gets a 1."""
    max_tokens: int | None = Field(None, gt=0, le=limits.TOKENS)
    """Longest answer that gets a 1; null: no upper bound."""
    margin_tokens: int = Field(0, ge=0, le=limits.TOKENS)
    """Number of tokens beyond a bound over which the value falls to 0; 0: at once."""

    @model_validator(mode="after")
    def _asks_for_something(self) -> LengthOptions:
        if not self.min_tokens and self.max_tokens is None:
            raise ValueError("the scorer checks nothing; set min_tokens or max_tokens")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must not be greater than max_tokens ({self.max_tokens})")
        return self


class ReasoningGymScorerOptions(Settings):
    """Options of scorer `reasoning_gym`: position of the answer that the row's task judges."""

    extract: Literal["tag", "last_line", "whole"] = "tag"
    """The answer is in the last <answer>...</answer>, in the last line, or the whole response."""
    must_stop: bool = False
    """A response truncated at the token limit counts as wrong."""
    max_answer_chars: int = Field(4000, gt=0, le=limits.CHARACTERS)
    """Longest answer in characters; a longer one is wrong."""


class RewardModelOptions(Settings):
    """Options of scorer `reward_model`: a Hugging Face classifier in a local folder scores answers, or their steps."""

    path: str = Field(min_length=1)
    """Folder with config.json, weights and tokenizer of a model for sequence or token classification."""
    template: str | None = None
    """Text that is scored, a Jinja template over `prompt`, `response`, `answer` and `row`; null: the tokenizer's chat
    template over prompt and answer, else the concatenated prompt and answer."""
    label: Annotated[int, Field(ge=0, le=limits.PROCESSES)] | str | None = None
    """Number or name of the class whose score is used; required if the model has several."""
    output: Literal["logit", "probability"] = "logit"
    """The class's raw score, or its probability: sigmoid for a model of one class, softmax for several."""
    step_separator: str | None = Field(None, min_length=1)
    """For process rewards: the text that ends each step of an answer; null: the answer is scored as a whole."""
    reduce: Literal["min", "mean", "last", "prod"] = "min"
    """Reduction of the steps' values to one; the steps' values are components."""
    max_steps: int = Field(48, gt=0, le=60)
    """Largest number of steps; further text belongs to the last one."""
    max_tokens: int = Field(4096, gt=0, le=limits.TOKENS)
    """Longest text, in the model's tokens."""
    on_long: Literal["cut", "invalid"] = "cut"
    """Handling of a longer text: use its end, with a remark, or give no score."""
    device: str = Field("cpu", pattern=r"^(cpu|cuda|cuda:\d+)$")
    """cpu, cuda or cuda:N; one copy of the model is loaded, whatever `num_workers`."""
    dtype: DType = "float32"
    """Dtype of weights and activations."""
    threads: int = Field(1, gt=0, le=limits.THREADS)
    """Number of compute threads on a CPU."""
    max_batch: int = Field(16, gt=0, le=limits.PROCESSES)
    """Number of texts in one forward pass; answers that wait while the model computes share the next one."""
    socket: str | None = None
    """Socket of the model's process; set by the service."""

    @model_validator(mode="after")
    def _holds_together(self) -> RewardModelOptions:
        if self.template is not None and (fault := fault_of_template(self.template)):
            raise ValueError(f"the template {fault}")
        if self.step_separator is not None and self.reduce == "prod" and self.output == "logit":
            raise ValueError("a product of logits is not meaningful; use output: probability")
        return self
