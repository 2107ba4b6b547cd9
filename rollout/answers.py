"""An answer's tokens as people and tools see it: what the policy wrote, in the parts that its chat format has.

Owns: where tokens and texts meet for that. Refuses: the formats (rollout/chat), writing an answer again.
"""

from __future__ import annotations

import numpy as np

from rollout.chat.calls import Schemas
from rollout.chat.formats import ChatFormat, ParsedAnswer
from rollout.tokens import PromptTokens
from rollout.transcript import Answer

NUM_OPENING_TOKENS = 32
"""So many tokens before an answer show whether its reasoning has been opened for it."""


def read_answer(
    tokens: PromptTokens, chat: ChatFormat, before_T: np.ndarray, answer: Answer, schemas: Schemas
) -> ParsedAnswer:
    """Take an answer apart. Never raises.

    before_T: the tokens that it follows. schemas: of the tools' arguments, as of `ChatFormat.parse`.
    """
    opening = tokens.decode(before_T[-NUM_OPENING_TOKENS:], with_special_tokens=True)
    tokens_R = answer.segment.tokens_R
    text = tokens.decode(tokens_R if answer.stop_token is None else tokens_R[:-1], with_special_tokens=True)
    return chat.parse(text, schemas=schemas, is_reasoning_open=chat.opens_reasoning(opening))
