"""Does `areal-like probe` name the cause of an injected fault?

    python -m benchmarks.probe_faults                  some minutes
    python -m benchmarks.probe_faults --quick          the sound set-up and three faults; writes nothing
    python -m benchmarks.probe_faults --only NAME,...  these; writes nothing

A set-up is a folder as a user has it: a config, four rows, a scorer, and a model of 34,000 parameters that answers
every sum with 7 or 8. `sound` has no fault, and each other one has exactly one. The command is run in the folder as a
user types it, with all its processes. A fault counts as named if the command ends with status 1 and finds only the
cause of that kind, in a sentence with the expected words. `cpu_s` is the processor time of the command with all its
processes. Exit status 1 if a fault was not named.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_like.config import ModelSettings
from areal_like.guard import tied
from benchmarks.runs import command_of, environment, write
from trainer.config import SftSettings
from trainer.model.tokenizers import RUNNING_SUM_CHARACTERS, character_tokenizer
from trainer.prepare import prepare
from trainer.prepare_spec import PrepareSpec

LIMIT_S = 1800.0
"""Time limit of one command; only ends one that hangs."""
PROMPTS, SAMPLES = 4, 8
CONFIG = """\
name: planted
seed: 1
model: {path: model, dtype: float32}
data: {train: {path: rows.jsonl}}
groups_per_step: 4
group_size: 8
num_steps: 2
sampling: {temperature: 1.0, max_new_tokens: 6}
rollout: {engine: {num_slots: 32, max_context: 64}}
reward: {scorers: [{kind: "my_rewards:right"}]}
trainer: {micro_batch_tokens: 1024}
metrics: {report: false}
"""
REWARDS = """\
def right(row, response, **info):
    return float(response.strip() == row["answer"])


def never(row, response, **info):
    return 0.0


def always(row, response, **info):
    return 1.0


def other_column(row, response, **info):
    return float(response == row["origin"])


def boxed(row, response, **info):
    return float(response == "\\\\boxed{7}")
"""
DESCRIPTOR = """\
from rollout.engine.embedded_descriptor import EmbeddedDescriptor


class HotDescriptor(EmbeddedDescriptor):
    name = title = "hot"
    factory = "hot_engine:make"


HOT = HotDescriptor()
"""
ENGINE = '''\
import msgspec

from rollout.engine import embedded


def make(context):
    """The embedded engine, which samples at three times the temperature that it is asked for."""
    engine = embedded.make(context)
    generate = engine.generate

    async def hotter(request):
        sampling = msgspec.structs.replace(request.sampling, temperature=3 * request.sampling.temperature)
        return await generate(msgspec.structs.replace(request, sampling=sampling))

    engine.generate = hotter
    return engine
'''
INIT: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 48, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip
SUMS = [f"{a}+{b}=" for a in range(10) for b in range(10)]


@dataclass(frozen=True)
class SetUp:
    """kind: kind of the cause that must be found; empty: none may be found. words: part of its sentence. edit: changes
    the folder."""

    name: str
    kind: str
    words: str = ""
    overrides: tuple[str, ...] = ()
    edit: Callable[[Path], None] | None = None


def _without_end(folder: Path) -> None:
    """Make padding, which the model never writes, the end of its answers."""
    for name in ("generation_config.json", "config.json"):
        config = json.loads((folder / "model" / name).read_text())
        (folder / "model" / name).write_text(json.dumps({**config, "eos_token_id": 0}))


def _other_tokenizer(folder: Path) -> None:
    character_tokenizer(RUNNING_SUM_CHARACTERS).save_pretrained(str(folder / "other"))


def _hot_engine(folder: Path) -> None:
    (folder / "hot_descriptor.py").write_text(DESCRIPTOR)
    (folder / "hot_engine.py").write_text(ENGINE)


def _scorer(name: str) -> tuple[str, ...]:
    return (f"reward.scorers=[{{kind: 'my_rewards:{name}'}}]",)


SET_UPS = {
    one.name: one
    for one in (
        SetUp("sound", ""),
        SetUp("wrong template", "template", "<|assistant|> <|user|>",
              ("rollout.prompt_template='<|user|>{prompt}<|assistant|>'",)),
        SetUp("no end of sequence", "end_of_sequence", "Answers continue after <eos>", edit=_without_end),
        SetUp("reward always 0", "reward_zero", "also for the gold answers", _scorer("never")),
        SetUp("reward on the wrong column", "reward_column", "column `origin`", _scorer("other_column")),
        SetUp("cut at length", "length", "limit of 1 tokens", ("sampling.max_new_tokens=1",)),
        SetUp("all groups equal", "equal_groups", "the reward of each sample is 1", _scorer("always")),
        SetUp("greedy sampling", "greedy", "sampling.temperature is 0.01", ("sampling.temperature=0.01",)),
        SetUp("wrong tokenizer", "tokenizer", "beyond the tokenizer's vocabulary of 18", ("model.tokenizer=other",),
              _other_tokenizer),
        SetUp("too hard", "too_hard", "although the scorer works", _scorer("boxed")),
        SetUp("log-probs differ", "logprobs", "engine and trainer differ",
              ("rollout.engine.kind=hot_descriptor:HOT",), _hot_engine),
    )
}  # fmt: skip
QUICK = ("sound", "wrong template", "reward on the wrong column", "log-probs differ")
"""Each of these faults is found by another process of the probe: prompts, verdicts, the trainer's passes."""


CONSTANT = {"lr": 0.01, "warmup_steps": 0, "schedule": "constant"}


def make_model(folder: Path) -> None:
    """Make the model of all set-ups: trained on sums, each answered with 7 and with 8."""
    folder.mkdir(parents=True)
    rows = [{"prompt": prompt, "response": text} for prompt in SUMS for text in "78"]
    (folder / "demonstrations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sft = SftSettings.model_validate({"device": "cpu", "steps": 80, "batch_size": 32, "optimizer": CONSTANT})
    prepare(
        PrepareSpec(
            run_id="planted", parent_pid=os.getpid(), seed=1, model=ModelSettings(init=INIT, tokenizer="bytes"),
            out_dir=str(folder / "model"), sft_rows=str(folder / "demonstrations.jsonl"), sft=sft,
        )
    )  # fmt: skip


def plant(set_up: SetUp, model: Path, folder: Path) -> None:
    """Make the folder of a set-up. model: the folder from `make_model`."""
    folder.mkdir(parents=True)
    shutil.copytree(model / "model", folder / "model")
    (folder / "job.yaml").write_text(CONFIG)
    (folder / "my_rewards.py").write_text(REWARDS)
    rows = [{"prompt": prompt, "answer": "7", "origin": "3+3"} for prompt in SUMS[:PROMPTS]]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if set_up.edit is not None:
        set_up.edit(folder)


def command_words(set_up: SetUp) -> list[str]:
    """Arguments of `areal-like`, run in the folder of a set-up."""
    return ["probe", "job.yaml", *set_up.overrides, "runs_dir=runs", "-m", str(PROMPTS), "-n", str(SAMPLES), "--json"]


def look(set_up: SetUp, folder: Path) -> dict[str, Any]:
    """Run the command in the folder of a set-up. Returns its exit status, causes, and `fault`, empty if all is as
    expected."""
    before_s = _children_s()
    ended = subprocess.run(
        tied([sys.executable, "-P", "-m", "controller", *command_words(set_up)]), cwd=folder, env=environment(),
        timeout=LIMIT_S, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = json.loads(ended.stdout)["findings"] if ended.returncode in (0, 1) and ended.stdout else []
    row = {
        "set_up": set_up.name, "planted": set_up.kind, "named": [one["kind"] for one in found],
        "sentences": [one["sentence"] for one in found], "status": ended.returncode,
        "cpu_s": round(_children_s() - before_s, 1),
    }  # fmt: skip
    wanted = (int(bool(set_up.kind)), [set_up.kind] if set_up.kind else [])
    is_right = (ended.returncode, row["named"]) == wanted and all(set_up.words in text for text in row["sentences"])
    return {**row, "fault": "" if is_right else ended.stderr[-2000:] or "another cause"}


def _children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def look_at_all(names: Iterable[str]) -> list[dict[str, Any]]:
    """Examine set-ups one after another, in separate folders."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="probe-faults-") as name:
        root = Path(name).resolve()
        make_model(root / "start")
        for name in names:
            folder = root / name.replace(" ", "-")
            plant(SET_UPS[name], root / "start", folder)
            rows.append(look(SET_UPS[name], folder))
            named = ", ".join(rows[-1]["named"]) or "nothing"
            print(f"{name:28} {named:18} {rows[-1]['cpu_s']:6.1f} s  {rows[-1]['fault']}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three faults, and no result file")
    parser.add_argument("--only", type=lambda text: text.split(","), metavar="NAME,...", help="no result file")
    options = parser.parse_args()
    if unknown := set(options.only or ()) - set(SET_UPS):
        parser.error(f"no set-up {', '.join(sorted(unknown))}: there are {', '.join(SET_UPS)}")
    rows = look_at_all(options.only or (QUICK if options.quick else SET_UPS))
    if not options.quick and not options.only:
        write("probe_faults", command_of("probe_faults"), {"prompts": PROMPTS, "samples": SAMPLES, "rows": rows})
    raise SystemExit(int(any(row["fault"] for row in rows)))


if __name__ == "__main__":
    main()
