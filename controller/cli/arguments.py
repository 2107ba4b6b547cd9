"""Arguments of every command, and what `--help` prints.

The commands are dispatched in main.py and runs/commands.py.
"""

from __future__ import annotations

import argparse
import difflib
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from areal_like.arguments import processes, sample_name, seconds, whole, whole_or_all
from controller.cli.checkpoint_arguments import add_checkpoints
from controller.cli.data_arguments import add_data
from controller.cli.init_arguments import add_init
from controller.cli.keep_alive_arguments import add_keep_alive
from controller.cli.lineage_arguments import add_lineage
from controller.cli.replay_arguments import add_replay
from controller.cli.serve_arguments import add_serve
from controller.cli.verify_arguments import add_verify
from controller.dashboard.arguments import add_dashboard
from controller.simulate.arguments import add_simulate

RUN_COMMANDS = (
    "status", "logs", "stop", "drain", "add", "checkpoint", "export", "import", "ps", "samples", "report", "compare",
    "verify", "blame", "lineage", "doctor", "simulate",
)  # fmt: skip
"""Commands that look at runs or at the machine; the others run something."""

_CONFIG_EPILOG = """\
CONFIG is a YAML file, a run's folder, or the name of a shipped config ({shipped}).

key.path=value overrides one key, with a YAML value: num_steps=40 trainer.optimizer.lr=3e-5 data.eval=null
"""
_RUN_HELP = "a run's folder, its name in runs/, or the name of a run you started anywhere"
_TOP_EPILOG = """\
  a job         init, train, resume, validate, probe, sft, dpo, reward-model, eval, simulate
  its runs      ps, status, logs, stop, drain, add, checkpoint, export, samples, report, compare,
                verify, blame, lineage, replay, whatif, capsule, dashboard
  no run        data, serve, score, import, mcp
  this machine  doctor

Every command explains itself: areal-like COMMAND --help

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
            raise argparse.ArgumentError(action, f"no such choice: {value!r}; did you mean {near[0]}?") from error

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
        ("train", "run a job"),
        ("validate", "print the resolved config with its derived numbers, or every error at once"),
        ("sft", "supervised training from files (docs/offline.md), or only the warm_start of a config with rollouts"),
        ("dpo", "train on preferences from files (docs/offline.md)"),
        ("reward-model", "train a reward model on preferences from files (docs/offline.md)"),
        ("eval", "score a model on data.eval; model.path=FOLDER names the checkpoint"),
        ("probe", "sample the starting model a few times: would the reward stay flat, and why"),
    ):
        command = _command(commands, name, text)
        command.make_epilog = _config_epilog
        command.add_argument("config", metavar="CONFIG", help="YAML file or shipped config")
        command.add_argument("overrides", nargs="*", default=[], metavar="key.path=value", help="override one key")
        if name == "train":
            add_keep_alive(command)
        if name == "validate":
            command.add_argument("--price", type=seconds, metavar="P", help="price of a GPU-hour, for the run's cost")
            command.add_argument("--lengths", default="", metavar="L", help="lengths of answers, as for `simulate`")
        if name == "probe":
            command.add_argument("-m", "--prompts", type=processes, default=4, metavar="M", help="prompts (4)")
            command.add_argument(
                "-n", "--samples", type=processes, default=8, metavar="N", help="samples of each prompt (8)"
            )
            command.add_argument("--warm-start", action="store_true", help="run the supervised steps first")
            command.add_argument("--json", action="store_true", help="one JSON object")
    resume = _command(commands, "resume", "continue an interrupted or crashed run")
    resume.add_argument("run", metavar="RUN", help=_RUN_HELP)
    resume.add_argument(
        "--accept-loss", action="store_true",
        help="continue from the newest state that is in both the ledger and the checkpoints, even if files of the run "
        "are missing or older than others; later checkpoints are set aside",
    )  # fmt: skip
    resume.add_argument(
        "--past-early-stop", action="store_true", help="continue a run that early_stop ended, with early_stop disabled"
    )
    add_keep_alive(resume)
    add_init(commands, _command)
    _add_looking(commands)
    _add_steering(commands)
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
    _command(commands, "mcp", "serve these commands to a coding agent, over stdin and stdout (docs/mcp.md)")
    _command(commands, "reference", "print the reference page of all configuration keys")
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
        commands, "status", "show a run's status: health, progress, who waits for whom", _STATUS_EPILOG,
        "Show a run's status, from any terminal: health, step, time left, who waits for whom, each process, accuracy.",
    )  # fmt: skip
    status.add_argument("run", metavar="RUN", help=_RUN_HELP)
    how = status.add_mutually_exclusive_group()
    how.add_argument("-w", "--watch", action="store_true", help="keep showing it live until the run ends")
    how.add_argument(
        "--why", action="store_true", help="also diagnose its metrics and advise what to change (reads all metrics)"
    )
    status.add_argument(
        "--json", action="store_true", help="one JSON object (with --watch one per line, on each change)"
    )
    status.add_argument(
        "--interval", type=seconds, default=1.0, metavar="S", help="refresh interval of --watch, in seconds (1)"
    )
    logs = _command(
        commands, "logs", "show the logs of a run's processes, in chronological order", _LOGS_EPILOG,
        "Show the logs of a run's processes: all of them merged by time, or those named.",
    )  # fmt: skip
    logs.add_argument("run", metavar="RUN", help=_RUN_HELP)
    logs.add_argument(
        "-p", "--process", action="append", default=[], metavar="P",
        help="show only this process: controller, trainer, reward, rollout-0, ...; `rollout` means all rollout "
        "workers; may be given several times",
    )  # fmt: skip
    logs.add_argument("-f", "--follow", action="store_true", help="keep showing new lines until the run ends")
    logs.add_argument(
        "-n", "--tail", type=whole_or_all, default=100, metavar="N", help="the last N lines (100); `all` for all lines"
    )
    listing = _command(
        commands,
        "ps",
        "list the runs of this machine",
        _PS_EPILOG,
        "List the runs of this machine, in whichever folder they are stored.",
    )
    listing.add_argument("-a", "--all", action="store_true", help="also runs that have ended, crashed or run elsewhere")
    listing.add_argument(
        "--runs-dir", action="append", default=[], metavar="D", help="also search this folder of runs; repeatable"
    )
    listing.add_argument("--json", action="store_true", help="a JSON list")


def _add_steering(commands: Any) -> None:
    stop = _command(
        commands, "stop", "stop a run gracefully and wait for it to exit", _STOP_EPILOG,
        "Ask a run to end: it finishes the current step, saves, and exits with 0. Waits, and says how it ended.",
    )  # fmt: skip
    stop.add_argument("run", metavar="RUN", help=_RUN_HELP)
    stop.add_argument(
        "--now", action="store_true", help="do not finish the step; resume continues from the last checkpoint"
    )
    stop.add_argument(
        "--timeout", type=seconds, default=180.0, metavar="S", help="wait at most this many seconds (180)"
    )

    note = _command(
        commands, "note", "show or change a run's notes and tags", "",
        "Notes and tags say what a run is for. They are shown by `areal-like ps`, the report and the dashboard, and "
        "can be changed at any time. Without TEXT and --tag they are printed.",
    )  # fmt: skip
    note.add_argument("run", metavar="RUN", help=_RUN_HELP)
    note.add_argument("text", metavar="TEXT", nargs="?", help="new notes, instead of the old ones; '' removes them")
    note.add_argument(
        "--tag", dest="tags", action="append", metavar="TAG",
        help="new tags, instead of the old ones; may be given several times; '' removes them",
    )  # fmt: skip
    drain = _command(
        commands, "drain", "remove a rollout worker from a run in progress", _CREW_EPILOG,
        "A rollout worker hands its running samples to the others and exits; it is not restarted. SIGTERM to its "
        "process does the same (for example the termination notice of a spot machine).",
    )  # fmt: skip
    add = _command(
        commands, "add", "add a rollout worker to a run in progress", _CREW_EPILOG,
        "Start another rollout worker under the lowest free number: that of a drained worker, or a new one.",
    )  # fmt: skip
    for command in (drain, add):
        command.add_argument("run", metavar="RUN", help=_RUN_HELP)
        command.add_argument(
            "--timeout", type=seconds, default=60.0, metavar="S", help="wait at most this many seconds (60)"
        )
    drain.add_argument("worker", metavar="WORKER", help="rollout-0, rollout-1, ..., as shown by `areal-like status`")


def _add_samples(commands: Any) -> None:
    samples = _command(
        commands, "samples", "prompts, answers and rewards", _SAMPLES_EPILOG,
        "Print finished training samples with prompt, answer, reward and its parts, versions, staleness and worker, "
        "from the run's ledger, also while the run is in progress.",
    )  # fmt: skip
    samples.add_argument("run", metavar="RUN", help=_RUN_HELP)
    samples.add_argument("--step", type=whole, metavar="N", help="only samples that step N used")
    samples.add_argument("--group", type=whole, metavar="G", help="only samples of one prompt, by group number")
    samples.add_argument(
        "--life", type=sample_name, metavar="GROUP.SAMPLE",
        help="tell the life of one sample instead: from its draw to its step, with times",
    )  # fmt: skip
    order = samples.add_mutually_exclusive_group()
    order.add_argument("--worst", action="store_true", help="lowest reward first (samples without a score left out)")
    order.add_argument("--best", action="store_true", help="highest reward first (samples without a score left out)")
    samples.add_argument(
        "--grep", default="", metavar="TEXT", help="only samples with TEXT in the prompt or answer, ignoring case"
    )
    samples.add_argument(
        "--limit",
        type=whole_or_all,
        default=-1,
        metavar="N",
        help="at most N samples (20; for jsonl and html 200); `all` for no limit",
    )
    samples.add_argument("--format", choices=("text", "jsonl", "html"), default="text", help="output format (text)")
    samples.add_argument(
        "--out",
        default="",
        metavar="FILE",
        help="write to this file, `-` for stdout (html: RUN/samples.html; other formats: stdout)",
    )
    samples.add_argument("--full", action="store_true", help="do not shorten long texts")


def _add_reports(commands: Any) -> None:
    report = _command(
        commands, "report", "draw report.html and report.png of a run", "",
        "Draw report.html and report.png into the run's folder: diagnosis, learning curve, timeline, lengths, "
        "staleness. A run writes them itself when it ends; this command works at any time.",
    )  # fmt: skip
    report.add_argument("run", metavar="RUN", help=_RUN_HELP)
    compare = _command(
        commands, "compare", "compare runs side by side in a table and a plot", "",
        "Print a table of several runs side by side, and write a page and a plot of them.",
    )  # fmt: skip
    compare.add_argument("runs", nargs="+", metavar="RUN", help=_RUN_HELP)
    compare.add_argument(
        "--out",
        default="",
        metavar="FOLDER",
        help="folder of the page and the plot (next to the first run)",
    )
    doctor = _command(
        commands, "doctor", "check what this machine can do, what is missing and how to get it", "",
        "Check this machine: Python, torch and devices, memory, limits, optional packages, sandbox, disk; and print "
        "how to get what is missing.",
    )  # fmt: skip
    doctor.add_argument("--bench", action="store_true", help="also run short benchmarks, for some seconds")
    doctor.add_argument("--json", action="store_true", help="one JSON object")


def _add_score(commands: Any) -> None:
    score = _command(
        commands, "score", "score a file of answers, without a run", _SCORE_EPILOG,
        "Score every row of a JSONL file with a reward scorer, in separate processes: one verdict per line, in input "
        "order. If interrupted, run the same command again to continue.",
    )  # fmt: skip
    score.add_argument("--scorer", required=True, metavar="S", help="math, code, or module:function of your own")
    score.add_argument("--input", required=True, metavar="FILE", help="rows: JSON Lines, UTF-8")
    score.add_argument(
        "--output", required=True, metavar="FILE", help="verdicts: line k is the verdict on line k of the input"
    )
    score.add_argument(
        "--workers", type=processes, default=0, metavar="N", help="scoring processes (as many as there are cores)"
    )
    score.add_argument(
        "--timeout", type=seconds, metavar="S",
        help="time limit per row in seconds; a row that exceeds it is `timed_out` (10; code: 61.5, and a row may set "
        "its own)",
    )  # fmt: skip
    score.add_argument(
        "--overwrite", action="store_true", help="start from the beginning, whatever the output contains"
    )
    score.add_argument("options", nargs="*", default=[], metavar="key=value", help="options of the scorer")


_STATUS_EPILOG = """\
It works on every run: one in progress, one that is finished, stopped or failed, one whose controller was killed
(crashed), and one that was started on another machine, which cannot be judged from here.

exit status: 0 it is running, is finished or was stopped; 1 it failed or crashed; 2 there is no such run, or its folder
is damaged; 3 it belongs to another machine. Ctrl-C leaves --watch with 0.
"""
_LOGS_EPILOG = """\
examples:
  areal-like logs quickstart                    the last 100 lines of all processes
  areal-like logs quickstart -p trainer -n all  the trainer's whole log
  areal-like logs quickstart -p rollout -f      follow every rollout worker

Ctrl-C leaves --follow with exit status 0. The run is not touched.
"""
_PS_EPILOG = """\
Every run records its location in $XDG_STATE_HOME/areal_like/runs (~/.local/state/...) when it starts; runs/ in the
current folder and the processes of this machine are checked as well. Exit status 0, also when nothing runs.
"""
_STOP_EPILOG = """\
The controller, and only the process that the run's folder names, gets SIGTERM (twice with --now).

exit status: 0 it has ended as asked, or nothing was going on; 1 it still runs after --timeout (and continues to
shut down), or it ended as failed or was killed; 2 there is no such run, or it is another user's; 3 it runs on another
machine and can only be stopped there.
"""
_CREW_EPILOG = """\
The request is passed to the run's controller through the run's folder; the controller replies within a second.

exit status: 0 it is done; 1 it was refused (the only worker cannot be removed), or is not done after --timeout and
continues; 2 there is no such run, or it is not running.
"""
_SAMPLES_EPILOG = """\
examples:
  areal-like samples quickstart --worst --limit 5
  areal-like samples quickstart --step 12 --format html
  areal-like samples quickstart --format jsonl --limit all --out samples.jsonl
  areal-like samples quickstart --life 12.3

Without --out the page is stored in the run's folder: samples.html.

Tokens are kept until a checkpoint covers them and ledger.keep_mb is full; older samples show
their metadata only, with a note.
Answers of evaluations are not stored.
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

With scorer code a row contains code: its program, and its tests and prompt where they are Python. Both run in sandboxes
of their own (no network, no environment, none of your files), so a file from elsewhere can be scored. Scorer math
executes nothing of a row; a function of your own does what you wrote, with your rights.

Rows may have an `id` (else it is the line's number) and other fields. code takes data sets' own columns of tests as
well, and with `response` instead of `program` the last block of Python in it.

verdicts:
  {"id": 1, "verdict": "scored", "value": 1.0, "reason": "", "wall_s": 0.003, ...}

`verdict` is scored, timed_out, crashed or invalid; `value` is null unless it is scored. A line that is not JSON, has no
text to score or is too long is `invalid`, and says why. A bad row does not stop the command.

exit status: 0 every row has its verdict; 2 a user error, or an output that belongs to another input or
scorer; 130 interrupted (143 by SIGTERM): the same command continues.
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
