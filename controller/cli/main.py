"""The command line. `areal-like ...` and `python -m controller ...` are the same.

Dispatches commands and prints users' errors. Arguments are in arguments.py, the commands on existing runs in
runs/commands.py, the jobs in jobs.py.

Exit status: 0 done; 1 the run failed; 2 a user error, one `error:` line each and no traceback; 130 Ctrl-C. `status` and
`stop` report the state of a run by theirs: 1 failed, crashed or not ended in time, 3 on another machine.
The Python version is checked before any other module of the project is imported. None of these commands imports torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from controller.doctor.supported_versions import _installed, python_fault, torch_fault

if TYPE_CHECKING:
    from controller.config.loading import Loaded
    from controller.config.run_config import RunConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    if fault := python_fault(sys.version_info[:2]):
        return _complain(fault)
    from areal_like.import_check import prefer_installation

    prefer_installation()
    from controller.launch.cluster.job_guard import guard, is_needed

    words = list(sys.argv[1:] if argv is None else argv)
    return guard(lambda: _command(words)) if is_needed(words[:1]) else _command(words)


def _command(argv: Sequence[str]) -> int:
    from areal_like.errors import OperationError, UserError

    try:
        from areal_like.import_check import check_not_shadowed

        check_not_shadowed()
        from controller.cli.arguments import RUN_COMMANDS, parse

        arguments = parse(argv, _complain)
        if arguments.command in RUN_COMMANDS:  # they do not need torch, and `doctor` must run when torch is broken
            from controller.runs.commands import run_command

            return run_command(arguments)
        if arguments.command == "init":
            from controller.cli.init import init

            return init(arguments, _command)
        if arguments.command == "dashboard":
            from controller.dashboard.command import dashboard

            return dashboard(arguments.runs_dir, host=arguments.host, port=arguments.port, token=arguments.token)
        if arguments.command == "score":
            from controller.cli.score import score

            return score(arguments)
        if arguments.command == "data":
            from controller.cli.data import data

            return data(arguments)
        if arguments.command == "mcp":
            from controller.cli.mcp_server import serve as serve_tools

            return serve_tools()
        if fault := torch_fault(_installed("torch")):
            return _complain(fault)
        if arguments.command == "serve":
            from controller.cli.serve import serve

            serve(arguments)
        if arguments.command in ("replay", "capsule", "whatif"):
            from controller.runs.replay.command import replay_command

            return replay_command(arguments)
        return _run(arguments)
    except UserError as error:
        return _complain(str(error))
    except OperationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `areal-like reference | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _complain(text: str) -> int:
    """Print each line as a user error; return exit status 2."""
    for line in text.splitlines():
        print(f"error: {line}", file=sys.stderr)
    return 2


# ---------------------------------------------------------------- commands


def _run(arguments: argparse.Namespace) -> int:
    command = arguments.command
    if getattr(arguments, "keep_alive", False):
        from controller.cli.keep_alive import KeepAlive, words_of

        return KeepAlive(words_of(arguments), arguments.max_failures).run()
    if command == "reference":
        from controller.cli.reference_page import reference_page

        sys.stdout.write(reference_page())
        return 0
    if command == "resume":
        from controller.run_folder.locate import find_run
        from controller.run_folder.owner_host import refuse_if_elsewhere

        folder = find_run(arguments.run)
        refuse_if_elsewhere(folder)
        from controller.cli import jobs, offline_jobs

        if offline_jobs.is_offline_run(folder):
            return offline_jobs.resume(folder)
        return jobs.resume(folder.root, accept_loss=arguments.accept_loss, past_early_stop=arguments.past_early_stop)
    if command == "train":
        from controller.launch import early

        early.start()
        try:
            return _run_config(arguments)
        finally:
            early.discard()
    return _run_config(arguments)


def _run_config(arguments: argparse.Namespace) -> int:
    """Run a command that takes a configuration."""
    command = arguments.command
    if _is_offline(arguments):
        return _run_offline(arguments)

    from controller.cli.encrypted_model import opened_model
    from controller.config.loading import load_config

    loaded = load_config(arguments.config, arguments.overrides)
    if getattr(arguments, "slices", False) and not loaded.config.eval.slices:
        loaded = load_config(arguments.config, [*arguments.overrides, "eval.slices=[auto]"])
    with opened_model(loaded, command) as opened:
        return _run_loaded(arguments, opened)


def _run_loaded(arguments: argparse.Namespace, loaded: Loaded[RunConfig]) -> int:
    from controller.cli.machine import look_at_machine

    command = arguments.command
    found = look_at_machine(loaded, command)
    for note in loaded.notes:
        print(f"note: {note}", file=sys.stderr)
    if command == "validate":
        from controller.cli.resolved_page import resolved_page

        sys.stdout.write(resolved_page(loaded, found, price=arguments.price, lengths=arguments.lengths))
        return 0
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)
    if command == "probe":
        from controller.cli.probe import probe

        return probe(arguments, loaded, found.train)
    from controller.cli import jobs

    if command == "train":
        return jobs.train(loaded.config, source=loaded.source, tables=found.tables, cleaned=found.cleaned)
    return jobs.sft(loaded.config) if command == "sft" else jobs.evaluate(loaded.config, tables=found.tables)


def _is_offline(arguments: argparse.Namespace) -> bool:
    """Return whether the config trains from files. Raises UserError if the command does not support such a config."""
    from areal_like.errors import UserError
    from controller.config.offline_loading import is_offline_file

    is_offline, command = is_offline_file(arguments.config, arguments.overrides), arguments.command
    if command in ("dpo", "reward-model") and not is_offline:
        what = "data.train is not a file, so this is the config of a run with rollouts"
        raise UserError(
            what, where=arguments.config, remedy="set data.train to a JSONL file; see configs/offline for examples"
        )
    if command in ("train", "eval", "probe") and is_offline:
        what = "data.train is a file, so this config trains from files"
        remedy = "use areal-like sft, dpo or reward-model, or set data.train: {path: ...} for a run with rollouts"
        raise UserError(what, where=arguments.config, remedy=remedy)
    return is_offline


def _run_offline(arguments: argparse.Namespace) -> int:
    from controller.config.offline_loading import load_offline

    loaded = load_offline(arguments.config, arguments.overrides)
    if arguments.command == "validate":
        from areal_like.config import dump_yaml
        from controller.preflight.offline import check_whole

        check_whole(loaded)
        sys.stdout.write(f"# {loaded.source}, resolved\n{dump_yaml(loaded.config)}\n# {loaded.source} is valid\n")
        return 0
    from controller.cli import offline_jobs
    from controller.preflight.machine import unused_by_one_process
    from controller.preflight.offline import check_offline

    check_offline(loaded)
    for note in unused_by_one_process(loaded.config.trainer.device):
        print(f"note: {note}", file=sys.stderr)
    return offline_jobs.start(loaded, arguments.command)
