"""An environment for verifiers 0.1, used by configs/verifiers_tiny.yaml: two numbers to add, in two tries."""

import verifiers
from datasets import Dataset


class Sums(verifiers.MultiTurnEnv):
    """Shows a wrong sum again, with a question mark."""

    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": f"{answers_in(messages)[-1]}?"}]

    @verifiers.stop
    async def is_right(self, state, **kwargs):
        steps = state["trajectory"]
        return bool(steps) and answers_in(steps[-1]["completion"])[-1] == state["answer"]


def answers_in(messages):
    """The policy's messages."""
    return [(one["content"] or "").strip() for one in messages if one["role"] == "assistant"]


def right(completion, answer, **kwargs):
    """1 for the right sum in the first try, a half in the second."""
    said = answers_in(completion)
    return float(said[-1] == answer) / len(said)


def number(completion, **kwargs):
    """1 if the first answer is a number."""
    return float(answers_in(completion)[0].isdigit())


def load_environment(largest=9):
    """Every pair of numbers up to `largest`."""
    pairs = [(one, other) for one in range(largest + 1) for other in range(largest + 1)]
    rows = [{"question": f"{one}+{other}=", "answer": str(one + other)} for one, other in pairs]
    rubric = verifiers.Rubric(funcs=[right, number], weights=[1.0, 0.1])
    return Sums(dataset=Dataset.from_list(rows), rubric=rubric, max_turns=2)
