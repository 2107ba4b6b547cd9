"""Converts the options of a loss or advantage from the configuration to its settings class. Imports no torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pydantic
from pydantic import ConfigDict

from areal_like.errors import UserError
from areal_like.settings import Settings
from trainer.objectives.port import Fault


class _AnyOptions(Settings):
    """Accepts any options: for a function whose parameters cannot be inspected."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


def option_values(settings: Settings, keys: Sequence[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """Join `options` with those that are `keys` of `settings`."""
    return {**options, **{key: getattr(settings, key) for key in keys}}


def option_faults(model: type[Settings], settings: Settings, section: str, keys: Sequence[str] = ()) -> list[Fault]:
    """List the errors in the `options` of `settings`, which is the section `section` of the configuration.

    keys: fields of `model` that are keys of the section.
    """
    options: Mapping[str, Any] = getattr(settings, "options")  # noqa: B009 - sections have it
    known = [name for name in model.model_fields if name not in keys]
    remedy = f"use one of the options {', '.join(known)}" if known else "remove this option; there are none"
    faults = [
        Fault(f"{section}.options.{key}", f"is not an option: {key} is a key of {section}", f"set {section}.{key}")
        for key in keys
        if key in options
    ]
    try:
        model.model_validate(option_values(settings, keys, {k: v for k, v in options.items() if k not in keys}))
    except pydantic.ValidationError as error:
        for item in error.errors(include_url=False):
            path = ".".join(map(str, item["loc"]))
            key = f"{section}.{path}" if item["loc"] and item["loc"][0] in keys else f"{section}.options.{path}"
            if item["type"] == "extra_forbidden":
                faults.append(Fault(key, "there is no such option", remedy))
            elif item["type"] == "missing":
                faults.append(Fault(key, "is required", "set it"))
            else:
                faults.append(Fault(key.removesuffix("."), *_words(item, model)))
    return faults


def _words(item: Any, model: type[Settings]) -> tuple[str, str]:
    """Return the error in a value, and the remedy."""
    what = str(item["msg"]).removeprefix("Value error, ")
    if not item["loc"]:
        return what, "see docs/algorithms.md"
    field = model.model_fields.get(str(item["loc"][0]))
    default = (
        f"{field.default} unless set" if field is not None and not field.is_required() else "see docs/algorithms.md"
    )
    return f"{what[:1].lower()}{what[1:]}, not {item['input']!r}", default


def options_of(model: type[Settings], settings: Settings, section: str, keys: Sequence[str] = ()) -> Any:
    """Create the options. Raises UserError for the first error."""
    for fault in option_faults(model, settings, section, keys):
        raise UserError(fault.what, where=fault.key, remedy=fault.remedy)
    options: Mapping[str, Any] = getattr(settings, "options")  # noqa: B009
    return model.model_validate(option_values(settings, keys, options))


def options_of_function(function: Callable[..., Any], num_inputs: int) -> type[Settings]:
    """Create a settings class from the parameters that `function` has after its first `num_inputs`.

    Inputs are passed by position: `*inputs` may receive them all, and a keyword-only parameter is never an input.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return _AnyOptions
    parameters = [
        one
        for place, one in enumerate(signature.parameters.values())
        if place >= num_inputs or one.kind in (one.KEYWORD_ONLY, one.VAR_KEYWORD)
    ]
    named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    fields: dict[str, Any] = {
        one.name: (Any, ... if one.default is one.empty else one.default)
        for one in named
        if not one.name.startswith("_")
    }
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
    base = _AnyOptions if takes_any else _FunctionOptions
    return pydantic.create_model("FunctionOptions", __base__=base, **fields)


class _FunctionOptions(Settings):
    """Options of a function: names are checked, values are left to the function."""

    model_config = ConfigDict(protected_namespaces=(), validate_default=False)


def keywords(options: Settings) -> dict[str, Any]:
    """Convert options back to keyword arguments with unchanged values."""
    return {name: getattr(options, name) for name in type(options).model_fields} | (options.model_extra or {})
