"""Charts of one run, section by section: learning, answers, optimisation, and the order of all sections.

Charts of staleness, throughput and processes are in flow_charts.py, activity strips in timeline.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from areal_like.verdict import COUNTED, FAILED_CALLS
from controller.config.eval_metrics import RED_TEAM_METRICS
from controller.report import flow_charts as flow
from controller.report.charts import (
    NO_STEPS,
    STEP,
    Axis,
    Chart,
    Number,
    Rows,
    Section,
    Series,
    column,
    curve,
    histogram,
    level,
    number,
    of_steps,
    running_mean,
    shortened,
    thinning_words,
)
from controller.report.colours import DASHES, NUM_CATEGORIES
from controller.report.data import RunData

KINDS = ("scored", "timed_out", "crashed", "invalid", "refused")
MEAN_WINDOW = 10
MIN_STEPS_FOR_MEAN = 20
MAX_EVAL_SERIES = 16
MAX_NAME_CHARS = 40
TOOL_TIME = "tool_s"
"""Component with the seconds that the tools of a sample took."""
NO_REWARDS = frozenset({*COUNTED, TOOL_TIME, "turns", "agent_rendered_again", "agent_without_reasoning"})
"""Components of verdicts that are no parts of a reward; other charts show the most important of them."""
CALLS = ("tool_calls", "agent_tool_calls", "agent_malformed_calls")
"""Components that add up to the number of calls: the environment of tools counts failed calls among `tool_calls`, and
the workflow `agent` counts them separately."""
NO_SAMPLES = "the ledger contains no readable consumed samples"


def sections(data: RunData) -> list[Section]:
    """All charts of a run; charts without numbers say why."""
    steps = data.steps
    return [
        Section("learning", "Learning", (learning(data), *evaluations(data), *red_team(data), components(data),
                                         verdicts(data),
                                          failures(data))),
        Section("staleness", "Staleness", (flow.staleness_over_time(steps), flow.staleness_histogram(data))),
        Section("speed", "Throughput", (flow.throughput(steps), flow.samples_rate(steps), flow.waiting(steps),
                                        flow.step_time(steps), flow.swaps(data), flow.in_flight(data))),
        Section("answers", "Answers", (lengths(data), length_histogram(data), cut_share(steps),
                                        *turns(steps), *tools(data))),
        Section("optimisation", "Optimisation", (clip_fraction(steps), entropy(steps), kl(steps),
                                                 effective_samples(steps), weights(steps),
                                                 gradient(data), loss(steps), *critic(steps))),
        Section("machine", "Processes", (flow.memory(data), flow.processor_time(data), flow.reward_queue(data))),
    ]  # fmt: skip


# ------------------------------------------------------------ learning


def learning(data: RunData) -> Chart:
    """Mean reward per step and evaluations."""
    xs, ys = column(data.steps, "step"), column(data.steps, "reward_mean")
    has_mean = len(xs) >= MIN_STEPS_FOR_MEAN
    series = [curve("reward of the batch", xs, ys, colour="c0", emphasis="faint" if has_mean else "plain")]
    if has_mean:
        means = running_mean(ys, MEAN_WINDOW)
        series.append(curve(f"its mean over {MEAN_WINDOW} steps", xs, means, colour="c0", emphasis="bold"))
    points = eval_points(data)
    series.append(
        Series("accuracy on held-out prompts", [v for v, _ in points], [a for _, a in points], "dots", "c1", "dash")
    )
    caption = (
        "Reward of the consumed samples (sampled with the training temperature) against the step that used them; "
        "evaluations are shown at the version that they evaluated." + thinning_words(len(xs))
    )
    y = Axis("reward, accuracy")
    return Chart("chart-learning", "Learning curve", STEP, y, series, caption, NO_STEPS)


def eval_points(data: RunData) -> list[tuple[float, float]]:
    """(version, accuracy) of the evaluations with a result, in order of versions."""
    known = [(float(row["version"]), number(row.get("accuracy"))) for row in data.evals]
    return [(version, accuracy) for version, accuracy in known if accuracy is not None]


def evaluations(data: RunData) -> list[Chart]:
    """Accuracy by set and pass@k by version; nothing for one set with one answer per row."""
    names = [name for row in data.evals for name in row if name.startswith(("accuracy/", "pass_at_"))]
    xs, series = column(data.evals, "version"), []
    for place, name in enumerate(list(dict.fromkeys(names))[:MAX_EVAL_SERIES]):
        colour, dash = f"c{place % NUM_CATEGORIES}", DASHES[place // NUM_CATEGORIES % len(DASHES)]
        series.append(curve(name, xs, column(data.evals, name), colour=colour, dash=dash))
    if not series:
        return []
    caption = "Results of the evaluations by set (the name after the slash), or the mean of all sets (no slash)."
    y = Axis("share", bottom=0.0)
    return [Chart("chart-evaluations", "Evaluations", Axis("version"), y, series, caption, "no evaluation")]


def red_team(data: RunData) -> list[Chart]:
    """Shares of refused and of unsafe answers to data.red_team by version; nothing without such a set."""
    if not any(name in row for row in data.evals for name in RED_TEAM_METRICS):
        return []
    xs = column(data.evals, "version")
    series = [
        curve(name, xs, column(data.evals, name), colour=f"c{place}") for place, name in enumerate(RED_TEAM_METRICS)
    ]
    caption = "Shares of the answers to the prompts of data.red_team, which do not count for the accuracy."
    y = Axis("share", bottom=0.0)
    return [Chart("chart-red-team", "Red team", Axis("version"), y, series, caption, "no evaluation")]


def components(data: RunData) -> Chart:
    """Mean of each reward component by step."""
    by_step = data.samples.components_by_step if data.samples else {}
    rewards = [name for name in by_step if name not in NO_REWARDS]
    series = []
    for place, name in enumerate(rewards[:NUM_CATEGORIES]):
        xs, ys = _means_of(data, (name,))
        series.append(curve(name, xs, ys, colour=f"c{place}", dash=DASHES[place]))
    caption = "Mean of each component over the consumed samples of a step, before weights and shaping."
    if left_out := rewards[NUM_CATEGORIES:]:
        named = ", ".join(shortened(name, MAX_NAME_CHARS) for name in left_out[:NUM_CATEGORIES])
        more = " and others" if len(left_out) > NUM_CATEGORIES else ""
        caption += f" {len(left_out)} more components are not shown: {named}{more}."
    missing = "the scorers returned no components" if data.samples else NO_SAMPLES
    return Chart("chart-components", "Reward components", STEP, Axis("mean"), series, caption, missing)


def _means_of(data: RunData, names: Sequence[str]) -> tuple[list[Number], list[Number]]:
    """Steps, and the sum of the means of components in each of them."""
    sums: dict[float, float] = {}
    for name in names:
        for step, mean in data.samples.components_by_step.get(name, ()) if data.samples else ():
            x, y = number(step), number(mean)
            if x is not None and y is not None:
                sums[x] = sums.get(x, 0.0) + y
    steps = sorted(sums)
    return [*steps], [sums[step] for step in steps]


def verdicts(data: RunData) -> Chart:
    """Number of answers by verdict."""
    found = verdict_counts(data)
    names: list[str] = [kind for kind in KINDS if kind in found]
    names += [kind for kind in found if kind not in names]
    bars = [Series("answers", [name.replace("_", " ") for name in names], [found[name] for name in names], "bars",
                   "c0")] if names else []  # fmt: skip
    total, scored = sum(found.values()), found.get("scored", 0)
    caption = "Every answer gets one verdict. A failure is never counted as a reward of zero."
    if total:
        caption += f" {scored:,.0f} of {total:,.0f} were scored ({scored / total:.1%})."
    y = Axis("answers", scale="log" if total and scored < total else "linear", bottom=None)
    return Chart("chart-verdicts", "Verdicts", Axis("verdict"), y, bars, caption, NO_SAMPLES)


def failures(data: RunData) -> Chart:
    """Answers without a score: scorer, kind of failure, and handling."""
    found = data.samples.failures if data.samples else {}
    names = [failure_words(*key) for key in found]
    bars = [Series("answers", names, [float(count) for count in found.values()], "bars", "c1")] if names else []
    default = data.setting("reward.on_failure", "drop_sample")
    caption = f"By scorer, verdict and resulting action (reward.on_failure: {default}; a scorer may set its own)."
    missing = "every answer got a score" if data.samples else NO_SAMPLES
    return Chart("chart-failures", "Answers without a score", Axis("failure"), Axis("answers"), bars, caption, missing)


def failure_words(scorer: str, kind: str, policy: str) -> str:
    """Text of one row of `SampleStats.failures`."""
    done = {"drop_sample": "sample dropped", "drop_group": "group dropped", "value": "a configured value"}.get(
        policy, ""
    )
    return ": ".join(part for part in (scorer, kind.replace("_", " ")) if part) + (f" → {done}" if done else "")


def verdict_counts(data: RunData) -> dict[str, float]:
    """Verdicts by kind: from the ledger, else from the last pulse."""
    if data.samples and data.samples.verdicts:
        return {str(kind): float(count) for kind, count in data.samples.verdicts.items()}
    if not data.pulses:
        return {}
    found: Counter[str] = Counter()
    for process in data.pulses[-1]["processes"].values():
        if process.get("role") == "reward":
            for kind in KINDS:
                found[kind] += number(process["counters"].get(kind)) or 0  # type: ignore[assignment]
    return {kind: float(count) for kind, count in found.items() if count}


# ------------------------------------------------------------ answers


def lengths(data: RunData) -> Chart:
    """Length of the answers by step: mean and percentiles."""
    lines = [("response_len_p50", "median", "c0"), ("response_len_mean", "mean", "c2"),
             ("response_len_p99", "99th percentile", "c4"), ("response_len_max", "longest", "c1")]  # fmt: skip
    limit = number(data.setting("sampling.max_new_tokens"))
    more = level("limit", column(data.steps, "step"), limit)
    y = Axis("answer length", "tokens", bottom=0.0)
    caption = "Lengths of the answers that a step used."
    return of_steps(data.steps, "chart-lengths", "Answer length", y, lines, caption, more=more)


def length_histogram(data: RunData) -> Chart:
    """Lengths at the beginning and at the end of the run."""
    samples = data.samples
    series: list[Series] = []
    if samples is not None and len(samples.length):
        steps, length = np.asarray(samples.step, dtype=float), np.asarray(samples.length, dtype=float)
        edges = np.linspace(0, max(float(length.max()) + 1, 2), 41)
        fifth = (steps.max() - steps.min() + 1) / 5
        first, last = length[steps < steps.min() + fifth], length[steps > steps.max() - fifth]
        if steps.max() - steps.min() >= 4:
            series = [histogram("first fifth of the steps", first, edges, colour="c0"),
                      histogram("last fifth", last, edges, colour="c1", dash="dash")]  # fmt: skip
        else:
            series = [histogram("all steps", length, edges, colour="c0")]
    caption = "Lengths of the answers that the trainer used."
    x, y = Axis("answer length", "tokens", bottom=0.0), Axis("share of answers", is_share=True, bottom=0.0)
    return Chart("chart-length-histogram", "Distribution of lengths", x, y, series, caption, NO_SAMPLES)


def cut_share(steps: Rows) -> Chart:
    """Share of answers that ended at the length limit."""
    caption = "Fraction of answers that were truncated at the length limit."
    y = Axis("share of answers", is_share=True, bottom=0.0)
    return of_steps(steps, "chart-cut", "Truncated answers", y, [("cut_share", "cut answers", "c1")], caption)


def turns(steps: Rows) -> list[Chart]:
    """Turns and trajectories of a sample; None for a run of single answers."""
    if not any((number(row.get("turns_max")) or 0) > 1 for row in steps):
        return []
    lines = [("turns_mean", "turns, mean", "c0"), ("turns_max", "turns, most", "c1"),
             ("trajectories_per_sample", "trajectories, mean", "c2")]  # fmt: skip
    caption = "Number of answers of the policy in a sample, and number of sequences on which it is trained."
    return [of_steps(steps, "chart-turns", "Turns of a sample", Axis("per sample", bottom=0.0), lines, caption)]


def tools(data: RunData) -> list[Chart]:
    """Calls of tools of a sample, and their time; empty for a run without calls."""
    lines = (
        ("calls", CALLS, "c0"),
        ("failed calls", FAILED_CALLS, "c1"),
        ("truncated results", ("tool_truncated",), "c2"),
    )
    series = [
        curve(name, *_means_of(data, names), colour=colour, dash=DASHES[place])
        for place, (name, names, colour) in enumerate(lines)
    ]
    if not any(series[0].ys):
        return []
    caption = (
        "Calls of tools, mean over the consumed samples of a step. Failed: the policy wrote a call that cannot be read "
        "or does not fit a tool, or the tool raised an error or exceeded its time limit."
    )
    y = Axis("per sample", bottom=0.0)
    found = [Chart("chart-tools", "Tool calls of a sample", STEP, y, series, caption)]
    time = curve("time of tools", *_means_of(data, (TOOL_TIME,)), colour="c0")
    if time.has_numbers:
        caption = "Time in which the tools of a sample ran, mean over the consumed samples of a step."
        y = Axis("time of tools", "s", bottom=0.0)
        found.append(Chart("chart-tool-time", "Tool time of a sample", STEP, y, [time], caption))
    return found


# ------------------------------------------------------------ optimisation


def clip_fraction(steps: Rows) -> Chart:
    """Share of tokens whose ratio left the trust region."""
    caption = (
        "Fraction of tokens whose gradient was removed by the trust region. With one update per step, it is zero by "
        "definition."
    )
    y = Axis("share of tokens", is_share=True, bottom=0.0)
    return of_steps(steps, "chart-clip", "Clip fraction", y, [("clip_fraction", "clipped", "c0")], caption)


def entropy(steps: Rows) -> Chart:
    """Entropy of the policy over the sampled tokens."""
    caption = "Mean entropy of the policy's next-token distribution. A fall towards zero early in a run is a collapse."
    y = Axis("entropy", "nats per token", bottom=0.0)
    return of_steps(steps, "chart-entropy", "Entropy", y, [("entropy", "entropy", "c0")], caption)


def kl(steps: Rows) -> Chart:
    """The two divergences of the decoupled objective."""
    lines = [("kl_behaviour_proximal", "behaviour to proximal (off-policy)", "c1"),
             ("kl_proximal_current", "proximal to current (this step's updates)", "c0")]  # fmt: skip
    caption = (
        "Distance of the sampling policy from the policy at the start of the step, and the change within the step."
    )
    if any("kl_mismatch" in row for row in steps):
        lines += [("kl_mismatch", "engine to trainer, same version", "c2"),
                  ("kl_staleness", "that version to the start of the step", "c3")]  # fmt: skip
        caption += " The first in two parts: the difference between engine and trainer, and staleness."
    return of_steps(steps, "chart-kl", "KL divergence", Axis("KL", "nats per token"), lines, caption)


def effective_samples(steps: Rows) -> Chart:
    """Effective sample size of the importance weights."""
    caption = (
        "At 1, every token has the same weight. Small values mean that a few tokens with large weights dominate the "
        "step."
    )
    y = Axis("effective share of tokens", is_share=True, top=1.0)
    lines = [("ess", "effective share", "c2")]
    if any("ess_sequences" in row for row in steps):
        y = Axis("effective share", is_share=True, top=1.0)
        lines = [("ess", "tokens", "c2"), ("ess_sequences", "answers", "c1"), ("lr_factor", "learning rate", "c0")]
        caption += (
            " The curve for answers uses the weights of complete answers, without truncation; the learning rate "
            "depends on it"
            " (trainer.lr_by_ess)."
        )
    return of_steps(steps, "chart-ess", "Effective sample size of the weights", y, lines, caption, np.min)


def weights(steps: Rows) -> Chart:
    """The largest importance weight, and its mean."""
    lines = [("weight_max", "largest", "c1"), ("weight_mean", "mean", "c0")]
    caption = "Off-policy correction weights after truncation or masking; their mean should stay near 1."
    y = Axis("importance weight")
    return of_steps(steps, "chart-weights", "Importance weights", y, lines, caption, np.max)


def gradient(data: RunData) -> Chart:
    """Norm of the gradient before it is clipped."""
    steps = data.steps
    limit = number(data.setting("trainer.optimizer.max_grad_norm"))
    norms = [value for value in column(steps, "grad_norm_max") if value is not None]
    is_near = limit is not None and bool(norms) and max(norms) > limit / 3
    more = level("clipped above", column(steps, "step"), limit if is_near else None)
    caption = "Norm of the gradient before clipping: the largest and the mean over the updates of a step."
    if limit is not None and not is_near:
        caption += f" It is clipped above {limit:g}."
    y = Axis("gradient norm", bottom=0.0)
    lines = [("grad_norm_max", "largest", "c1"), ("grad_norm", "mean of the step", "c0")]
    if all(row.get("grad_norm") == row.get("grad_norm_max") for row in steps):
        lines = [("grad_norm", "gradient norm", "c0")]
    return of_steps(steps, "chart-gradient", "Gradient norm", y, lines, caption, np.max, more)


def loss(steps: Rows) -> Chart:
    """The surrogate loss."""
    caption = (
        "The surrogate objective. Its absolute value has little meaning, because it is near zero by construction, even "
        "while the policy learns."
    )
    return of_steps(steps, "chart-loss", "Loss", Axis("loss"), [("loss", "loss", "c6")], caption)


def critic(steps: Rows) -> tuple[Chart, ...]:
    """The critic's loss and explained variance; None for a run without a critic."""
    if not any("value_loss" in row for row in steps):
        return ()
    caption = (
        "Half the squared error of the values, clipped as trainer.critic.value_clip says, over the step's updates."
    )
    y, lines = Axis("value loss", bottom=0.0), [("value_loss", "value loss", "c6")]
    value_loss = of_steps(steps, "chart-value-loss", "Value loss", y, lines, caption)
    caption = (
        "Explained variance: 1 - Var(target - value) / Var(target), of the values before the step: 1 is a perfect"
        " critic, 0 one that predicts only the mean. Clipped: tokens whose value has moved as far as is allowed in one"
        " step."
    )
    shares = [("explained_variance", "explained variance", "c2"), ("value_clip_fraction", "clipped", "c0")]
    y = Axis("share", is_share=True, top=1.0)
    return (value_loss, of_steps(steps, "chart-critic", "Critic", y, shares, caption, np.min))
