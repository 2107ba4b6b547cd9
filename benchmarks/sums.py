"""Prompts of the quickstart's task as token ids of its tokenizer, for benchmarks that run an engine without a job."""

from __future__ import annotations

from itertools import islice

import numpy as np

from areal_like.tasks.running_sum import CHARACTERS, rows

NUM_SPECIAL = 3  # padding, beginning, end: the first ids of the quickstart's tokenizer
VOCABULARY = NUM_SPECIAL + len(CHARACTERS)


def random_tokens(rng: np.random.Generator, size: int | tuple[int, ...]) -> np.ndarray:
    """Random ids of characters, without special ones; int32."""
    return rng.integers(NUM_SPECIAL, VOCABULARY, size).astype(np.int32)


def texts(num: int) -> list[str]:
    """The first prompts of the training rows."""
    return [row["prompt"] for row in islice(rows(1, "train"), num)]


def encoded(text: str) -> np.ndarray:
    """The ids of a text's characters; int32."""
    return np.array([NUM_SPECIAL + CHARACTERS.index(character) for character in text], np.int32)
