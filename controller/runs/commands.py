"""Dispatches the commands on existing runs and on this machine.

The arguments are in cli/arguments.py. Errors of the operating system are converted to user errors.

Modules of a command are imported when it runs: `areal-like --help` stays fast, and `doctor` works if plotting packages
do not.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from areal_like.encryption.run_key import encrypted_root
from areal_like.errors import UserError


def run_command(arguments: argparse.Namespace) -> int:
    """Run one of RUN_COMMANDS and return its exit status. Raises UserError, OperationError."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # answers may contain characters that the terminal cannot encode
            stream.reconfigure(errors="backslashreplace")
    try:
        return _COMMANDS[arguments.command](arguments)
    except BrokenPipeError:
        raise
    except OSError as error:
        where = str(error.filename) if error.filename else arguments.command
        raise UserError(
            f"{error.strerror or error}",
            where=where,
            remedy="check that the path exists and that you have access to it",
        ) from error


def _status(arguments: argparse.Namespace) -> int:
    from controller.run_folder.locate import find_run_to_read
    from controller.runs.status import status

    folder = find_run_to_read(arguments.run)
    return status(
        folder, watch=arguments.watch, as_json=arguments.json, why=arguments.why, interval_s=arguments.interval
    )


def _logs(arguments: argparse.Namespace) -> int:
    from controller.run_folder.locate import find_run_to_read
    from controller.runs.logs import logs

    folder = find_run_to_read(arguments.run)
    return logs(folder, processes=arguments.process, follow=arguments.follow, tail=arguments.tail)


def _stop(arguments: argparse.Namespace) -> int:
    from controller.run_folder.locate import find_run
    from controller.runs.stop import stop

    return stop(find_run(arguments.run), now=arguments.now, timeout_s=arguments.timeout)


def _note(arguments: argparse.Namespace) -> int:
    from controller.run_folder.locate import find_run_to_read
    from controller.runs.note import note

    return note(find_run_to_read(arguments.run), arguments.text, tags=arguments.tags)


def _drain(arguments: argparse.Namespace) -> int:
    from controller.run_folder.locate import find_run
    from controller.runs.crew import drain

    return drain(find_run(arguments.run), arguments.worker, timeout_s=arguments.timeout)


def _add(arguments: argparse.Namespace) -> int:
    from controller.run_folder.locate import find_run
    from controller.runs.crew import add

    return add(find_run(arguments.run), timeout_s=arguments.timeout)


def _checkpoint(arguments: argparse.Namespace) -> int:
    from controller.run_folder.locate import find_run
    from controller.runs.checkpoint import checkpoint

    return checkpoint(find_run(arguments.run), timeout_s=arguments.timeout)


def _export(arguments: argparse.Namespace) -> int:
    from controller.runs.convert import export

    return export(
        arguments.source, arguments.out, version=arguments.version, best=arguments.best, dtype=arguments.dtype,
        lora=arguments.lora, repository=arguments.push_to_hub, is_public=arguments.public,
        is_decrypted=arguments.decrypt,
    )  # fmt: skip


def _decrypt(arguments: argparse.Namespace) -> int:
    from controller.runs.convert import decrypt

    return decrypt(arguments.source, arguments.out)


def _import(arguments: argparse.Namespace) -> int:
    from controller.runs.convert import import_model

    return import_model(arguments.source, arguments.out)


def _ps(arguments: argparse.Namespace) -> int:
    from controller.runs.ps import ps

    return ps(show_all=arguments.all, runs_dirs=arguments.runs_dir, as_json=arguments.json)


def _verify(arguments: argparse.Namespace) -> int:
    from controller.runs.verify.command import verify_command

    return verify_command(
        arguments.source, run=arguments.run, invariant=arguments.invariant, num_spots=arguments.spot,
        seed=arguments.seed, as_json=arguments.json,
    )  # fmt: skip


def _blame(arguments: argparse.Namespace) -> int:
    from controller.runs.verify.blame import blame_command

    return blame_command(arguments.source, run=arguments.run, format=arguments.format)


def _lineage(arguments: argparse.Namespace) -> int:
    from controller.runs.lineage.command import lineage_command

    return lineage_command(arguments)


def _samples(arguments: argparse.Namespace) -> int:
    from controller.run_folder.locate import find_run_for_content

    if arguments.life is not None:
        from controller.runs.verify.sample_life import print_life

        return print_life(find_run_for_content(arguments.run), *arguments.life)
    from controller.runs.sample_rows import Choice, Order
    from controller.runs.samples import DEFAULT_LIMIT, samples

    is_named = arguments.step is not None or arguments.group is not None
    order: Order = "worst" if arguments.worst else "best" if arguments.best else "given" if is_named else "newest"
    limit = DEFAULT_LIMIT[arguments.format] if arguments.limit == -1 else arguments.limit
    choice = Choice(step=arguments.step, group=arguments.group, order=order, limit=limit, grep=arguments.grep)
    folder = find_run_for_content(arguments.run)
    return samples(folder, choice, format=arguments.format, out=arguments.out, is_full=arguments.full)


def _report(arguments: argparse.Namespace) -> int:
    from controller.run_folder.locate import find_run_for_content

    folder = find_run_for_content(arguments.run)
    from controller.report.page import draw_report
    from controller.runs.answer_pairs import training_answers
    from controller.runs.status_view import printable

    path, findings = draw_report(folder, training_answers(folder), Path(arguments.out) if arguments.out else None)
    print(printable(f"{findings[0].severity}: {findings[0].title}"))
    print(f"report: {path}")
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    from controller.run_folder.locate import find_run_for_content

    folders = [find_run_for_content(run) for run in arguments.runs]
    is_inside = bool(arguments.out) and encrypted_root(Path(arguments.out)) is not None
    if is_inside or (not arguments.out and any(encrypted_root(folder.root) is not None for folder in folders)):
        what = "the page contains settings of the runs in the clear, and a run is encrypted"
        raise UserError(what, where="--out", remedy="choose a folder outside of it with --out FOLDER")
    from controller.report.compare import compare

    print(compare(folders, Path(arguments.out) if arguments.out else None))
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from controller.doctor.command import doctor

    return doctor(bench=arguments.bench, as_json=arguments.json)


def _simulate(arguments: argparse.Namespace) -> int:
    from controller.simulate.command import simulate_command

    return simulate_command(arguments)


def _worker(arguments: argparse.Namespace) -> int:
    from controller.runs.join import join

    return join(arguments.join, device=arguments.device, model=arguments.model)


_COMMANDS = {
    "status": _status, "logs": _logs, "stop": _stop, "note": _note, "drain": _drain, "add": _add,
    "checkpoint": _checkpoint, "export": _export, "import": _import, "decrypt": _decrypt, "ps": _ps,
    "samples": _samples, "report": _report, "compare": _compare, "doctor": _doctor,
    "simulate": _simulate, "verify": _verify, "blame": _blame, "lineage": _lineage,
    "worker": _worker,
}  # fmt: skip
