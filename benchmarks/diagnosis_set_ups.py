"""The runs that `python -m benchmarks.diagnosis` diagnoses, faulty and healthy ones, and the expected finding of each.

Contains configurations, scorers and losses as a user would write them, events during a run, and the expected kinds.
diagnosis.py runs and judges them.

The expected kinds were written down before a set-up was run for the first time. Set-ups with `is_unseen` were run for
the first time after the rules were finished.

Waits are caused on emulated devices, which sleep instead of computing, and faults of learning in synchronous runs of a
tiny model (`mode: sync`). Neither depends on the machine's speed.
"""

from __future__ import annotations

from dataclasses import dataclass

FILES = {
    "my_rewards.py": '''\
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


''',
    "my_losses.py": '''\
calls = 0


def not_a_number(logprobs_N, tokens):
    """Fails after the start of a run, before which a loss is tried."""
    global calls
    calls += 1
    return logprobs_N * (float("nan") if calls > 4 else -1.0)
''',
}  # fmt: skip
"""Modules of the user, in the folder in which the command is run."""

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
)  # fmt: skip
UNSEEN_HEALTHY = (
    _healthy("own_data as it is shipped", "healthy too_short", "own_data", *QUIET, is_unseen=True),
    _healthy("emulated steps one after the other", "healthy", *BALANCED, "mode=sync", "staleness.max_staleness=0",
             is_unseen=True),
    _healthy("stopped after three steps", "too_short", *BALANCED, during="stop", at_step=3, is_unseen=True),
    _healthy("worker dies once", "processes_lost", *BALANCED, during="kill rollout-0 once", at_step=4, is_unseen=True),
)  # fmt: skip
SET_UPS = {one.name: one for one in (*SICK, *UNSEEN_SICK, *HEALTHY, *UNSEEN_HEALTHY)}
QUICK = ("too few slots", "rewards always 0", "balanced", "two steps")
