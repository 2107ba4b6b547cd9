"""What every engine refuses before it generates, and the answers that are complete as they come."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from areal_like.errors import UserError
from areal_like.trajectory import Segment
from areal_like.wire.messages import Sampling
from rollout.engine.port import GenerationRequest
from rollout.engine.requests import check_request, ended_already

CONTEXT, VOCAB = 8, 20


def request(prompt: tuple[int, ...] = (1, 2), prefix: tuple[int, ...] = (), **sampling: Any) -> GenerationRequest:
    count = len(prefix)
    said = Segment(np.array(prefix, np.int32), np.full(count, -0.5, np.float32), np.zeros(count, np.int32))
    return GenerationRequest(
        request_id=5, prompt_P=np.array(prompt, np.int32), prefix=said, sampling=Sampling(**sampling), seed=0
    )


@pytest.mark.parametrize(
    "given",
    [
        request((1,) * (CONTEXT - 1)),
        request((1,) * 3, (1,) * (CONTEXT - 4)),
        request((0, VOCAB - 1), (0, VOCAB - 1)),
        request(temperature=0.0, top_p=1e-6, top_k=0),
        request(temperature=2.0, top_p=1.0, top_k=VOCAB),
    ],
)
def test_what_fits_is_taken(given: GenerationRequest) -> None:
    check_request(given, context=CONTEXT, vocab_size=VOCAB)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (request(()), "the prompt is empty"),
        (request((1,) * CONTEXT), f"{CONTEXT} tokens, which leaves no room in a context of {CONTEXT}"),
        (request((1,) * 4, (1,) * 4), f"{CONTEXT} tokens, which leaves no room"),
        (request((1, VOCAB)), f"token {VOCAB} is not in the vocabulary of {VOCAB} tokens"),
        (request((-1, 1)), "token -1 is not"),
        (request((1,), (1, VOCAB)), f"token {VOCAB} is not"),
        (request(temperature=-0.5), "temperature -0.5"),
        (request(temperature=float("nan")), "temperature nan"),
        (request(top_p=0.0), "top_p 0.0"),
        (request(top_k=-1), "top_k -1"),
    ],
)
def test_what_cannot_be_generated_is_refused_with_its_reason(given: GenerationRequest, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        check_request(given, context=CONTEXT, vocab_size=VOCAB)


@pytest.mark.parametrize(
    ("prefix", "max_new_tokens", "reason"),
    [
        ((), 4, None),
        ((5,), 4, None),
        ((5, 6, 7), 4, None),
        ((5, 6, 7, 8), 4, "length"),
        ((5, 6, 7, 8, 9), 4, "length"),
        ((5, 3), 4, "stop"),
        ((3, 5), 4, None),
        ((3,), 1, "stop"),
        ((), 0, "length"),
    ],
)
def test_an_answer_that_is_complete_already_ends_without_a_token(
    prefix: tuple[int, ...], max_new_tokens: int, reason: str | None
) -> None:
    outcome = ended_already(request(prefix=prefix, max_new_tokens=max_new_tokens, stop_token_ids=(3,)))
    if reason is None:
        assert outcome is None
    else:
        assert outcome is not None
        assert (outcome.request_id, outcome.end_reason, len(outcome.segment)) == (5, reason, 0)
