"""Decodes tokens to text with the run's own tokenizer.

Finds a tokenizer.json and decodes prompts, answers and turns of episodes with the package `tokenizers`; torch and
transformers are not imported.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from areal_like.encryption.files import read_text
from areal_like.errors import first_line
from areal_like.trajectory import Trajectory
from controller.run_folder.run_folder import RunFolder

MAX_NUMBERS = 40
"""Maximum token numbers shown if there is no tokenizer."""


@dataclass(frozen=True)
class Span:
    """Consecutive tokens that were all sampled, or all given."""

    text: str
    versions: str
    """Policy versions that sampled them: `3`, or `3-5`; empty for given tokens."""
    source: str = ""
    """Model and version that sampled them, if a workflow calls several: `judge 0`."""

    @property
    def shown(self) -> str:
        """The text, after its source if known: `[judge 0] yes`."""
        return f"[{self.source}] {self.text}" if self.source else self.text

    @property
    def is_sampled(self) -> bool:
        """Whether it is trained on in this trajectory."""
        return bool(self.versions)


@dataclass(frozen=True)
class TrajectoryText:
    """One trajectory of an episode: sampled and given spans in order, without the tokens that it shares with another
    trajectory.
    """

    spans: tuple[Span, ...]
    finish_reason: str
    shared_with: int = 0
    """Number, from 1, of an earlier trajectory of the sample that begins with the same tokens; 0: none."""
    num_shared: int = 0
    """Number of these tokens. They are not in `spans`, nor is the prompt of the main trajectory."""


@dataclass
class TokenText:
    """Decodes tokens. Without a tokenizer, prompts are shown as numbers and answers as the worker decoded them."""

    tokenizer: Any = None
    problems: list[str] = field(default_factory=list)

    @staticmethod
    def of(folder: RunFolder) -> TokenText:
        """Load the tokenizer of a run: of its newest model, else of its starting model."""
        found = TokenText()
        try:
            from tokenizers import Tokenizer
        except ImportError:
            found.problems.append("the package `tokenizers` is not installed, so prompts are shown as token ids")
            return found
        for place in tokenizer_folders(folder):
            path = place / "tokenizer.json"
            if not path.is_file():
                continue
            try:
                found.tokenizer = Tokenizer.from_file(str(path))
                return found
            except Exception as error:  # fault boundary: tokenizers raises bare Exception for damaged files
                found.problems.append(f"{path} is damaged ({first_line(error)})")
        found.problems.append("the tokenizer.json of the run was not found, so prompts are shown as token ids")
        return found

    def texts(self, trajectory: Trajectory, response: str) -> tuple[str, str, list[tuple[int, str]]]:
        """Prompt (with special tokens), answer, and the answer split where the version changes.

        The answer is the text that the scorer received, if it was recorded.
        """
        start = int(np.argmax(trajectory.loss_mask_T))
        prompt = self._decoded(trajectory.tokens_T[:start], skip_special=False)
        tokens_R = trajectory.tokens_T[start:]
        if self.tokenizer is None:
            return prompt, response or self._decoded(tokens_R, skip_special=True), []
        answer = response or self._decoded(tokens_R, skip_special=True)
        return prompt, answer, self._pieces(tokens_R, trajectory.versions_T[start:], answer)

    def episode(self, trajectories: Sequence[Trajectory]) -> tuple[TrajectoryText, ...]:
        """All trajectories of a sample by turns; empty for one answer to one prompt."""
        if (
            len(trajectories) == 1
            and not trajectories[0].sources
            and trajectories[0].loss_mask_T[int(np.argmax(trajectories[0].loss_mask_T)) :].all()
        ):
            return ()
        found = []
        for number, one in enumerate(trajectories):
            shared = [_num_shared(one.tokens_T, other.tokens_T) for other in trajectories[:number]]
            num_shared = min(max(shared, default=0), int(np.argmax(one.loss_mask_T)))
            start = num_shared if number else int(np.argmax(one.loss_mask_T))
            with_ = int(np.argmax(shared)) + 1 if num_shared else 0
            found.append(TrajectoryText(tuple(self._spans(one, start)), one.finish_reason, with_, num_shared))
        return tuple(found)

    def _spans(self, trajectory: Trajectory, start: int) -> Iterator[Span]:
        mask_T = trajectory.loss_mask_T
        cuts = {start, len(mask_T), *(np.flatnonzero(np.diff(mask_T[start:])) + 1 + start).tolist()}
        cuts |= {place for one in trajectory.sources for place in (one.start, one.end) if place > start}
        for begin, end in pairwise(sorted(cuts)):
            source = next((one for one in trajectory.sources if one.start <= begin < one.end), None)
            is_sampled = bool(mask_T[begin]) if begin < end else False
            text = self._decoded(trajectory.tokens_T[begin:end], skip_special=is_sampled)
            first, last = (int(trajectory.versions_T[place]) for place in (begin, end - 1)) if is_sampled else (0, 0)
            versions = (str(first) if first == last else f"{first}-{last}") if is_sampled else ""
            yield Span(text, versions, f"{source.model} {source.version}" if source is not None else "")

    def _pieces(self, tokens_R: np.ndarray, versions_R: np.ndarray, answer: str) -> list[tuple[int, str]]:
        # Tokens not sampled by the policy (version -1) belong to the piece before them.
        seen_R = np.maximum.accumulate(versions_R)
        cuts = [0, *(np.flatnonzero(np.diff(seen_R)) + 1).tolist(), len(tokens_R)]
        pieces = [
            (int(seen_R[start]), self._decoded(tokens_R[start:end], skip_special=True)) for start, end in pairwise(cuts)
        ]
        # A character of several tokens may be split: then the pieces do not form the answer.
        return pieces if "".join(text for _, text in pieces) == answer else []

    def _decoded(self, tokens: np.ndarray, *, skip_special: bool) -> str:
        if not len(tokens):
            return ""
        if self.tokenizer is None:
            shown = " ".join(map(str, tokens[:MAX_NUMBERS].tolist()))
            return f"[{len(tokens)} tokens: {shown}{' ...' if len(tokens) > MAX_NUMBERS else ''}]"
        return str(self.tokenizer.decode(tokens.tolist(), skip_special_tokens=skip_special))


def _num_shared(tokens: np.ndarray, others: np.ndarray) -> int:
    """Number of equal tokens at the beginning."""
    num = min(len(tokens), len(others))
    differs = np.flatnonzero(tokens[:num] != others[:num])
    return int(differs[0]) if len(differs) else num


def tokenizer_folders(folder: RunFolder) -> Iterator[Path]:
    """Folders that may contain a tokenizer.json of this run, most reliable first."""
    yield folder.final
    yield from sorted(folder.checkpoints.glob("step_*"), reverse=True)
    yield folder.root / "model"
    for spec in sorted(folder.processes.glob("*.json")):
        try:
            model = json.loads(read_text(spec))["model"]
            yield from (Path(model[key]) for key in ("tokenizer", "path") if isinstance(model.get(key), str))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # this process has no model
    try:
        model = yaml.safe_load(read_text(folder.config))["model"]
        yield from (Path(model[key]).expanduser() for key in ("tokenizer", "path") if isinstance(model.get(key), str))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError):
        return
