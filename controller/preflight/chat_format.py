"""Checks before a start whether the run's tokenizer has the chat template that a workflow needs, and whether the
template shows how the model writes tool calls.

The formats are in rollout/chat/formats.py. Tokenizers that are not on this machine are checked by the rollout workers.
Of the built-in tokenizers the ones for chats have a template that shows a format; the others have no template.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from areal_like.config import BUILT_IN_CHAT_TOKENIZERS, BUILT_IN_TOKENIZERS
from areal_like.errors import UserError
from controller.config import model_folder
from controller.config.data_settings import eval_key
from controller.config.problems import Problem
from controller.config.run_config import DataSource, RunConfig
from rollout.chat.formats import find_format

KEY = "rollout.workflow_options.format"


def problems_of(config: RunConfig) -> Iterator[Problem]:
    """Problems of rows and of the workflows `tools`, `agent` and `traffic`: no template; for `tools` also an unknown
    format, or a template that shows none.
    """
    yield from _row_problems(config)
    workflow = config.rollout.workflow
    if workflow not in ("tools", "agent", "traffic"):
        return
    name, tokenizer, folder = config.rollout.workflow_options.get("format"), config.model.tokenizer, _folder(config)
    is_built_in = tokenizer in BUILT_IN_TOKENIZERS
    if (folder is None and not is_built_in) or tokenizer in BUILT_IN_CHAT_TOKENIZERS:
        return
    template = chat_template(folder) if folder is not None else ""
    if workflow != "tools":  # the others work without tools if the format is unknown
        if not template:
            name = tokenizer if is_built_in else folder
            what = f"{name} has no chat template, which the workflow `{workflow}` requires"
            yield Problem(("model.tokenizer",), what, "choose a tokenizer with a chat template")
        return
    try:
        if name is not None and not template:  # a configured format does not declare the tools
            raise UserError(
                "the tokenizer has no chat template", remedy="set model.tokenizer to a tokenizer with a chat template"
            )
        find_format(template, name=name, where=KEY)
    except UserError as error:
        yield Problem((KEY,), f"{tokenizer if is_built_in else folder}: {error.what}", error.remedy)


def _row_problems(config: RunConfig) -> Iterator[Problem]:
    """Of rows with a system prompt or arguments of the template."""
    folder = _folder(config)
    if folder is None or chat_template(folder):
        return
    sources: dict[str, DataSource] = {"data.train": config.data.train}
    sources |= {eval_key(name, config.data): one for name, one in config.data.eval_sources.items()}
    sources |= {f"data.mix.{number}": source for number, source in enumerate(config.data.mix)}
    for path, source in sources.items():
        for key in ("system_prompt", "chat_template_kwargs"):
            if getattr(source, key):
                what = f"this key requires a chat template, but the tokenizer of {folder} has none"
                yield Problem(
                    (f"{path}.{key}", "model.tokenizer"),
                    what,
                    "remove this key, or choose a tokenizer with a chat template",
                )


def chat_template(folder: Path) -> str:
    """All chat templates of a tokenizer's folder, concatenated; empty if it has none or its files are damaged."""
    found = [path.read_text("utf-8", "replace") for path in sorted(folder.glob("chat_template.jinja"))]
    found += [path.read_text("utf-8", "replace") for path in sorted(folder.glob("additional_chat_templates/*.jinja"))]
    for file in ("tokenizer_config.json", "chat_template.json"):
        try:
            found += _texts(json.loads((folder / file).read_text("utf-8")).get("chat_template"))
        except (OSError, ValueError, AttributeError):
            continue
    return "\n".join(found)


def _texts(value: Any) -> list[str]:
    """Text of one template, or of a list of {name, template}."""
    if isinstance(value, str):
        return [value]
    return [str(one.get("template", "")) for one in value or () if isinstance(one, dict)]


def _folder(config: RunConfig) -> Path | None:
    """Folder of the tokenizer, if it is on this machine."""
    name = config.model.tokenizer
    if name in BUILT_IN_TOKENIZERS or ":" in name:
        return None
    place = config.model.path if name == "from_model" else name
    try:
        return model_folder.find_model(place) if place is not None else None
    except UserError:  # reported by the checks of the model
        return None
