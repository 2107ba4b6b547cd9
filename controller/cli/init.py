"""`areal-like init`: writes a first config from five questions or from flags, validates it, and probes a small model.

Existing files are never overwritten. The content of the files is in new_job.py, the validation in preflight/.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from areal_like.errors import UserError
from controller.cli.new_job import ANSWER_KINDS, HARDWARE, TINY, TRACKERS, NewJob
from controller.config.loading import load_config
from controller.config.model_folder import find_model, weight_bytes
from controller.config.problems import ConfigError
from controller.preflight.preflight import look

Ask = Callable[[str], str]
INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended."""
FOUND = 1
"""Exit status of a probe that found something."""
MAX_SMALL_BYTES = 200_000_000
"""Weights of a model that is probed without a question: about 100M parameters in bfloat16."""
DEFAULTS = {"data": "train.jsonl", "answer": "math", "model": TINY, "hardware": "cpu", "tracker": "none"}
QUESTIONS = {
    "data": "Data: a .jsonl or .parquet file, optionally followed by a comma and a file of held-out rows",
    "answer": "Answers: " + "; ".join(f"{kind} = {what}" for kind, what in ANSWER_KINDS.items()),
    "model": f"Model: a Hugging Face Hub name, a folder, or {TINY} (random weights, to test data and reward on a CPU)",
    "hardware": "Hardware: " + "; ".join(f"{kind} = {what}" for kind, what in HARDWARE.items()),
    "tracker": f"Tracker: {', '.join(TRACKERS)}",
}
CHOICES: Mapping[str, Sequence[str]] = {
    "answer": list(ANSWER_KINDS), "hardware": list(HARDWARE), "tracker": list(TRACKERS),
}  # fmt: skip


def init(arguments: argparse.Namespace, run: Callable[[Sequence[str]], int], ask: Ask | None = None) -> int:
    """Write the files, validate them and probe the model; return the exit status. Raises UserError, ConfigError.

    run: runs another command. ask: answers a question; None: ask on the terminal, if there is one and no flag is given.
    Findings of a probe that was not asked for are no failure of this command.
    """
    given = {key: getattr(arguments, key) for key in DEFAULTS if getattr(arguments, key) is not None}
    if ask is None and not given and sys.stdin is not None and sys.stdin.isatty():  # None: the shell closed it
        ask = input
    if ask is None and "data" not in given:
        raise UserError(
            "no data file was specified", where="--data", remedy="add the option --data train.jsonl[,heldout.jsonl]"
        )
    target, answers = Path(arguments.config).expanduser(), {**DEFAULTS, **given}
    if ask is not None:
        try:
            answers = {key: _answer(key, question, ask) for key, question in QUESTIONS.items()}
        except (EOFError, KeyboardInterrupt) as error:
            print(file=sys.stderr)  # end the line of the question
            unanswered = UserError(
                "the questions were not answered, so no file was written",
                where="areal-like init",
                remedy=f"use options instead: {' '.join(_flags(target))}",
            )
            if isinstance(error, EOFError):
                raise unanswered from None
            print(f"interrupted: {unanswered}", file=sys.stderr)
            return INTERRUPTED
    job = NewJob(target=target, **answers)
    _write(job.files())
    for note in job.notes:
        print(f"note: {note}")
    file = shlex.quote(str(target))
    _validate(target)
    if arguments.probe is None and not _is_small(job) and not (ask is not None and _wants_probe(ask)):
        print(f"next steps: areal-like probe {file}, then areal-like train {file}")
        return 0
    print(f"next step: areal-like train {file}")
    if arguments.probe is False:
        return 0
    print("probing the starting model; use --no-probe to skip the probe", flush=True)
    status = run(["probe", str(target)])
    return 0 if status == FOUND and arguments.probe is None else status


def _flags(target: Path) -> list[str]:
    """The flags of a command that asks no questions."""
    flags = [f"--{key} {'|'.join(CHOICES[key]) if key in CHOICES else shlex.quote(DEFAULTS[key])}" for key in DEFAULTS]
    return ["areal-like init", shlex.quote(str(target)), *flags]


def _is_small(job: NewJob) -> bool:
    """Return whether probing takes seconds: a CPU job whose model is random, or on this machine and small."""
    if job.hardware != "cpu":
        return False
    if job.model == TINY:
        return True
    folder = find_model(job.model)
    return folder is not None and 0 < weight_bytes(folder) <= MAX_SMALL_BYTES


def _wants_probe(ask: Ask) -> bool:
    try:
        question = "Probe the config now (samples the model, and downloads it if needed)? [y/N] "
        return ask(question).strip().lower() == "y"
    except EOFError:
        print()
        return False


def _answer(key: str, question: str, ask: Ask) -> str:
    while True:
        answer = ask(f"{question} [{DEFAULTS[key]}]: ").strip() or DEFAULTS[key]
        if answer in CHOICES.get(key, [answer]):
            return answer
        print(f"{answer} is not one of {', '.join(CHOICES[key])}", file=sys.stderr)


def _write(files: Mapping[Path, str]) -> None:
    """Write all files or none. Raises UserError if one of them exists or cannot be written."""
    for path in files:
        if path.exists():
            raise UserError(
                "the file already exists and will not be overwritten",
                where=str(path),
                remedy="choose a different file name",
            )
    written: list[Path] = []
    for path, text in files.items():
        try:
            with path.open("x", encoding="utf-8") as file:
                written.append(path)
                file.write(text)
        except OSError as error:
            for ours in written:
                ours.unlink(missing_ok=True)
            remedy = "choose an existing folder that is writable"
            raise UserError(f"the file cannot be written ({error.strerror})", where=str(path), remedy=remedy) from error
    for path in written:
        print(f"wrote {path}")


def _validate(path: Path) -> None:
    """Validate the config. Raises ConfigError with all errors; the files are kept, to be corrected."""
    loaded = load_config(str(path))
    found = look(loaded.config, "validate")
    for remark in [*found.notes, *(str(problem) for problem in found.absent)]:
        print(f"note: {remark}")
    if found.problems:
        raise ConfigError([problem.placed(loaded.document.where) for problem in found.problems], loaded.source)
    print(f"areal-like validate {shlex.quote(str(path))} found no errors")
