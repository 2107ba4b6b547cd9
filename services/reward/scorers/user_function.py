"""Scorer `module:function`: the user's own code, sync or async.

    def score(row: dict, response: str, *, finish_reason: str, num_tokens: int, **options) -> float | dict[str, float]

It finds the function, checks its signature, and calls it in a scoring process, which may be killed. A dict needs the
key `value` or `reward`; its other keys become components. A dict needs the key `value` or `reward`; its other keys
become components. Processes that a sample leaves behind are killed after it; helpers that should keep running must be
started at import.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from areal_like.errors import UserError
from areal_like.import_path import import_object
from services.reward.scorers.port import ScorerInput

if TYPE_CHECKING:
    import asyncio

EXPECTED = "def score(row, response, **info) -> float or dict"


class Foreign(NamedTuple):
    """Reward functions of another system: names of their first two parameters, and how to call one from ours."""

    system: str
    names: tuple[str, ...]
    call: str


_FOREIGN = (
    Foreign(
        "OpenRLHF",
        ("queries", "labels"),
        "return float(yours([row['prompt'] + response], [row['prompt']], [row['answer']])['rewards'][0])",
    ),
    Foreign(
        "TRL",
        ("prompts", "completions", "completion_ids"),
        "return yours(prompts=[row['prompt']], completions=[response])[0]",
    ),
    Foreign(
        "verl",
        ("data_source", "solution_str", "ground_truth"),
        "return yours(data_source=..., solution_str=response, ground_truth=row['answer'])",
    ),
)
_INFO = ("finish_reason", "num_tokens")


class UserFunctionScorer:
    """Calls the user's function. `version` changes with the file it is written in."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self._name = name
        self._options = dict(options)
        if clash := sorted(set(options) & {"row", "response", *_INFO}):
            raise UserError(
                f"the option name {clash[0]} is reserved, because the function receives an argument of this name",
                where=f"reward scorer {name}",
                remedy="rename your option",
            )
        self._function = find_function(name, self._options)
        self.is_deterministic = bool(getattr(self._function, "is_deterministic", True))
        """The author may write `score.is_deterministic = False` below the function."""
        self.version = _version_of(self._function)
        self._runner: asyncio.Runner | None = None

    def warm_up(self) -> None:
        """Do nothing: the function has been imported."""

    def score(self, sample: ScorerInput) -> Mapping[str, Any]:
        result = self._function(
            sample.row,
            sample.response,
            finish_reason=sample.finish_reason,
            num_tokens=sample.num_tokens,
            **self._options,
        )
        if inspect.isawaitable(result):
            result = self._wait_for(result)
        return as_components(result)

    def _wait_for(self, awaitable: Any) -> Any:
        import asyncio  # most functions are not asynchronous, and many processes load one

        if self._runner is None:
            self._runner = asyncio.Runner()  # one loop for all samples, so that a user's client sessions stay open

        async def wait() -> Any:
            return await awaitable  # no deadline here: the process is killed at the request's deadline

        return self._runner.run(wait())


def as_components(result: Any) -> Mapping[str, Any]:
    """The result of a function, with the value under `value`. Invalid results are rejected in composition.py."""
    if not isinstance(result, Mapping):
        return {"value": result}
    if "value" in result:
        return result
    if "reward" in result:
        return {"value" if key == "reward" else key: part for key, part in result.items()}
    return {"value": None, **result}


def find_function(name: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Import the function that `module:function` names. Raises UserError, which says what is missing or wrong."""
    where = f"reward scorer {name}"
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise UserError(f"`{name}` is neither a built-in scorer nor of the form module:function", where=where)
    function = import_object(name, where)
    if not callable(function):
        raise UserError(
            f"{function_name} of module {module_name} is not callable",
            where=where,
            remedy=f"define the function as `{EXPECTED}`",
        )
    _check_signature(function, where, options)
    return function


def _version_of(function: Callable[..., Any]) -> str:
    """A digest of the source file, so that verdicts of two versions of it are distinguished; `user` without a file."""
    try:
        content = Path(inspect.getsourcefile(inspect.unwrap(function)) or "").read_bytes()
    except (OSError, TypeError, ValueError):
        return "user"
    return f"user-{hashlib.blake2b(content, digest_size=6).hexdigest()}"


def _check_signature(function: Callable[..., Any], where: str, options: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in callables have no signature; the first sample checks them
        return
    try:
        signature.bind({}, "", finish_reason="stop", num_tokens=0, **options)
    except TypeError as error:
        reason = f"cannot be called with the required arguments ({error}); its signature is {signature}"
        raise UserError(reason, where=where, remedy=f"define the function as `{EXPECTED}`{_hint(signature)}") from None
    if hint := _hint(signature):  # it could be called, with values that mean something else to it
        reason = f"is written for another system; its signature is {signature}"
        raise UserError(reason, where=where, remedy=f"define the function as `{EXPECTED}`{hint}")


def _hint(signature: inspect.Signature) -> str:
    """How to call a function that is written for another system, known by its parameters; empty for any other."""
    names = [p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    for foreign in _FOREIGN:
        if set(names[:2]) & set(foreign.names):
            return f"; to use a function written for {foreign.system}, write one that calls it: {foreign.call}"
    return ""
