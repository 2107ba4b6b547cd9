"""`areal-like replay`, `areal-like capsule` and `areal-like whatif`: dispatch.

Arguments are in cli/replay_arguments.py.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable
from pathlib import Path

from areal_like.encryption.run_key import encrypted_root, run_key_of
from areal_like.errors import UserError
from areal_like.plain_folder import use_memory_for_scratch
from areal_like.process import private_files
from controller.run_folder.locate import find_run
from controller.run_folder.run_folder import RunFolder


def replay_command(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status. Raises UserError, OperationError."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: scratch folders hold whole models
    try:
        with private_files():
            return _COMMANDS[arguments.command](arguments)
    except OSError as error:
        where = str(error.filename) if error.filename else arguments.run
        remedy = "check that you have permission to read the run, and that TMPDIR has space for a checkpoint"
        raise UserError(f"{error.strerror or error}", where=where, remedy=remedy) from error
    finally:
        signal.signal(signal.SIGTERM, before)


def _run_of(arguments: argparse.Namespace) -> RunFolder:
    """The run; if it is encrypted, decrypted copies go to shared memory. Raises UserError."""
    folder = find_run(arguments.run)
    if run_key_of(folder.root) is not None:
        use_memory_for_scratch()
    return folder


def _replay(arguments: argparse.Namespace) -> int:
    file = Path(arguments.run).expanduser()
    if file.is_file():
        from controller.runs.replay.capsule import replay_capsule

        if arguments.first is not None or arguments.last is not None:
            raise UserError("a capsule contains only one step", where="--from, --to", remedy="remove these options")
        if arguments.engine or arguments.samples is not None or arguments.json:
            what = "a capsule contains a step of the trainer, but no weights of the versions that sampled its answers"
            raise UserError(
                what,
                where="--engine, --samples, --json",
                remedy="remove these options, or specify the run instead of the capsule",
            )
        return replay_capsule(file)
    if arguments.engine:
        from controller.runs.replay.regenerate import regenerate_run

        return regenerate_run(
            _run_of(arguments), first=arguments.first, last=arguments.last, num_samples=arguments.samples,
            as_json=arguments.json,
        )  # fmt: skip
    if arguments.samples is not None or arguments.json:
        what = "these options apply only to a comparison of answers, not to a replay of training steps"
        raise UserError(
            what, where="--samples, --json", remedy="add --engine to compare answers, or remove these options"
        )
    from controller.runs.replay.replay import replay_run

    return replay_run(_run_of(arguments), first=arguments.first, last=arguments.last)


def _capsule(arguments: argparse.Namespace) -> int:
    from controller.runs.replay.capsule import make_capsule

    folder = _run_of(arguments)
    if encrypted_root(folder.root) is not None:
        what = "the run is encrypted, and a capsule contains prompts, answers and weights in the clear"
        raise UserError(what, where=arguments.run, remedy="use areal-like replay, which writes nothing")
    return make_capsule(folder, arguments.step, Path(arguments.out).expanduser())


def _whatif(arguments: argparse.Namespace) -> int:
    from controller.runs.replay.whatif_settings import Answer, answer_of

    folder = _run_of(arguments)
    overrides = [text.removeprefix("--") for text in arguments.overrides]
    if answer_of(overrides) is Answer.SIMULATION:
        from controller.runs.replay.whatif_schedule import simulate_changed

        if arguments.first is not None or arguments.last is not None:
            raise UserError(
                "a schedule is always simulated from the first step",
                where="--from, --to",
                remedy="remove these options",
            )
        return simulate_changed(folder, overrides, as_json=arguments.json)
    from controller.runs.replay.whatif import replay_changed

    return replay_changed(
        folder, overrides, first=arguments.first, last=arguments.last, min_ess=arguments.min_ess,
        as_json=arguments.json,
    )  # fmt: skip


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "replay": _replay,
    "capsule": _capsule,
    "whatif": _whatif,
}
