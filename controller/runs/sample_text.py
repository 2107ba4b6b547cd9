"""Prints samples on a terminal of any width: a line of numbers for each, then prompt and answer.

Samples are selected in sample_rows.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from controller.run_folder.formatting import number, printable
from controller.run_folder.run_folder import RunFolder
from controller.runs.sample_rows import Choice, Found, Sample
from controller.runs.tokens import TrajectoryText

PROMPT_LINES, ANSWER_LINES = 8, 12
"""The middle of longer texts is left out."""
TURN_LINES, MAX_SPANS = 4, 8
"""For an episode: maximum lines of each span, and maximum spans of each trajectory."""
_LABEL_WIDTH = 10
_TITLES = ("sample", "step", "reward", "stale", "versions", "tokens", "end", "worker")
_LEFT = frozenset({"sample", "end", "worker"})


def print_samples(folder: RunFolder, choice: Choice, found: Found, console: Console, *, is_full: bool) -> None:
    """Print all samples."""
    console.print(Text(headline(folder, choice, found), style="bold"))
    if not found.samples:
        return
    cells = [_cells(sample) for sample in found.samples]
    widths = [max(len(title), *(len(row[i]) for row in cells)) for i, title in enumerate(_TITLES)]
    console.print(Text(_line(_TITLES, widths), style="dim"), soft_wrap=True)
    prompt = ""
    for sample, row in zip(found.samples, cells, strict=True):
        console.print(Text(_line(row, widths), style="bold"), soft_wrap=True)
        for label, text, style in _below(sample, prompt, console, is_full):
            console.print(Text.assemble((f"  {label:<{_LABEL_WIDTH - 2}}", "dim"), (text, style)), soft_wrap=True)
        prompt = sample.prompt


def headline(folder: RunFolder, choice: Choice, found: Found) -> str:
    """`quickstart: 20 of 42,240 finished samples, worst first`."""
    shown, all_of_them = len(found.samples), found.num_matching
    count = f"{shown:,} of {all_of_them:,}" if shown != all_of_them else f"{shown:,}"
    return f"{folder.name}: {count} finished {'sample' if count == '1' else 'samples'}, {choice.words()}"


def _cells(sample: Sample) -> tuple[str, ...]:
    return (
        sample.name,
        "-" if sample.step is None else str(sample.step),
        number(sample.reward),
        "-" if sample.staleness is None else str(sample.staleness),
        sample.versions,
        str(sample.num_tokens),
        sample.finish_reason or "-",
        sample.worker,
    )


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    parts = [
        f"{cell:<{width}}" if title in _LEFT else f"{cell:>{width}}"
        for title, cell, width in zip(_TITLES, cells, widths, strict=True)
    ]
    return "  ".join(parts).rstrip()


def _below(sample: Sample, prompt_above: str, console: Console, is_full: bool) -> Iterator[tuple[str, str, str]]:
    """Label, line and style of all text below the numbers."""
    if len(sample.components) > 1 or (sample.components and [sample.reward] != list(sample.components.values())):
        parts = "  ".join(f"{printable(key)} {value:g}" for key, value in sample.components.items())
        yield from _labelled("parts", parts, "", console, 4)
    for remark in sample.remarks():
        yield from _labelled("note", remark, "yellow", console, 4)
    if sample.payload == "stored":
        is_reported = sample.prompt == prompt_above and len(sample.prompt) > console.width
        prompt = "(as above)" if is_reported else sample.prompt.rstrip("\n")
        yield from _labelled("prompt", prompt, "", console, 0 if is_full else PROMPT_LINES)
        if sample.trajectories:
            yield from _episode(sample.trajectories, console, is_full)
        else:
            yield from _labelled("answer", sample.answer, "cyan", console, 0 if is_full else ANSWER_LINES)


def _episode(trajectories: Sequence[TrajectoryText], console: Console, is_full: bool) -> Iterator[tuple[str, str, str]]:
    """Sampled and given spans in order, one trajectory after the other."""
    for place, one in enumerate(trajectories, 1):
        if len(trajectories) > 1:
            yield from _labelled("", trajectory_title(place, len(trajectories), one), "dim", console, 0)
        spans = one.spans if is_full else one.spans[:MAX_SPANS]
        for span in spans:
            label, style = ("sampled", "cyan") if span.is_sampled else ("given", "")
            yield from _labelled(label, span.shown.rstrip("\n"), style, console, 0 if is_full else TURN_LINES)
        if left_out := len(one.spans) - len(spans):
            yield from _labelled("", f"[... {left_out} more: --full]", "", console, 0)


def trajectory_title(place: int, num: int, one: TrajectoryText) -> str:
    """`trajectory 2 of 3 (stop), after 12 tokens as in trajectory 1`."""
    shared = f", after {one.num_shared:,} tokens as in trajectory {one.shared_with}" if one.shared_with else ""
    return f"trajectory {place} of {num} ({one.finish_reason}){shared}"


def _labelled(label: str, text: str, style: str, console: Console, max_lines: int) -> Iterator[tuple[str, str, str]]:
    """Wrap the text, with the label before its first line; the middle of a long text is left out (max_lines 0: nothing
    is).
    """
    width = max(20, console.width - _LABEL_WIDTH)
    wrapped = Text(printable(text).expandtabs(4)).wrap(console, width, overflow="fold")
    lines = [line.plain.rstrip() for line in wrapped] or [""]
    if max_lines and len(lines) > max_lines:
        head = max_lines * 2 // 3
        left_out = sum(map(len, lines[head : head - max_lines + 1]))
        lines = [*lines[:head], f"[... {left_out:,} more characters; use --full]", *lines[head - max_lines + 1 :]]
    for number_, line in enumerate(lines):
        yield ("" if number_ else label), line, style
