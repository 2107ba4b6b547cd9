"""The runs that `python -m benchmarks.diagnosis` diagnoses, faulty and healthy ones, and the expected finding of each.

Contains configurations, scorers and losses as a user would write them, events during a run, and the expected kinds.
diagnosis.py runs and judges them.

The expected kinds were written down before a set-up was run for the first time, from docs/diagnosis.md. Set-ups with
`is_unseen` were run for the first time after the rules were finished. A set-up whose result has changed a rule is no
longer unseen.

Waits are caused on emulated devices, which sleep instead of computing, and faults of learning in synchronous runs of a
tiny model (`mode: sync`). Neither depends on the machine's speed. Runs of fewer than 8 steps are too short for a
verdict on either, so they may be asynchronous.

One set-up needs the package reasoning-gym (extra `[reasoning-gym]`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass

DIGIT_OF = str.maketrans("abcdefghij", "0123456789")
FILES = {
    "my_rewards.py": '''\
import fcntl
import random
import time


def fair(row, response, **info):
    return sum(character in "13579" for character in response) / max(1, len(response))


def near(row, response, **info):
    """Needs another answer for each prompt: repeating one character is worth a tenth on average."""
    return response.count(row["answer"]) / max(1, len(response))


def zero(row, response, **info):
    return 0.0


def one(row, response, **info):
    return 1.0


def hangs(row, response, **info):
    if random.random() < 0.25:
        time.sleep(3600)
    return float(len(response) % 2)


def slow(row, response, **info):
    time.sleep(0.25)
    return float(len(response) % 2)


def raises(row, response, **info):
    """Raise for everything but the row's own answer, which is tried before a run starts."""
    if response != row["answer"] and not response.endswith("#" + row["answer"]):
        raise ValueError("no answer found")
    return 1.0


def raises_often(row, response, **info):
    if random.random() < 0.15:
        raise ValueError("cannot parse the answer")
    return fair(row, response)


def if_ended(row, response, *, finish_reason, **info):
    return float(finish_reason == "stop")


def of_prompt(row, response, **info):
    return float(sum(map(ord, row["prompt"])) % 2)


def seldom_differs(row, response, **info):
    return 0.5 if sum(map(ord, row["prompt"])) % 4 else fair(row, response)


def even(row, response, **info):
    return sum(character in "02468" for character in response) / max(1, len(response))


def digits(row, response, **info):
    return sum(character.isdigit() for character in response) / max(1, len(response))


def one_at_a_time(row, response, **info):
    """Uses something of which there is only one: more scoring processes do not help."""
    with open(__file__) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        time.sleep(0.2)
    return float(len(response) % 2)


def last_digit(row, response, **info):
    """Not a number for an answer that does not end with a digit."""
    return int(response[-1]) / 9 if response[-1:].isdecimal() else float("nan")


''',
    "my_environments.py": '''\
class NumberAgainstText:
    """Guess a number. It is compared as a text with a number, so no guess is ever right."""

    def reset(self, row, seed):
        self.wanted = row["answer"]

    def step(self, action):
        digits = action.removesuffix("?")
        is_found = digits.isdecimal() and int(digits) == self.wanted
        return ("=" if is_found else "!"), float(is_found), is_found
''',
    "my_losses.py": '''\
calls = 0


def not_a_number(logprobs_N, tokens):
    """Fails after the start of a run, before which a loss is tried."""
    global calls
    calls += 1
    return logprobs_N * (float("nan") if calls > 4 else -1.0)
''',
    "sums.jsonl": "".join(
        json.dumps({"question": f"What is {left} and {right}?", "answer": f"#### {left + right}"}) + "\n"
        for left in range(10) for right in range(10)
    ),
    "digits_for_letters.jsonl": "".join(
        json.dumps({"prompt": f"{word}>", "completion": word.translate(DIGIT_OF)}) + "\n"
        for word in (f"{first}{second}{third}" for first in "abcd" for second in "efgh" for third in "ijab")
    ),
}  # fmt: skip
"""Modules and rows of the user, in the folder in which the command is run."""

QUIET = ("metrics.report=false", "name=run")
EMULATED = (
    "emulated", "groups_per_step=8", "group_size=4", "num_steps=12", "emulation.mean_tokens=2000", *QUIET,
)  # fmt: skip
"""A smaller configs/emulated.yaml: a batch of 32 answers of 2,000 tokens on average."""
BALANCED = (
    *EMULATED, "emulation.speedup=5", "rollout.num_workers=2", "emulation.trainer_gpus=1", "emulation.train_mfu=0.2",
)  # fmt: skip
OWN = (
    "own_data", "model.tokenizer=characters:running_sum", "data.train={generator: running_sum, split: train}",
    "data.eval=null", "sampling.max_new_tokens=60", "rollout.engine.max_context=128", "groups_per_step=4",
    "num_steps=12", "mode=sync", "staleness.max_staleness=0", *QUIET,
)  # fmt: skip
"""The model of configs/own_data.yaml with a vocabulary of 18, so that its answers end, and with synchronous steps,
since waits are not examined here."""
SYNCHRONOUS = ("mode=sync", "staleness.max_staleness=0")
SMALL = (
    "model.init.hidden_size=64", "model.init.num_hidden_layers=2", "model.init.head_dim=16",
    "model.init.intermediate_size=192", "warm_start.sft.steps=60", "warm_start.sft.batch_size=32",
    "groups_per_step=4", "group_size=4", "data.eval.limit=8", *QUIET,
)  # fmt: skip
"""For a shipped config with a model of 0.6M parameters: a smaller model, a shorter warm start, fewer samples."""


def scorer(name: str) -> str:
    """The override that scores with a function of my_rewards.py."""
    return f"reward.scorers=[{{kind: 'my_rewards:{name}'}}]"


@dataclass(frozen=True)
class SetUp:
    """One run. `expected`: kinds of the first finding that are right, as `kind` or `kind:cause`."""

    name: str
    expected: tuple[str, ...]
    words: tuple[str, ...]
    """Arguments of `areal-like COMMAND`."""
    is_sick: bool = True
    is_unseen: bool = False
    """Whether the rules were finished before its first run, and its result has changed none of them."""
    command: str = "train"
    during: str = ""
    """Event while it runs: `kill WORKER` (repeatedly), `kill WORKER once`, `kill controller`, `stop` or `drain`."""
    at_step: int = 0
    """Step at which the event occurs."""
    is_resumed: bool = False
    """Whether `areal-like resume` follows."""
    is_disk_full: bool = False
    """Whether no file can be written to the checkpoints' folder."""


def _sick(name: str, expected: str, *words: str, **more: object) -> SetUp:
    return SetUp(name, tuple(expected.split()), words, **more)  # type: ignore[arg-type]


def _healthy(name: str, expected: str, *words: str, **more: object) -> SetUp:
    return SetUp(name, tuple(expected.split()), words, is_sick=False, **more)  # type: ignore[arg-type]


SICK = (
    _sick("too few slots", "rollouts_too_few", *EMULATED, "emulation.speedup=40", "rollout.num_workers=1",
          "rollout.engine.num_slots=2", "rollout.queue_samples=16"),
    _sick("trainer is the bottleneck", "trainer_bound", *EMULATED, "emulation.speedup=20", "rollout.num_workers=4",
          "emulation.trainer_gpus=1", "emulation.train_mfu=0.02"),
    _sick("staleness bound too small", "no_overlap", *BALANCED, "staleness.max_staleness=1"),
    _sick("scorer hangs", "scoring_stalls", *BALANCED, scorer("hangs"), "reward.timeout_s=0.5", "reward.retries=0"),
    _sick("scorer too slow", "scoring_stalls", *BALANCED, scorer("slow")),
    _sick("rewards always 0", "no_signal", *OWN, scorer("zero")),
    _sick("rewards always 1", "no_signal", *OWN, scorer("one")),
    _sick("absurd learning rate", "policy_collapsed policy_unstable", *OWN, scorer("near"), "groups_per_step=8",
          "trainer.optimizer.lr=1.0", "trainer.optimizer.warmup_steps=0", "num_steps=14"),
    _sick("answers cut at the limit", "answers_cut", *OWN, scorer("if_ended"), "sampling.max_new_tokens=2",
          "trainer.optimizer.lr=1e-6"),
    _sick("no group with a signal", "failed:signal", *OWN, scorer("of_prompt"), "filter_zero_signal=true"),
    _sick("few groups with a signal", "groups_filtered", *OWN, scorer("seldom_differs"), "filter_zero_signal=true"),
    _sick("worker dies until the budget ends", "failed:process", *BALANCED, "rollout.num_workers=1",
          "rollout.max_restarts=1", during="kill rollout-0", at_step=2),
    _sick("scorer always raises", "failed:scoring", *OWN, scorer("raises")),
    _sick("no room for a checkpoint", "failed:disk", *OWN, scorer("fair"), "trainer.checkpoint.every_steps=4",
          is_disk_full=True),
    _sick("loss is not a number", "failed:policy updates_skipped", *OWN, scorer("fair"),
          "trainer.loss.kind=my_losses:not_a_number"),
    _sick("groups dropped as stale", "groups_dropped length_shift", *BALANCED, "staleness.max_staleness=1",
          "staleness.on_stale=drop", "rollout.num_workers=4", "rollout.engine.num_slots=32"),
    _sick("controller killed", "crashed:controller", *BALANCED, during="kill controller", at_step=4),
)  # fmt: skip
UNSEEN_SICK = (
    _sick("scorer raises for one answer in seven", "scoring_fails", *BALANCED, scorer("raises_often"), is_unseen=True),
    _sick("temperature near 0", "no_signal", *OWN, scorer("fair"), "sampling.temperature=0.001", is_unseen=True),
    _sick("reward service dies until the budget ends", "failed:process", *BALANCED, "reward.max_restarts=1",
          during="kill reward", at_step=2, is_unseen=True),
    _sick("trainer dies until the budget ends", "failed:process", *BALANCED, "trainer.max_restarts=0",
          during="kill trainer", at_step=3, is_unseen=True),
    _sick("bound keeps one worker and trainer apart", "no_overlap rollouts_too_few", *BALANCED,
          "rollout.num_workers=1", "staleness.max_staleness=1", "emulation.train_mfu=0.1", is_unseen=True),
    _sick("scoring processes wait for one lock", "scoring_stalls", *BALANCED, scorer("one_at_a_time"),
          "reward.num_workers=4", "num_steps=10", is_unseen=True),
    _sick("learning rate 100 times too high with dppo", "policy_collapsed policy_worse policy_unstable", "critic_sum",
          *SYNCHRONOUS, "groups_per_step=8", "num_steps=12", "trainer.loss.kind=dppo",
          "trainer.loss.proximal=behaviour", "trainer.loss.weight.mode=off", "trainer.optimizer.lr=0.1",
          "data.eval.limit=50", *QUIET, is_unseen=True),
    _sick("entropy bonus outweighs the reward", "policy_collapsed policy_worse policy_unstable", "nim", *SYNCHRONOUS,
          "groups_per_step=8", "num_steps=20", "trainer.loss.entropy_coef=10", "trainer.optimizer.lr=3e-3",
          "data.eval.limit=40", *QUIET, is_unseen=True),
    _sick("environment compares a text with a number", "no_signal", "guess_number", *SMALL, *SYNCHRONOUS,
          "num_steps=10", "reward.environment={kind: 'my_environments:NumberAgainstText', num_processes: 1}",
          "rollout.workflow_options={max_turns: 3, stop: '?'}", "eval.every_steps=0"),
    _sick("gate that few answers pass", "groups_filtered", *OWN, "filter_zero_signal=true", "num_steps=10",
          "reward.scorers=[{kind: 'my_rewards:fair', gate: {at_least: 0.7}}]", "trainer.optimizer.lr=1e-6",
          is_unseen=True),
    _sick("score is often not a number", "scoring_fails", *OWN, scorer("last_digit"), "num_steps=10", is_unseen=True),
    _sick("deadline of groups shorter than an answer", "failed:lengths", *BALANCED, "emulation.mean_tokens=16000",
          "staleness.group_timeout_s=1", "max_filtered_batches=3", is_unseen=True),
    _sick("reward that a held-out judge contradicts", "reward_hacked", *OWN, "num_steps=28",
          "reward.scorers=[{kind: 'my_rewards:fair'}, {kind: 'my_rewards:even', weight: 0, held_out: true}]",
          "trainer.optimizer.lr=2e-3", is_unseen=True),
    _sick("held-out rows of another task", "held_out_loss_rises", "offline/sft", "epochs=4", "eval.every_steps=8",
          "data.eval=digits_for_letters.jsonl", "name=run", command="sft", is_unseen=True),
)  # fmt: skip
HEALTHY = (
    _healthy("balanced", "healthy", *BALANCED),
    _healthy("one step", "too_short", *BALANCED, "num_steps=1"),
    _healthy("two steps", "too_short", *BALANCED, "num_steps=2"),
    _healthy("three steps", "too_short", *OWN, scorer("fair"), "num_steps=3"),
    _healthy("five steps", "too_short", *BALANCED, "num_steps=5"),
    _healthy("five steps of the few slots", "too_short", *EMULATED, "emulation.speedup=40", "rollout.num_workers=1",
             "rollout.engine.num_slots=4", "rollout.queue_samples=16", "num_steps=5"),
    _healthy("one step off", "healthy", *BALANCED, "mode=one_step_off", "staleness.max_staleness=1"),
    _healthy("steps one after the other", "healthy too_short", *OWN, scorer("fair"), "num_steps=16"),
    _healthy("LoRA", "healthy too_short", *OWN, scorer("fair"), "trainer.lora={rank: 4}", "num_steps=10"),
    _healthy("worker drained", "healthy", *BALANCED, "rollout.num_workers=3", during="drain", at_step=4),
    _healthy("stopped by the user", "healthy", *BALANCED, "num_steps=40", during="stop", at_step=10),
    _healthy("resumed after a crash", "healthy", *BALANCED, "trainer.checkpoint.every_steps=2",
             during="kill controller", at_step=4, is_resumed=True),
    _healthy("evaluation", "evaluation", "own_data", *QUIET, command="eval"),
    _healthy("supervised training from files", "offline", "offline/sft", "epochs=2", "name=run", command="sft"),
    _healthy("own_data as it is shipped", "healthy too_short", "own_data", *QUIET),
)  # fmt: skip
UNSEEN_HEALTHY = (
    _healthy("emulated steps one after the other", "healthy", *BALANCED, "mode=sync", "staleness.max_staleness=0",
             is_unseen=True),
    _healthy("stopped after three steps", "too_short", *BALANCED, during="stop", at_step=3, is_unseen=True),
    _healthy("worker dies once", "processes_lost", *BALANCED, during="kill rollout-0 once", at_step=4),
    _healthy("four steps of guess_number", "too_short", "guess_number", *SMALL, "num_steps=4", is_unseen=True),
    _healthy("three steps of environment_tool_sum", "too_short", "environment_tool_sum", *SMALL, "num_steps=3",
             is_unseen=True),
    _healthy("six steps of nim one step off", "too_short", "nim", "mode=one_step_off", "staleness.max_staleness=1",
             "groups_per_step=8", "num_steps=6", "data.eval.limit=8", *QUIET, is_unseen=True),
    _healthy("reasoning_gym_tiny with LoRA", "too_short", "reasoning_gym_tiny", "trainer.lora={rank: 4}",
             "data.eval.limit=8", *QUIET, is_unseen=True),
    _healthy("gsm8k_tiny with rows of a user", "too_short", "gsm8k_tiny", "data.train.path=sums.jsonl",
             "data.eval=null", *QUIET, is_unseen=True),
    _healthy("answers in parts", "healthy", *BALANCED, "rollout.segment_tokens=16"),
    _healthy("cispo with rloo", "healthy too_short", *OWN, scorer("fair"), "trainer.loss.kind=cispo",
             "trainer.advantage.kind=rloo"),
    _healthy("five steps of tool_sum", "too_short", "tool_sum", *SMALL, "num_steps=5", is_unseen=True),
    _healthy("gspo one step off", "healthy too_short", *OWN, scorer("fair"), "mode=one_step_off",
             "staleness.max_staleness=1", "trainer.loss.kind=gspo", "trainer.loss.aggregation=sequence_mean"),
    _healthy("tokens weighed by their age", "healthy too_short", *OWN, scorer("fair"), "trainer.optimizer.lr=1e-3",
             "trainer.loss.corrections=[{kind: staleness_weight, options: {decay: 0.9}}]", is_unseen=True),
    _healthy("seven steps of graded answers", "too_short", *OWN, scorer("fair"), "num_steps=7",
             "trainer.advantage.kind=reinforce_pp", "trainer.loss.kl_coef=0.001", "trainer.loss.kl_in=reward",
             "trainer.loss.kl_estimator=k1", is_unseen=True),
    _healthy("bapo on half the samples", "healthy too_short", *OWN, scorer("fair"), "group_size=4",
             "trainer.optimizer.lr=1e-3", "trainer.loss.kind=bapo", "trainer.loss.proximal=behaviour",
             "trainer.loss.weight.mode=off", is_unseen=True),
    _healthy("reward that a held-out judge confirms", "healthy too_short", *OWN, "num_steps=22",
             "reward.scorers=[{kind: 'my_rewards:fair'}, {kind: 'my_rewards:digits', weight: 0, held_out: true}]",
             "trainer.optimizer.lr=1e-3", is_unseen=True),
    _healthy("preferences from files", "offline", "offline/dpo", "epochs=2", "name=run", command="dpo",
             is_unseen=True),
)  # fmt: skip
SET_UPS = {one.name: one for one in (*SICK, *UNSEEN_SICK, *HEALTHY, *UNSEEN_HEALTHY)}
QUICK = ("too few slots", "rewards always 0", "balanced", "two steps")
