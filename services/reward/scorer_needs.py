"""Requirements of built-in scorers on the machine (packages, keys, files), checked before anything starts.

Does not import torch, sends nothing to a server (it only checks whether it listens), and loads no models.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from areal_like.errors import UserError
from areal_like.external.needs import endpoint_needs, silent
from areal_like.external.settings import EndpointOptions, ModelEndpointOptions
from areal_like.settings import Settings
from services.reward.option_files import read_rubric
from services.reward.scorer_options import (
    HttpOptions,
    JudgeOptions,
    ReasoningGymScorerOptions,
    RewardModelOptions,
)


def needs_of(options: Settings) -> Iterator[UserError]:
    """Missing requirements of a scorer with these options; `where` of an error is the option."""
    if isinstance(options, EndpointOptions):
        yield from endpoint_needs(options)
    if isinstance(options, ReasoningGymScorerOptions) and find_spec("reasoning_gym") is None:
        yield UserError("the package reasoning-gym is not installed", remedy="pip install 'areal-like[reasoning-gym]'")
    if isinstance(options, RewardModelOptions):
        from services.reward.classifier_folder import check_folder

        try:
            check_folder(options.path, options.label)
        except UserError as error:
            yield UserError(error.what, where="label" if error.where == "label" else "path", remedy=error.remedy)
    if isinstance(options, JudgeOptions) and options.rubric_file is not None:
        try:
            read_rubric(options.rubric_file, "")
        except UserError as error:
            yield UserError(error.what, where="rubric_file", remedy=error.remedy)


def unreachable(options: Settings) -> UserError | None:
    """The error that nothing listens at the endpoint. None if a server listens, if there is no endpoint, or behind a
    proxy."""
    if isinstance(options, HttpOptions):
        return silent(options.url, "url")
    if isinstance(options, ModelEndpointOptions) and options.record != "replay":
        return silent(options.base_url, "base_url")
    return None
