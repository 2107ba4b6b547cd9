"""Arguments of every command, and what `--help` prints.

The commands are dispatched in main.py and runs/commands.py.
"""

from __future__ import annotations

import argparse
import difflib
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from areal_like.arguments import price, processes, sample_name, seconds, whole, whole_or_all
from controller.cli.checkpoint_arguments import add_checkpoints
from controller.cli.data_arguments import add_data
from controller.cli.init_arguments import add_init
from controller.cli.keep_alive_arguments import add_keep_alive
from controller.cli.lineage_arguments import add_lineage
from controller.cli.replay_arguments import add_replay
from controller.cli.serve_arguments import add_serve
from controller.cli.verify_arguments import add_verify
from controller.cli.worker_arguments import add_worker
from controller.dashboard.arguments import add_dashboard
from controller.simulate.arguments import add_simulate

RUN_COMMANDS = (
    "status", "logs", "stop", "drain", "add", "checkpoint", "export", "import", "decrypt", "ps", "samples", "report",
    "compare", "verify", "blame", "lineage", "note", "doctor", "simulate", "worker",
)  # fmt: skip
"""Commands that look at runs or at the machine; the others run something."""

_CONFIG_EPILOG = """\
CONFIG is a YAML file, a run's folder, or the name of a shipped config ({shipped}).

key.path=value overrides one key, with a YAML value: num_steps=40 trainer.optimizer.lr=3e-5 data.eval=null
"""
_RUN_HELP = "a run's folder, its name in runs/, or the name of a run that was started on this machine"
_TOP_EPILOG = """\
  a job         init, train, resume, validate, probe, sft, dpo, reward-model, eval, simulate
  its runs      ps, status, logs, stop, drain, add, worker, checkpoint, export, samples, report, compare,
                verify, blame, lineage, replay, whatif, capsule, dashboard
  no run        data, serve, score, import, decrypt, mcp
  this machine  doctor

For help on a command: areal-like COMMAND --help

exit status: 0 done; 1 failed; 2 a user error (command line, config or files); 3 the run belongs to another
machine; 130 interrupted. See `status --help` and `stop --help` for what they mean there.
"""


class Words(argparse.HelpFormatter):
    """Paragraphs are filled to the terminal's width; those with indented lines stay as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.strip("\n").split("\n\n")
        return "\n\n".join(
            indented if "\n  " in (indented := textwrap.indent(paragraph, indent))
            else textwrap.fill(" ".join(paragraph.split()), width, initial_indent=indent, subsequent_indent=indent)
            for paragraph in paragraphs
        )  # fmt: skip

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):  # argparse removes the indentation
            self._action_max_length += self._indent_increment


class Parser(argparse.ArgumentParser):
    """ArgumentParser that prints its errors like all other errors of the program."""

    complain: Callable[[str], int]
    make_epilog: Callable[[], str] | None = None
    """Computes the epilog when help is shown, because its imports are slow."""

    def format_help(self) -> str:
        if self.make_epilog is not None:
            self.epilog = self.make_epilog()
        return super().format_help()

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Name the nearest choice instead of all of them, where there is one."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            near = difflib.get_close_matches(str(value), map(str, action.choices or ()), 1)
            if not near:
                raise
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}; did you mean {near[0]}?") from error

    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(Parser.complain(f"{message} (see {self.prog} --help)"))


def make_parser(complain: Callable[[str], int]) -> Parser:
    """Make the parser of the whole program; `complain` prints an error and returns the exit status."""
    from areal_like import __version__

    Parser.complain = staticmethod(complain)
    top = Parser(
        prog="areal-like", description="Asynchronous reinforcement learning for language models.",
        epilog=_TOP_EPILOG, formatter_class=Words,
    )  # fmt: skip
    top.add_argument("--version", action="version", version=f"areal-like {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    for name, text in (
        ("train", "train a model with the settings of a config"),
        ("validate", "check a config; print it with all defaults and derived numbers, or list all errors"),
        ("sft", "run supervised fine-tuning from files (docs/offline.md), or only the warm start of a config"),
        ("dpo", "train on preference pairs from files with DPO (docs/offline.md)"),
        ("reward-model", "train a reward model on preference pairs from files (docs/offline.md)"),
        ("eval", "evaluate a model on data.eval; set model.path=FOLDER to evaluate a checkpoint"),
        ("probe", "check before training whether the starting model can learn from its rewards"),
    ):
        command = _command(commands, name, text)
        command.make_epilog = _config_epilog
        command.add_argument(
            "config", metavar="CONFIG", help="a YAML file, a run's folder, or the name of a shipped config"
        )
        command.add_argument("overrides", nargs="*", default=[], metavar="key.path=value", help="override one key")
        if name == "train":
            add_keep_alive(command)
        if name == "eval":
            command.add_argument(
                "--slices",
                action="store_true",
                help="compare slices of data.eval: those that eval.slices lists, or slices by column, length and "
                "source (docs/data.md)",
            )
        if name == "validate":
            command.add_argument(
                "--price", type=price, metavar="P", help="price of a GPU-hour, used to estimate the cost of the run"
            )
            command.add_argument(
                "--lengths",
                default="",
                metavar="L",
                help="distribution of answer lengths, in the format of `simulate --lengths`",
            )
        if name == "probe":
            command.add_argument(
                "-m", "--prompts", type=processes, default=4, metavar="M", help="number of prompts (default: 4)"
            )
            command.add_argument(
                "-n",
                "--samples",
                type=processes,
                default=8,
                metavar="N",
                help="number of samples per prompt (default: 8)",
            )
            command.add_argument("--warm-start", action="store_true", help="run the supervised warm start first")
            command.add_argument("--json", action="store_true", help="print one JSON object")
    resume = _command(commands, "resume", "continue an interrupted or crashed run")
    resume.add_argument("run", metavar="RUN", help=_RUN_HELP)
    resume.add_argument(
        "--accept-loss", action="store_true",
        help="continue from the newest state that is in both the ledger and the checkpoints, even if files of the run "
        "are missing or outdated; later checkpoints are moved to a separate folder",
    )  # fmt: skip
    resume.add_argument(
        "--past-early-stop",
        action="store_true",
        help="continue a run that was ended by early_stop, with early_stop disabled",
    )
    add_keep_alive(resume)
    add_init(commands, _command)
    _add_looking(commands)
    _add_steering(commands)
    add_worker(commands, _command)
    add_checkpoints(commands, _command, seconds, _RUN_HELP)
    add_replay(commands, _command, _RUN_HELP)
    _add_samples(commands)
    _add_reports(commands)
    add_verify(commands, _command, _RUN_HELP)
    add_lineage(commands, _command, _RUN_HELP)
    add_dashboard(commands, _command)
    add_simulate(commands, _command, seconds)
    add_data(commands, _command)
    _add_score(commands)
    add_serve(commands, _command)
    _command(commands, "mcp", "make these commands available to a coding agent over stdin and stdout (docs/mcp.md)")
    _command(commands, "reference", "print the reference page of all config keys")
    return top


def _config_epilog() -> str:
    from controller.config.loading import shipped_configs, shipped_offline_configs

    return _CONFIG_EPILOG.format(shipped=", ".join(shipped_configs() + shipped_offline_configs()))


def _command(commands: Any, name: str, text: str, epilog: str = "", long: str = "") -> Parser:
    parser: Parser = commands.add_parser(
        name,
        help=text,
        description=long or f"{text[0].upper()}{text[1:]}.",
        epilog=epilog,
        formatter_class=Words,
    )
    return parser


def _add_looking(commands: Any) -> None:
    status = _command(
        commands, "status",
        "show the status of a run: health, progress, and which process waits for which", _STATUS_EPILOG,
        "Show the status of a run from any terminal: health, current step, remaining time, which process waits for "
        "which, the state of each process, and accuracy.",
    )  # fmt: skip
    status.add_argument("run", metavar="RUN", help=_RUN_HELP)
    how = status.add_mutually_exclusive_group()
    how.add_argument("-w", "--watch", action="store_true", help="update the status continuously until the run ends")
    how.add_argument(
        "--why", action="store_true", help="also diagnose the run from all its metrics and suggest changes"
    )
    status.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object; with --watch, print one object per line after each change",
    )
    status.add_argument(
        "--interval", type=seconds, default=1.0, metavar="S", help="refresh interval of --watch in seconds (default: 1)"
    )
    logs = _command(
        commands, "logs", "show the logs of a run's processes, in chronological order", _LOGS_EPILOG,
        "Show the logs of all processes of a run, merged in chronological order, or only those of selected processes.",
    )  # fmt: skip
    logs.add_argument("run", metavar="RUN", help=_RUN_HELP)
    logs.add_argument(
        "-p", "--process", action="append", default=[], metavar="P",
        help="show only this process: controller, trainer, reward, rollout-0, ...; `rollout` selects all rollout "
        "workers; this option can be repeated",
    )  # fmt: skip
    logs.add_argument("-f", "--follow", action="store_true", help="continue to show new lines until the run ends")
    logs.add_argument(
        "-n",
        "--tail",
        type=whole_or_all,
        default=100,
        metavar="N",
        help="show the last N lines (default: 100); `all` shows all lines",
    )
    listing = _command(
        commands,
        "ps",
        "list the runs on this machine",
        _PS_EPILOG,
        "List the runs on this machine, regardless of the folder in which they are stored.",
    )
    listing.add_argument(
        "-a", "--all", action="store_true", help="also list runs that have ended or crashed, and runs on other machines"
    )
    listing.add_argument(
        "--runs-dir",
        action="append",
        default=[],
        metavar="D",
        help="also search this folder for runs; this option can be repeated",
    )
    listing.add_argument("--json", action="store_true", help="print a JSON list")


def _add_steering(commands: Any) -> None:
    stop = _command(
        commands, "stop", "stop a run gracefully and wait for it to exit", _STOP_EPILOG,
        "Stop a run: it finishes the current step, saves a checkpoint and exits with status 0. The command waits for "
        "the run to exit and prints how it ended.",
    )  # fmt: skip
    stop.add_argument("run", metavar="RUN", help=_RUN_HELP)
    stop.add_argument(
        "--now",
        action="store_true",
        help="stop immediately, without finishing the current step; `areal-like resume` then continues from the last "
        "checkpoint",
    )
    stop.add_argument(
        "--timeout", type=seconds, default=180.0, metavar="S", help="maximum time to wait, in seconds (default: 180)"
    )

    note = _command(
        commands, "note", "show or change a run's notes and tags", "",
        "Show or change the notes and tags that describe a run. They appear in `areal-like ps`, in the report and on "
        "the dashboard, and can be changed at any time. Without TEXT and --tag, the command prints them.",
    )  # fmt: skip
    note.add_argument("run", metavar="RUN", help=_RUN_HELP)
    note.add_argument(
        "text", metavar="TEXT", nargs="?", help="new notes, which replace the old ones; '' removes the notes"
    )
    note.add_argument(
        "--tag", dest="tags", action="append", metavar="TAG",
        help="new tag; repeat the option for several tags, which replace the old ones; '' removes all tags",
    )  # fmt: skip
    drain = _command(
        commands, "drain", "remove a rollout worker from a run in progress", _CREW_EPILOG,
        "Remove a rollout worker: its running samples continue on other workers, and its process exits and is not "
        "restarted. Sending SIGTERM to the process has the same effect, for example when a spot instance is "
        "terminated.",
    )  # fmt: skip
    add = _command(
        commands, "add", "add a rollout worker to a run in progress", _CREW_EPILOG,
        "Start another rollout worker. It gets the lowest free number, which may be that of a drained worker.",
    )  # fmt: skip
    for command in (drain, add):
        command.add_argument("run", metavar="RUN", help=_RUN_HELP)
        command.add_argument(
            "--timeout", type=seconds, default=60.0, metavar="S", help="maximum time to wait, in seconds (default: 60)"
        )
    drain.add_argument(
        "worker", metavar="WORKER", help="name of the worker as shown by `areal-like status`: rollout-0, rollout-1, ..."
    )


def _add_samples(commands: Any) -> None:
    samples = _command(
        commands, "samples", "show the prompts, answers and rewards of a run", _SAMPLES_EPILOG,
        "Print finished training samples from the ledger of a run: prompt, answer, reward and its components, policy "
        "versions, staleness and worker. The run may still be in progress.",
    )  # fmt: skip
    samples.add_argument("run", metavar="RUN", help=_RUN_HELP)
    samples.add_argument("--step", type=whole, metavar="N", help="show only samples that step N used")
    samples.add_argument("--group", type=whole, metavar="G", help="show only the samples of the group with this number")
    samples.add_argument(
        "--life", type=sample_name, metavar="GROUP.SAMPLE",
        help="show the timeline of one sample instead, from the draw of its prompt to the step that used it",
    )  # fmt: skip
    order = samples.add_mutually_exclusive_group()
    order.add_argument("--worst", action="store_true", help="sort by ascending reward and omit samples without a score")
    order.add_argument("--best", action="store_true", help="sort by descending reward and omit samples without a score")
    samples.add_argument(
        "--grep",
        default="",
        metavar="TEXT",
        help="show only samples whose prompt or answer contains TEXT, ignoring case",
    )
    samples.add_argument(
        "--limit",
        type=whole_or_all,
        default=-1,
        metavar="N",
        help="show at most N samples (default: 20, or 200 for jsonl and html); `all` removes the limit",
    )
    samples.add_argument(
        "--format", choices=("text", "jsonl", "html"), default="text", help="output format (default: text)"
    )
    samples.add_argument(
        "--out",
        default="",
        metavar="FILE",
        help="write to this file, or to stdout if FILE is `-` (default: RUN/samples.html for html, otherwise stdout)",
    )
    samples.add_argument("--full", action="store_true", help="print long texts in full")


def _add_reports(commands: Any) -> None:
    report = _command(
        commands, "report", "write report.html and report.png for a run", "",
        "Write report.html and report.png to the folder of a run: diagnosis, learning curve, timeline, answer lengths "
        "and staleness. A run writes them when it ends; this command works at any time.",
    )  # fmt: skip
    report.add_argument("run", metavar="RUN", help=_RUN_HELP)
    report.add_argument(
        "--out", default="", metavar="FOLDER",
        help="folder for the page and the picture (default: the run's folder; required for an encrypted run)",
    )  # fmt: skip
    compare = _command(
        commands, "compare", "compare runs side by side in a table and a plot", "",
        "Print a table that compares several runs side by side, and write an HTML page and a plot of the comparison.",
    )  # fmt: skip
    compare.add_argument("runs", nargs="+", metavar="RUN", help=_RUN_HELP)
    compare.add_argument(
        "--out",
        default="",
        metavar="FOLDER",
        help="folder for the page and the plot (default: the parent folder of the first run)",
    )
    doctor = _command(
        commands, "doctor",
        "check whether this machine can run areal-like, and explain how to install what is missing", "",
        "Check this machine: Python, torch and devices, memory, resource limits, optional packages, sandbox and disk. "
        "Print how to install what is missing.",
    )  # fmt: skip
    doctor.add_argument("--bench", action="store_true", help="also run benchmarks that take a few seconds")
    doctor.add_argument("--json", action="store_true", help="print one JSON object")


def _add_score(commands: Any) -> None:
    score = _command(
        commands, "score", "score a file of answers without starting a run", _SCORE_EPILOG,
        "Score every row of a JSONL file with a reward scorer, in separate processes: one verdict per line, in input "
        "order. If interrupted, run the same command again to continue.",
    )  # fmt: skip
    score.add_argument(
        "--scorer", required=True, metavar="S", help="math, code, or your own function as module:function"
    )
    score.add_argument("--input", required=True, metavar="FILE", help="file of rows in JSON Lines format (UTF-8)")
    score.add_argument(
        "--output",
        required=True,
        metavar="FILE",
        help="output file; line k contains the verdict for line k of the input",
    )
    score.add_argument(
        "--workers", type=processes, default=0, metavar="N", help="number of scoring processes (default: one per core)"
    )
    score.add_argument(
        "--timeout", type=seconds, metavar="S",
        help="time limit per row in seconds; a row that exceeds it gets the verdict `timed_out` (default: 10, or 61.5 "
        "for code, where a row can set its own limit)",
    )  # fmt: skip
    score.add_argument(
        "--overwrite", action="store_true", help="discard the existing output and start from the beginning"
    )
    score.add_argument("options", nargs="*", default=[], metavar="key=value", help="options of the scorer")


_STATUS_EPILOG = """\
The command works for runs in progress, finished runs, stopped runs, failed runs and crashed runs (whose controller was
killed). The state of a run that was started on another machine cannot be determined from this machine.

exit status: 0 the run is in progress, is finished or was stopped; 1 the run failed or crashed; 2 there is no such run,
or its folder is damaged; 3 the run belongs to another machine. Ctrl-C ends --watch with status 0.
"""
_LOGS_EPILOG = """\
examples:
  areal-like logs quickstart                    the last 100 lines of all processes
  areal-like logs quickstart -p trainer -n all  the trainer's whole log
  areal-like logs quickstart -p rollout -f      follow every rollout worker

Ctrl-C ends --follow with exit status 0. The run is not affected.
"""
_PS_EPILOG = """\
Every run records its location in $XDG_STATE_HOME/areal_like/runs (~/.local/state/...) when it starts; runs/ in the
current folder and the processes on this machine are searched as well. The exit status is 0 even if there are no runs.
"""
_STOP_EPILOG = """\
The command sends SIGTERM (twice with --now) only to the controller process that the run's folder records.

exit status: 0 the run has stopped, or was not running; 1 the run is still shutting down after --timeout, has failed, or
was killed; 2 there is no such run, or it belongs to another user; 3 the run is on another machine and can only be
stopped there.
"""
_CREW_EPILOG = """\
The request is passed to the run's controller through the run's folder; the controller replies within a second.

exit status: 0 done; 1 the request was rejected (the only worker cannot be removed), or is still being processed after
--timeout; 2 there is no such run, or the run is not running.
"""
_SAMPLES_EPILOG = """\
examples:
  areal-like samples quickstart --worst --limit 5
  areal-like samples quickstart --step 12 --format html
  areal-like samples quickstart --format jsonl --limit all --out samples.jsonl
  areal-like samples quickstart --life 12.3

Without --out, the HTML page is written to samples.html in the run's folder.

Tokens are kept until a checkpoint covers them and ledger.keep_mb is exceeded; older samples show
their metadata only, with a note.
Evaluation answers are not stored.
"""


_SCORE_EPILOG = """\
examples:
  areal-like score --scorer math --input answers.jsonl --output verdicts.jsonl
  areal-like score --scorer math --input answers.jsonl --output verdicts.jsonl gold_field=answer float_digits=3
  areal-like score --scorer code --input programs.jsonl --output verdicts.jsonl --workers 4 partial_credit=true
  areal-like score --scorer my_rewards:score --input answers.jsonl --output verdicts.jsonl --timeout 2

rows:
  math             {"response": "so \\\\boxed{42}", "gold": "42"}
  code             {"program": "def f(x): return x + 1", "tests": ["assert f(1) == 2"]}
                   {"program": "print(input())", "tests": [{"input": "3\\n", "output": "3\\n"}],
                    "time_limit_s": 2, "memory_limit_mb": 256}
  module:function  {"response": "...", whatever the function reads}

With the scorer `code`, a row contains code: its program, and its tests and prompt if these are Python. They run in
separate sandboxes (no network, no environment, none of your files), so files from other sources can be scored. The
scorer `math` executes no code from a row. Your own function runs with your permissions.

A row may have an `id` (default: its line number) and other fields. The scorer `code` also accepts the test columns of
published data sets; with `response` instead of `program`, it uses the last Python block of the response.

verdicts:
  {"id": 1, "verdict": "scored", "value": 1.0, "reason": "", "wall_s": 0.003, ...}

`verdict` is scored, timed_out, crashed or invalid; `value` is null unless the row is scored. A line that is not JSON,
has no text to score or is too long is `invalid`, with a reason. Invalid rows do not stop the command.

exit status: 0 every row has a verdict; 2 a user error, or the output belongs to a different input or
scorer; 130 interrupted (143 by SIGTERM): run the same command again to continue.
"""


def parse(argv: Sequence[str] | None, complain: Callable[[str], int]) -> argparse.Namespace:
    """Parse the command and its arguments. Exits with status 2 after an error, with 0 after --help."""
    parser = make_parser(complain)
    arguments, rest = parser.parse_known_args(argv)
    if not rest:
        return arguments
    if not hasattr(arguments, "overrides"):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if strange := [word for word in rest if "=" not in word]:
        parser.error(f"unrecognized arguments: {' '.join(strange)}; write an override as key.path=value")
    # --key.path=value, as in other programs: loading.py removes the dashes
    arguments.overrides = [*arguments.overrides, *rest]
    return arguments
