"""What built-in scorers need of the machine they run on: packages, keys, files. Looked at before anything starts.

Owns: the look, as one UserError each. Torch-free. Refuses: asking servers (they may come up later than the run does),
loading models.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from areal_like.config import Settings
from areal_like.errors import UserError
from services.scorer_options import EndpointOptions, JudgeOptions, ReasoningGymScorerOptions, RewardModelOptions


def needs_of(options: Settings) -> Iterator[UserError]:
    """Everything that is missing here for a scorer with these options; `where` of an error is the option."""
    if isinstance(options, EndpointOptions):
        yield from _of_an_endpoint(options)
    if isinstance(options, ReasoningGymScorerOptions) and find_spec("reasoning_gym") is None:
        yield UserError("the package reasoning-gym is not installed", remedy="pip install 'areal-like[reasoning-gym]'")
    if isinstance(options, RewardModelOptions):
        from services.reward.classifier_folder import check_folder

        try:
            check_folder(options.path, options.label)
        except UserError as error:
            yield UserError(error.what, where="label" if error.where == "label" else "path", remedy=error.remedy)
    if isinstance(options, JudgeOptions) and options.rubric_file is not None:
        from services.reward.scorers.llm_judge import read_rubric

        try:
            read_rubric(options.rubric_file)
        except UserError as error:
            yield UserError(error.what, where="rubric_file", remedy=error.remedy)


def _of_an_endpoint(options: EndpointOptions) -> Iterator[UserError]:
    from services.reward.scorers.endpoint import read_key

    if find_spec("httpx2") is None:
        yield UserError("needs the package httpx2", remedy="pip install httpx2")
    try:
        read_key(options, "")
    except UserError as error:
        yield UserError(error.what, where="key_env" if options.key_env else "key_file", remedy=error.remedy)
