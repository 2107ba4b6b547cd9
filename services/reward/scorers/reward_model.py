"""Scorer `reward_model`: a classifier scores an answer, or each of its steps (a process reward model).

The model is in classifier.py, its process in model_host.py, to which this scorer connects. Without a socket the model
is loaded into this process. Without a socket the model is loaded into this process.

A model for sequence classification scores steps by scoring the answer up to the end of each; one for token
classification scores all of them in one pass, at the last token of each.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from areal_like.errors import UserError
from services.reward.classifier_folder import check_folder
from services.reward.model_wire import Item, ModelClient, Scores
from services.reward.scorer_options import RewardModelOptions
from services.reward.scorers.port import CannotJudge, ScorerInput
from services.reward.scorers.templates import SampleTemplate, prompt_of

MAX_ANSWER_CHARS = 4_000_000


class RewardModelScorer:
    """Returns the model's score; with a step separator also the components `step_1`, ... and `num_steps`."""

    def __init__(self, options: RewardModelOptions) -> None:
        """Raises UserError if there is no classifier in the folder."""
        self._options = options
        self._is_per_token = check_folder(options.path, options.label).is_per_token
        if self._is_per_token and options.step_separator is None:
            raise UserError(
                "the model scores tokens, but step_separator is not set",
                where="reward scorer reward_model",
                remedy="set step_separator to the text that ends each step",
            )
        self._template = SampleTemplate(options.template) if options.template is not None else None
        self.version = f"1/{_digest(options)}"
        self._model: Any = None

    def warm_up(self) -> None:
        """Load the model, or connect to the process that has it."""
        if self._options.socket is not None:
            self._model = ModelClient(self._options.socket)
            return
        from services.reward.classifier import Classifier

        self._model = Classifier(self._options)

    def score(self, sample: ScorerInput) -> Mapping[str, Any]:
        if self._model is None:
            self.warm_up()
        if len(sample.response) > MAX_ANSWER_CHARS:
            raise CannotJudge(
                f"the answer has {len(sample.response)} characters, but at most {MAX_ANSWER_CHARS} are allowed"
            )
        ends = self._ends_of_steps(sample.response)
        if self._is_per_token:
            items = [self._item(sample, sample.response, ends)]
        else:
            items = [self._item(sample, sample.response[:end], []) for end in ends]
        scores: list[Scores] = self._model.score(items)
        for scored in scores:
            if scored.problem:
                raise CannotJudge(scored.problem)
        values = [value for scored in scores for value in scored.values]
        num_cut = max(scored.num_cut for scored in scores)
        remark = {"remark": f"the first {num_cut} tokens were omitted"} if num_cut else {}
        if self._options.step_separator is None:
            return {"value": values[0], **remark}
        steps = {f"step_{number}": value for number, value in enumerate(values, 1)}
        return {"value": reduced(values, self._options.reduce), "num_steps": len(values), **steps, **remark}

    def _ends_of_steps(self, response: str) -> list[int]:
        """End of each step, in characters of the response, including its separator; a single one for a whole answer.

        White space between separators, or after the last one, is not a step.
        """
        separator = self._options.step_separator
        ends: list[int] = []
        begin = 0
        while separator is not None and len(ends) < self._options.max_steps - 1:
            found = response.find(separator, begin)
            if found < 0:
                break
            if response[begin:found].strip():
                ends.append(found + len(separator))
            begin = found + len(separator)
        if not ends or response[begin:].strip():
            ends.append(len(response))
        return ends

    def _item(self, sample: ScorerInput, response: str, ends: list[int]) -> Item:
        if self._template is not None:
            sample = msgspec.structs.replace(sample, response=response)
            return Item(text=self._template.fill(sample, MAX_ANSWER_CHARS), answer=response, ends=ends)
        prompt = prompt_of(sample.row)
        if prompt is None:
            raise CannotJudge("the row has neither `prompt` nor `messages`; set the option template")
        messages = sample.row.get("messages")
        if not isinstance(messages, list) or isinstance(sample.row.get("prompt"), str):
            messages = [{"role": "user", "content": prompt}]
        conversation = [*messages, {"role": "assistant", "content": response}]
        return Item(text=prompt + response, messages=conversation, answer=response, ends=ends)


def reduced(values: list[float], how: str) -> float:
    """Reduce the steps' values to one: min, mean, last or prod."""
    if how == "min":
        return min(values)
    if how == "mean":
        return math.fsum(values) / len(values)
    return values[-1] if how == "last" else math.prod(values)


def _digest(options: RewardModelOptions) -> str:
    """Digest of the options and of the folder's files by name, size and time, so that another model has another
    version."""
    folder = Path(options.path).expanduser()
    files = sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in folder.iterdir())
    facts = options.model_dump(mode="json", exclude={"socket", "threads", "max_batch", "device"})
    encoded = msgspec.json.encode([facts, files], order="deterministic")
    return f"{folder.name}/{hashlib.blake2b(encoded, digest_size=6).hexdigest()}"
