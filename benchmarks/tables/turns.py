"""Tables of tasks with several turns: learning through three ports, and conversations over chat templates."""

from __future__ import annotations

from benchmarks.tables.form import Result, table


def tool_sum(result: Result) -> str:
    """One line for each job and seed: accuracy by step, when the target was reached, and the paired difference."""
    differences = {(one["job"], one["seed"]): f"{one['difference']:+.3f}" for one in result["paired"]}
    base, lines = result["rows"][0]["job"], []
    for row in result["rows"]:
        points = ", ".join(f"{point['step']}: {point['accuracy']:.3f}" for point in row["curve"])
        is_reached = row["reached_step"] is not None
        lines.append((
            row["job"], str(row["seed"]), points, str(row["reached_step"]) if is_reached else "not reached",
            f"{row['reached_s']:.0f}" if is_reached else "-", differences.get((row["job"], row["seed"]), "-"),
        ))  # fmt: skip
    target = result["target"]
    head = ("job", "seed", "step: accuracy", f"step of {target}", "seconds after the warm start",
            f"last accuracy, against {base}")  # fmt: skip
    prompts = result["rows"][0]["curve"][0]["prompts"]
    return f"{table(head, lines)}\n\n{prompts:.0f} held-out prompts, the same for all jobs."


def transcripts(result: Result) -> str:
    """One line for each template, and the templates that were refused."""
    used = [row for row in result["rows"] if "refused" not in row]
    head = (
        "template", "calls as", "the model ends with", "conversations", "continued answers", "calls", "false forks",
        "changed", "wrong text", "lost", *(("sampled again",) if _has_retries(result["total"]) else ()),
        "same if tokenised again",
    )  # fmt: skip
    lines = [
        (row["template"], row["format"] or "-", f"`{row['stops']}`".replace("|", "\\|"), *_counts(row)) for row in used
    ]
    lines.append(("all", "", "", *_counts(result["total"])))
    refused = [f"`{row['template']}`: {row['refused']}." for row in result["rows"] if "refused" in row]
    text = f"{table(head, lines)}\n\n{result['total']['cpu_s'] / 60:.1f} minutes of processor time."
    return "\n\n".join([text, *([f"Not used: {' '.join(refused)}"] if refused else [])])


def _has_retries(row: Result) -> bool:
    """Whether requests were sent again; results of earlier versions have none."""
    return "sampled_again" in row


def _counts(row: Result) -> tuple[str, ...]:
    counted = ["conversations", "continued", "calls", "false_forks", "changed", "wrong_text", "lost"]
    counted += ["sampled_again"] if _has_retries(row) else []
    again = f"{row['same_again'] / row['rendered']:.0%}" if row["rendered"] else "-"
    return (*(f"{row[name]:,}" for name in counted), again)
