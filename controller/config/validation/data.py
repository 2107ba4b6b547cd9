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
from areal_like.red_team import RED_TEAM, RedTeamSettings
from controller.config.data_settings import eval_key
from controller.config.problems import Problem
from controller.config.run_config import BUILT_IN_GENERATORS, DataSource, RunConfig

_NOT_FOLLOWED = (".json", ".gz", ".parquet", ".csv", ".tsv", ".txt")
"""Ends of names of files to which no lines of JSON can be appended."""


def data_problems(config: RunConfig) -> Iterator[Problem]:
    """Problems of the data sources: no source given, and settings that have no effect or are mutually exclusive."""
    sources: list[tuple[str, DataSource]] = [("data.train", config.data.train)]
    sources += [(f"data.mix.{number}", source) for number, source in enumerate(config.data.mix)]
    for name, source in config.data.eval_sources.items():
        sources.append((eval_key(name, config.data), source))
    for name in config.data.eval_sets:
        if re.fullmatch(r"[A-Za-z0-9_.-]{1,40}", name) is None:
            what = f"`{name}` cannot be used in metric names, so it is not a valid name for an evaluation set"
            yield Problem((f"data.eval_sets.{name}",), what, "use a name of up to 40 letters, digits, _, . and -")
    if config.data.red_team is not None:
        if not config.data.accuracy_sets:
            yield Problem(
                ("data.red_team", "data.eval"),
                "this set is evaluated together with data.eval, which is not set",
                "set data.eval",
            )
        if RED_TEAM in config.data.eval_sets:
            what = "this name is reserved for the set data.red_team"
            yield Problem((f"data.eval_sets.{RED_TEAM}",), what, "choose a different name")
    elif config.rollout.red_team != RedTeamSettings():
        yield Problem(
            ("rollout.red_team", "data.red_team"),
            "this section has no effect without data.red_team",
            "set data.red_team",
        )
    if config.data.eval is not None and config.data.eval_sets:
        what = "data.eval and data.eval_sets are mutually exclusive"
        yield Problem(("data.eval_sets", "data.eval"), what, "set only data.eval or only data.eval_sets")
    if config.eval.num_samples > 1 and config.eval.temperature == 0:
        what = "the answers of a greedy policy to one prompt are identical"
        yield Problem(("eval.num_samples", "eval.temperature"), what, "set eval.temperature above 0, for example 1.0")
    if config.warm_start is not None:
        sources.append(("warm_start.data", config.warm_start.data))
    for path, source in sources:
        yield from _source(path, source)
        yield from _chat(path, source, config)
    if config.data.train.stages and config.data.train.kind not in ("path", ""):
        what = f"this section can only clean files, but the rows come from a {config.data.train.kind}"
        remedy = "write the rows to a file, and set data.train.path"
        yield Problem(("data.train.stages", f"data.train.{config.data.train.kind}"), what, remedy)
    yield from _follow(config)
    if config.data.mix and config.data.epochs is not None:
        yield Problem(
            ("data.epochs", "data.mix"),
            "this key counts passes over a single data set, but data.mix adds data sets, which would complete a pass "
            "at different times",
            "set data.epochs: null, and set num_steps to the length of the run",
        )
    if config.eval.every_steps and not config.data.eval_sources:
        yield Problem(
            ("eval.every_steps", "data.eval"),
            f"evaluation is enabled (every_steps: {config.eval.every_steps}), but data.eval is not set",
            "set data.eval, or eval.every_steps: 0",
        )
    if config.data.curriculum is not None and config.data.epochs == 1:
        yield Problem(
            ("data.curriculum", "data.epochs"),
            "a curriculum selects rows by their earlier rewards, but with a single epoch no row is used twice",
            "set data.epochs to 2 or more, or data.curriculum: null",
        )


def _follow(config: RunConfig) -> Iterator[Problem]:
    train, key = config.data.train, "data.train.follow"
    if not train.follow:
        if train.new_share is not None:
            yield Problem(
                ("data.train.new_share", key), "this key has no effect without data.train.follow", f"set {key}: true"
            )
        return
    # Whether it is a folder is found when it is read; a folder may have a dot in its name.
    if train.path is None or train.path.endswith(_NOT_FOLLOWED) or any(sign in train.path for sign in "*?["):
        yield Problem(
            (key, "data.train.path"),
            "this key requires a single .jsonl file to which lines are appended, or a folder of such files",
            "set data.train.path to a .jsonl file, or to a folder of .jsonl files",
        )
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
                f"remove {key} or {other}; {other} requires all rows to be known at the start",
            )


def _source(path: str, source: DataSource) -> Iterator[Problem]:
    given = [kind for kind in ("path", "dataset", "generator") if getattr(source, kind) is not None]
    keys = (path, f"{path}.path", f"{path}.dataset", f"{path}.generator")
    if not given:
        yield Problem(
            keys,
            "this section specifies no source of rows",
            f"set one of {path}.path, {path}.dataset, {path}.generator",
        )
        return
    if len(given) > 1:
        yield Problem(keys, f"{' and '.join(given)} are mutually exclusive", f"set only {' or only '.join(given)}")
        return
    kind = given[0]
    if not getattr(source, kind):
        yield Problem((f"{path}.{kind}",), "the value is empty", "set a value, or remove this key")
    meaningless = {"path": ("split", "config", "options"), "dataset": ("options",), "generator": ("config", "columns")}
    for key in meaningless[kind]:
        if getattr(source, key):
            yield Problem((f"{path}.{key}",), f"this key has no effect with {path}.{kind}", "remove this key")
    for key in source.columns:
        if key not in ("prompt", "messages", "answer", "response"):
            yield Problem(
                (f"{path}.columns.{key}",),
                "this key is not a role to which a column can be mapped (other columns are kept under their own names)",
                "use prompt, messages, answer or response as the key, and the name of your column as the value",
            )
        elif source.columns[key] is None and key != "answer":
            yield Problem(
                (f"{path}.columns.{key}",),
                "the value must be the name of a column",
                "set the name of a column; only `answer` may be null, for rows without answers",
            )
    if {"prompt", "messages"} <= source.columns.keys():
        yield Problem(
            (f"{path}.columns",), "prompt and messages are mutually exclusive", "set only prompt or only messages"
        )
    if (
        kind == "generator"
        and source.generator
        and source.generator not in BUILT_IN_GENERATORS
        and not is_import_path(source.generator)
    ):
        known = f"{', '.join(BUILT_IN_GENERATORS)}, or module:function"
        yield Problem((f"{path}.generator",), f"there is no generator `{source.generator}`", f"use one of {known}")
    if kind == "generator" and (source.limit or 0) > limits.GENERATED_ROWS:
        yield Problem(
            (f"{path}.limit",),
            f"{source.limit:,} generated rows would have to be kept in memory",
            f"set a limit of at most {limits.GENERATED_ROWS:,}",
        )
    if source.template is not None and ({"prompt", "messages"} & source.columns.keys()):
        yield Problem(
            (f"{path}.template",),
            f"this key defines the prompt, but {path}.columns defines it too",
            f"remove this key, or remove prompt and messages from {path}.columns",
        )
    if source.template is not None and (fault := templates.fault_of(source.template)):
        yield Problem((f"{path}.template",), fault, "write column names in double braces: {{ name }}")


def _chat(path: str, source: DataSource, config: RunConfig) -> Iterator[Problem]:
    """Settings of a source for the chat template that would have no effect."""
    keys = [key for key in ("system_prompt", "chat_template_kwargs") if getattr(source, key)]
    template, workflow = config.rollout.prompt_template, config.rollout.workflow
    for key in keys:
        name = f"{path}.{key}"
        if template is not None:
            what = "this key requires the chat template, which rollout.prompt_template replaces"
            yield Problem((name, "rollout.prompt_template"), what, "set rollout.prompt_template: null")
        if config.model.tokenizer in set(BUILT_IN_TOKENIZERS) - set(BUILT_IN_CHAT_TOKENIZERS):
            what = f"this key requires a chat template, but {config.model.tokenizer} has none"
            yield Problem(
                (name, "model.tokenizer"), what, "remove this key, or choose a tokenizer with a chat template"
            )
        if key == "system_prompt" and workflow in ("agent", "verifiers", "traffic") and path != "warm_start.data":
            what = f"this key has no effect with rollout.workflow: {workflow}, whose programs create the messages"
            yield Problem((name, "rollout.workflow"), what, "remove this key")
    for word in source.chat_template_kwargs.keys() & set(RESERVED_KWARGS):
        what = "areal_like sets this argument of the chat template itself"
        yield Problem((f"{path}.chat_template_kwargs.{word}",), what, "remove this key")
