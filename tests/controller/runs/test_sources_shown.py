"""What `areal-like samples` shows of tokens that several models sampled."""

from __future__ import annotations

import numpy as np
import run_zoo as zoo

from areal_like.trajectory import Segment
from controller.runs.tokens import TokenText
from rollout.transcript import Answer, Transcript


def said(text: str, model: str, *versions: int, is_trainable: bool = True) -> Answer:
    tokens = np.asarray(zoo.byte_tokenizer().encode(text).ids, np.int32)
    stamps = np.resize(np.sort(np.array(versions, np.int32)), len(tokens))
    stamps.sort()
    segment = Segment(tokens, np.full(len(tokens), -0.5, np.float32), stamps)
    return Answer(segment=segment, finish_reason="stop", model=model, is_trainable=is_trainable)


def ids(text: str) -> np.ndarray:
    return np.asarray(zoo.byte_tokenizer().encode(text).ids, np.int32)


def test_each_models_words_are_shown_with_its_name_and_version() -> None:
    talk = Transcript(ids("go:"))
    talk.sampled(said("ab", "player", 3, 4))
    talk.given(said("no", "judge", 0, is_trainable=False))
    talk.given(ids("!"))
    talk.sampled(said("c", "player", 4))
    [shown] = TokenText(tokenizer=zoo.byte_tokenizer()).episode((talk.close(),))
    assert [(span.shown, span.versions, span.is_sampled) for span in shown.spans] == [
        ("[player 3] a", "3", True), ("[player 4] b", "4", True), ("[judge 0] no", "", False), ("!", "", False),
        ("[player 4] c", "4", True),
    ]  # fmt: skip


def test_one_answer_without_other_models_is_no_episode() -> None:
    talk = Transcript(ids("go:"))
    talk.sampled(said("ab", "", 3))
    assert TokenText(tokenizer=zoo.byte_tokenizer()).episode((talk.close(),)) == ()
    named = Transcript(ids("go:"))
    named.sampled(said("ab", "player", 3))
    assert len(TokenText(tokenizer=zoo.byte_tokenizer()).episode((named.close(),))) == 1
