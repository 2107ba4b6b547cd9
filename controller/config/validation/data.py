"""Cross-checks of the data settings: those that cannot work, and those that would have no effect.

They read only the configuration; rows are read in controller/data.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from areal_like import limits, templates
from areal_like.config import BUILT_IN_CHAT_TOKENIZERS, BUILT_IN_TOKENIZERS
from areal_like.import_path import is_import_path
from areal_like.prompts import RESERVED_KWARGS
from controller.config.problems import Problem
from controller.config.run_config import BUILT_IN_GENERATORS, DataSource, RunConfig


def data_problems(config: RunConfig) -> Iterator[Problem]:
    """Problems of the data sources: no source given, and settings that have no effect or are mutually exclusive."""
    sources: list[tuple[str, DataSource]] = [("data.train", config.data.train)]
    sources += [(f"data.mix.{number}", source) for number, source in enumerate(config.data.mix)]
    for name, source in config.data.eval_sources.items():
        sources.append((f"data.eval_sets.{name}" if name else "data.eval", source))
    for name in config.data.eval_sets:
        if re.fullmatch(r"[A-Za-z0-9_.-]{1,40}", name) is None:
            what = "is not a valid name of a set, which becomes part of metric names"
            yield Problem((f"data.eval_sets.{name}",), what, "use up to 40 letters, digits, _, . and -")
    if config.data.eval is not None and config.data.eval_sets:
        yield Problem(("data.eval_sets", "data.eval"), "are mutually exclusive", "keep one of them")
    if config.eval.num_samples > 1 and config.eval.temperature == 0:
        what = "the answers of a greedy policy to one prompt are identical"
        yield Problem(("eval.num_samples", "eval.temperature"), what, "set eval.temperature above 0, for example 1.0")
    if config.warm_start is not None:
        sources.append(("warm_start.data", config.warm_start.data))
    for path, source in sources:
        yield from _source(path, source)
        yield from _chat(path, source, config)
    if config.data.train.stages and config.data.train.kind not in ("path", ""):
        what = f"clean files, but the rows are of a {config.data.train.kind}"
        remedy = "write the rows to a file, and set data.train.path"
        yield Problem(("data.train.stages", f"data.train.{config.data.train.kind}"), what, remedy)
    yield from _follow(config)
    if config.data.mix and config.data.epochs is not None:
        yield Problem(
            ("data.epochs", "data.mix"),
            "counts passes over a single set, but several are mixed: the one with the largest ratio would end the run",
            "set data.epochs: null, and set the run length with num_steps",
        )
    if config.eval.every_steps and not config.data.eval_sources:
        yield Problem(
            ("eval.every_steps", "data.eval"),
            f"asks for an evaluation every {config.eval.every_steps} steps, but data.eval is not set",
            "set data.eval, or eval.every_steps: 0",
        )
    if config.data.curriculum is not None and config.data.epochs == 1:
        yield Problem(
            ("data.curriculum", "data.epochs"),
            "chooses rows by their earlier rewards, but with one epoch no row is used again",
            "set data.epochs to 2 or more, or data.curriculum: null",
        )


def _follow(config: RunConfig) -> Iterator[Problem]:
    train, key = config.data.train, "data.train.follow"
    if not train.follow:
        return
    if train.path is None or not train.path.endswith(".jsonl") or any(sign in train.path for sign in "*?["):
        yield Problem((key, "data.train.path"), "needs one .jsonl file, to which lines are appended", "name the file")
    others = {
        "data.train.stages": bool(train.stages), "data.train.limit": train.limit is not None,
        "data.mix": bool(config.data.mix), "data.epochs": config.data.epochs is not None,
        "data.curriculum": config.data.curriculum is not None,
    }  # fmt: skip
    for other, is_set in others.items():
        if is_set:
            yield Problem(
                (key, other),
                f"{key} and {other} are mutually exclusive",
                f"remove one of them; {other} needs all rows at the start",
            )


def _source(path: str, source: DataSource) -> Iterator[Problem]:
    given = [kind for kind in ("path", "dataset", "generator") if getattr(source, kind) is not None]
    keys = (path, f"{path}.path", f"{path}.dataset", f"{path}.generator")
    if not given:
        yield Problem(keys, "names no source", f"give one of {path}.path, {path}.dataset, {path}.generator")
        return
    if len(given) > 1:
        yield Problem(keys, f"{' and '.join(given)} are mutually exclusive", "keep one of them")
        return
    kind = given[0]
    if not getattr(source, kind):
        yield Problem((f"{path}.{kind}",), "is empty")
    meaningless = {"path": ("split", "config", "options"), "dataset": ("options",), "generator": ("config", "columns")}
    for key in meaningless[kind]:
        if getattr(source, key):
            yield Problem((f"{path}.{key}",), f"has no effect with {path}.{kind}", "remove it")
    for key in source.columns:
        if key not in ("prompt", "messages", "answer", "response"):
            yield Problem(
                (f"{path}.columns.{key}",),
                "is not a column that can be mapped (other columns are kept under their own names)",
                "the left side is prompt, messages, answer or response; the right side is your column",
            )
        elif source.columns[key] is None and key != "answer":
            yield Problem(
                (f"{path}.columns.{key}",), "must name a column", "only `answer` may be null (rows without answers)"
            )
    if {"prompt", "messages"} <= source.columns.keys():
        yield Problem((f"{path}.columns",), "prompt and messages are mutually exclusive", "keep one of them")
    if (
        kind == "generator"
        and source.generator
        and source.generator not in BUILT_IN_GENERATORS
        and not is_import_path(source.generator)
    ):
        known = f"{', '.join(BUILT_IN_GENERATORS)}, or module:function"
        yield Problem((f"{path}.generator",), f"no generator `{source.generator}`", known)
    if kind == "generator" and (source.limit or 0) > limits.GENERATED_ROWS:
        yield Problem(
            (f"{path}.limit",),
            f"{source.limit:,} generated rows would all be kept in memory",
            f"at most {limits.GENERATED_ROWS:,}",
        )
    if source.template is not None and ({"prompt", "messages"} & source.columns.keys()):
        yield Problem((f"{path}.template",), f"defines the prompt, and so does {path}.columns", "keep one of them")
    if source.template is not None and (fault := templates.fault_of(source.template)):
        yield Problem((f"{path}.template",), fault, "write names of columns in {{ }}")


def _chat(path: str, source: DataSource, config: RunConfig) -> Iterator[Problem]:
    """Settings of a source for the chat template that would have no effect."""
    keys = [key for key in ("system_prompt", "chat_template_kwargs") if getattr(source, key)]
    template, workflow = config.rollout.prompt_template, config.rollout.workflow
    for key in keys:
        name = f"{path}.{key}"
        if template is not None:
            what = "requires the chat template, which rollout.prompt_template replaces"
            yield Problem((name, "rollout.prompt_template"), what, "rollout.prompt_template: null")
        if config.model.tokenizer in set(BUILT_IN_TOKENIZERS) - set(BUILT_IN_CHAT_TOKENIZERS):
            what = f"requires a chat template, but {config.model.tokenizer} has none"
            yield Problem((name, "model.tokenizer"), what, "remove it, or choose another tokenizer")
        if key == "system_prompt" and workflow in ("agent", "verifiers", "traffic") and path != "warm_start.data":
            what = f"has no effect with rollout.workflow: {workflow}, whose programs write the messages"
            yield Problem((name, "rollout.workflow"), what, "remove it")
    for word in source.chat_template_kwargs.keys() & set(RESERVED_KWARGS):
        what = "is an argument of the chat template that this program sets itself"
        yield Problem((f"{path}.chat_template_kwargs.{word}",), what, "remove it")
