"""Stage `exact_duplicates`: a prompt that an earlier row has, up to case, spaces and punctuation."""

from __future__ import annotations

from typing import Literal

from areal_like.settings import Settings
from controller.preflight.dataset.index import SeenTexts
from controller.preflight.dataset.port import Finding, Row, SetStage
from controller.preflight.dataset.text import digest, tokens


class ExactOptions(Settings):
    """Options of stage `exact_duplicates`."""

    compare: Literal["prompt", "prompt_and_answer"] = "prompt"
    """With `prompt`, a row with the prompt of an earlier row is removed whatever its answer."""


class ExactDuplicates(SetStage[ExactOptions]):
    """See the module."""

    name = "exact_duplicates"
    Options = ExactOptions

    def sketch(self, row: Row) -> tuple[bytes, bytes] | None:
        prompt = " ".join(row.prompt_tokens)
        if not prompt:
            return None
        answer = " ".join(tokens(row.answer))
        both = self.options.compare == "prompt_and_answer"
        return digest(f"{prompt}\0{answer}" if both else prompt), digest(answer, 8)

    def open(self) -> None:
        self._seen = SeenTexts()

    def decide(self, number: int, where: str, sketch: tuple[bytes, bytes]) -> Finding | None:
        key, answer = sketch
        earlier = self._seen.find_or_add(key, where, answer)
        if earlier is None:
            return None
        place, other = earlier
        return Finding(
            "same prompt" if other == answer else "same prompt, different answer",
            f"the prompt is the same as in {place}",
        )

    def close(self) -> None:
        self._seen.close()
