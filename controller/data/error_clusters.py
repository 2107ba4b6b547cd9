"""Groups the wrong answers of an evaluation: by the form of the answer, and by phrases of the prompt.

A phrase is one to three words of a prompt, with numbers as `#`. Rows with a phrase are compared with all other rows by
Fisher's exact test, multiplied by the number of phrases (Bonferroni). The most significant phrase is a cluster, its
rows are left out, and the next one is looked for. Slices by columns of the rows are in eval_slices.py.

Legend: N rows.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from controller.data.slice_statistics import ALPHA, MIN_ANSWERS, MIN_DIFFERENCE, Share, fisher

MAX_CLUSTERS = 5
"""Clusters of each of the two kinds."""
MAX_ROWS = 20_000
"""Rows whose prompts are compared."""
MAX_CHARS = 2_000
"""Characters of a prompt that are read."""
MAX_ALL_CHARS = 2_000_000
"""Characters of all prompts that are read: two seconds of the controller, and some 100 MB."""
MAX_TESTED = 50
"""Phrases that are tested exactly: those with the largest excess of wrong rows."""
MIN_WRONG = 3
"""Wrong answers of a form that is a cluster."""
MIN_SHARE = 0.05
"""Share of all wrong answers that a form must have."""
REPEAT = 4
_TOKEN = re.compile(r"\d+(?:[.,]\d+)*|[^\W\d]+|[^\w\s]")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@dataclass(frozen=True)
class Cluster:
    """A group of wrong answers."""

    kind: str
    """`form` of the answer, or `phrase` of the prompt."""
    name: str
    wrong: int
    """Wrong answers of a form, or wrong rows with a phrase."""
    solved: int
    """Solved rows with a phrase; 0 for a form."""
    p_corrected: float | None
    """Of a phrase; a form is not tested."""
    members: tuple[int, ...]
    """Numbers of the wrong answers of a form, or of the wrong rows with a phrase."""


def by_form(forms: Mapping[int, str]) -> list[Cluster]:
    """Forms of wrong answers, the most frequent first.

    Args:
        forms: from `form_of`, by number of each wrong answer; an empty text if it has none.
    """
    members: dict[str, list[int]] = {}
    for number, form in forms.items():
        members.setdefault(form, []).append(number)
    least = max(MIN_WRONG, MIN_SHARE * len(forms))
    found = [
        Cluster("form", form, len(numbers), 0, None, tuple(numbers))
        for form, numbers in members.items()
        if form and len(numbers) >= least
    ]
    return sorted(found, key=lambda one: (-one.wrong, one.name))[:MAX_CLUSTERS]


def form_of(answer: str, expected: str) -> str:
    """Form of a wrong answer; empty if it has none of those that are looked for.

    Example:
        >>> form_of("so it is -4", "4"), form_of("", "4"), form_of("the answer is 5", "4"), form_of("a cat", "a dog")
        ('the opposite sign', 'empty', 'wrong by one', '')
    """
    if not answer.strip():
        return "empty"
    words = answer.split()
    runs = Counter(zip(*(words[place:] for place in range(REPEAT)), strict=False))
    if runs and sum(count for count in runs.values() if count > 1) > runs.total() / 2:
        return "repeats itself"
    if _NUMBER.fullmatch(expected.strip().replace(",", "")) is None:
        return ""
    numbers = _NUMBER.findall(answer.replace(",", ""))
    if not numbers:
        return "no number"
    last, right = float(numbers[-1]), float(expected.strip().replace(",", ""))
    if last == right:
        return "the right number, in a form that is not accepted"
    if last == -right:
        return "the opposite sign"
    if abs(last - right) == 1:
        return "wrong by one"
    ratio = abs(last / right) if right else 0.0
    if 0 < ratio < math.inf and abs(math.log10(ratio) - round(math.log10(ratio))) < 1e-9:
        return "wrong by a power of ten"
    return "the right number is not the last one" if right in map(float, numbers) else ""


def by_phrase(prompts: Sequence[str], is_solved_N: np.ndarray) -> list[Cluster]:
    """Phrases whose rows are solved less often than all others, by more than chance and at least 5 points.

    Args:
        prompts: texts of the rows.
        is_solved_N: whether the row is solved, bool.
    """
    prompts, is_solved_N = prompts[:MAX_ROWS], is_solved_N[:MAX_ROWS]
    num_chars = min(MAX_CHARS, MAX_ALL_CHARS // max(1, len(prompts)))
    places: dict[str, list[int]] = {}
    for place, prompt in enumerate(prompts):
        for phrase in set(phrases(prompt[:num_chars])):
            places.setdefault(phrase, []).append(place)
    known = {phrase: np.array(rows) for phrase, rows in places.items() if len(rows) >= MIN_ANSWERS}
    left_N = np.ones(len(prompts), dtype=bool)
    found: list[Cluster] = []
    while len(found) < MAX_CLUSTERS:
        best = _most_significant(known, is_solved_N, left_N)
        if best is None:
            break
        rows = known[best.name]
        found.append(best)
        left_N[rows] = False
    return found


def _most_significant(known: Mapping[str, np.ndarray], is_solved_N: np.ndarray, left_N: np.ndarray) -> Cluster | None:
    num_rows, num_solved = int(left_N.sum()), int((is_solved_N & left_N).sum())
    candidates = []
    for phrase, rows in known.items():
        mine = rows[left_N[rows]]
        solved = int(is_solved_N[mine].sum())
        with_it, without = Share(solved, len(mine)), Share(num_solved - solved, num_rows - len(mine))
        if min(with_it.answers, without.answers) < MIN_ANSWERS or with_it.value - without.value > -MIN_DIFFERENCE:
            continue
        excess = (without.value - with_it.value) * np.sqrt(with_it.answers * without.answers / num_rows)
        candidates.append((float(excess), phrase, with_it, without, mine))
    candidates.sort(key=lambda one: (-one[0], -len(one[1]), one[1]))
    best: Cluster | None = None
    for _, phrase, with_it, without, mine in candidates[:MAX_TESTED]:
        p = min(1.0, fisher(with_it, without) * len(known))
        if p < ALPHA and (best is None or best.p_corrected is None or p < best.p_corrected):
            wrong = tuple(int(row) for row in mine if not is_solved_N[row])
            best = Cluster("phrase", phrase, len(wrong), int(with_it.solved), p, wrong)
    return best


def phrases(text: str) -> Iterator[str]:
    """One to three consecutive words and signs of a text, in lower case, with numbers as `#`; not signs alone.

    Example:
        >>> list(phrases("Add 12 apples"))
        ['add', 'apples', 'add #', '# apples', 'add # apples']
    """
    tokens = ["#" if token[0].isdigit() else token for token in _TOKEN.findall(text.lower())]
    for size in (1, 2, 3):
        for run in _runs(tokens, size):
            if any(token[0].isalpha() for token in run):
                yield " ".join(run)


def _runs(tokens: Sequence[str], size: int) -> Iterable[tuple[str, ...]]:
    return zip(*(tokens[place:] for place in range(size)), strict=False)
