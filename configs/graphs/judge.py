"""A judge: the frozen starting model answers each question several times, and the policy is right if it agrees.

No gold answer is used: the reward depends on the judge's majority. The same frozen model is also a reference: `drift`
measures how far the policy has moved from it.
"""

import asyncio
from collections import Counter

from areal_like import Sample, Trajectory


class JudgedSum:
    """One answer of the policy; in parallel `votes` answers of the model `judge`."""

    is_resumable = True  # one generation of the policy, from a prompt that depends on the row alone
    models = ("judge",)

    def __init__(self, votes=4):
        self.votes = votes

    async def run(self, task, tools):
        prompt_P, judge = tools.tokens.prompt(task.row), tools.models["judge"]
        answer, *opinions = await asyncio.gather(
            tools.generate(prompt_P), *(judge.generate(prompt_P) for _ in range(self.votes))
        )
        said = tools.tokens.decode(answer.segment.tokens_R)
        votes = Counter(final_digit(tools.tokens.decode(one.segment.tokens_R)) for one in opinions)
        del votes[""]
        majority = votes.most_common(1)[0][0] if votes else ""
        reference = await judge.logprobs(prompt_P, answer.segment.tokens_R)
        drift = float((answer.segment.logprobs_R - reference.logprobs_R).mean())
        parts = {
            "correct": float(final_digit(said) == task.row["answer"]),
            "agreement": max(votes.values(), default=0) / self.votes,
            "drift": drift,
        }
        is_right = bool(majority) and final_digit(said) == majority
        trajectory = Trajectory.from_prompt(prompt_P, answer.segment, answer.finish_reason)
        verdict = tools.verdict(float(is_right), components=parts, scorer="judge")
        return Sample(trajectory=trajectory, verdict=verdict, response_text=said)


def final_digit(text):
    """The text after the last `#`, if it is one digit."""
    digit = text.rpartition("#")[2] if "#" in text else ""
    return digit if len(digit) == 1 and digit.isdigit() else ""
