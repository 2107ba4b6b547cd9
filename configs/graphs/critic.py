"""A generator and a critic: two roles of one policy, one after the other.

    generator "7+8="  draft "4;"      critic "?7+8=4;"  critique "5;"      generator "7+8=4;5;"  revision "5;"

The critic says which digit is right; the generator sees that and answers again. Each role has a separate trajectory and
reward; the generator's reward is that of its revision.
"""

import random

from areal_like import Sample, Transcript

END = ";"


def rows(seed, split, *, limit, options):
    """Rows of `prompt` and `answer`: the sum of two digits, modulo 10."""
    rng = random.Random(f"critic/{split}/{seed}")
    for number in range(limit):
        left, right = divmod(number % 100, 10) if split == "eval" else (rng.randrange(10), rng.randrange(10))
        yield {"prompt": f"{left}+{right}=", "answer": str((left + right) % 10)}


def demonstrations(seed, split, *, limit, options):
    """Both roles in their formats; a share `noise` of all digits is random."""
    noise, rng = options.get("noise", 0.5), random.Random(f"critic/demonstrations/{seed}")
    for row in rows(seed, "sft", limit=limit, options={}):
        draft, critique, revision = (
            str(rng.randrange(10)) if rng.random() < noise else row["answer"] for _ in range(3)
        )
        if rng.random() < 0.5:
            yield {"prompt": f"?{row['prompt']}{draft}{END}", "spans": [[critique + END, True]]}
        else:
            spans = [[draft + END, True], [critique + END, False], [revision + END, True]]
            yield {"prompt": row["prompt"], "spans": spans}


class DraftCritiqueRevise:
    """Three calls in sequence. A role that is declared as not trained is only called."""

    is_resumable = False
    models = ("generator", "critic")

    async def run(self, task, tools):
        generator, critic = tools.models["generator"], tools.models["critic"]
        work = Transcript(tools.tokens.prompt(task.row), encode=tools.tokens.encode)
        draft = await say(tools, generator, work)
        add(work, generator, draft)
        review = Transcript(
            tools.tokens.prompt({"prompt": f"?{task.row['prompt']}{text_of(tools, draft)}"}),
            encode=tools.tokens.encode,
        )
        critique = await say(tools, critic, review)
        add(review, critic, critique)
        work.given(critique)  # keeps the critic's name and version
        revision = await say(tools, generator, work)
        add(work, generator, revision)
        draft_ok, critique_ok, ok = (
            float(text_of(tools, one) == task.row["answer"] + END) for one in (draft, critique, revision)
        )
        trajectories = [
            one.close("stop", turn_rewards=[(one.num_sampled, reward)])
            for one, reward in ((work, ok), (review, critique_ok))
            if one.num_sampled
        ]
        verdict = tools.verdict(ok, components={"correct": ok, "draft": draft_ok, "critique": critique_ok})
        text = tools.tokens.decode(work.tokens_T)
        return Sample(trajectory=trajectories[0], others=tuple(trajectories[1:]), verdict=verdict, response_text=text)


async def say(tools, model, transcript):
    """One digit and its end mark."""
    return await model.generate(transcript, max_new_tokens=2, stop_token_ids=tools.tokens.encode(END)[-1:])


def add(transcript, model, answer):
    """Add an answer to the trajectory of its role."""
    if model.is_trained:
        transcript.sampled(answer)
    else:
        transcript.given(answer)


def text_of(tools, answer):
    """The text of an answer, as the other role reads it."""
    return tools.tokens.decode(answer.segment.tokens_R)
