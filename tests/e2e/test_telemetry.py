"""What a real run leaves for people to look at: a timeline whose arrows are whole, pulses, status, sinks."""

from __future__ import annotations

import contextlib
import itertools
import json
import urllib.request
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from conftest import Gate

from controller.ledger.ledger import Ledger
from controller.wiring.process_specs import trace_settings

pytestmark = pytest.mark.e2e

STEPS = 4
PLAIN = [f"num_steps={STEPS}", "warm_start=null"]
TRAINER_BUSY = 'areal_like_busy_seconds_total{process="trainer",role="trainer"}'


class Timeline:
    """A trace.json, by process and lane."""

    def __init__(self, path: Path) -> None:
        self.events = json.loads(path.read_text())["traceEvents"]
        names = {
            (event["name"], event["pid"], event["tid"]): event["args"]["name"]
            for event in self.events
            if event["name"] in ("process_name", "thread_name")
        }
        self.lanes = defaultdict(list)
        for event in self.events:
            if event["ph"] == "X":
                process = names["process_name", event["pid"], 0]
                lane = names["thread_name", event["pid"], event["tid"]]
                self.lanes[process, lane].append(event)
                event["where"] = (process, lane)
        self.places = {(event["pid"], event["tid"]): event["where"] for lane in self.lanes.values() for event in lane}

    def main(self, process: str) -> Counter[str]:
        """How often each thing stands in the main lane."""
        return Counter(event["name"] for event in self.lanes[process, "main"])

    def slice_at(self, arrow: dict) -> dict:
        """The innermost slice that an arrow's end binds to: the one that is open at its moment in its lane."""
        lane = self.lanes[self.places[arrow["pid"], arrow["tid"]]]
        around = [event for event in lane if event["ts"] <= arrow["ts"] < event["ts"] + event["dur"]]
        assert around, f"{arrow} leads to no slice"
        return min(around, key=lambda event: event["dur"])


def _scrape(run) -> str:
    """What the endpoint answers now; nothing before its address was printed."""
    _, separator, rest = run.output.partition("metrics for Prometheus at ")
    if not separator or not rest.split(maxsplit=1)[1:]:
        return ""
    with urllib.request.urlopen(rest.split()[0], timeout=30.0) as answer:
        return answer.read().decode()


@pytest.fixture(scope="module")
def finished(run_class, runs_dir, tmp_path_factory, short, quickstart):
    """A run that was watched: everything on."""
    folder = tmp_path_factory.mktemp("t")
    gate = Gate(folder)
    settings = ["metrics.tensorboard=true", "metrics.prometheus.port=0", "rollout.num_workers=2", *gate.after_step(1)]
    run = run_class(["train", quickstart, *short, *PLAIN, *settings, f"runs_dir={runs_dir}"], folder, runs_dir)
    run.wait_until(lambda: TRAINER_BUSY in _scrape(run), "scrape that knows the trainer")
    run.scraped = _scrape(run)
    run.seen = json.loads((run.folder / "status.json").read_text())
    gate.open()
    assert run.wait() == 0, run.output
    return run


@pytest.fixture(scope="module")
def timeline(finished):
    return Timeline(finished.folder / "trace.json")


def test_every_consumed_sample_has_the_three_ends_of_its_arrow(finished, timeline):
    with contextlib.closing(Ledger(finished.folder, must_exist=True, keep_bytes=None)) as ledger:
        consumed = {
            f"g{group.group_id}.{index}": batch.step
            for batch in ledger.load().batches
            for group in batch.groups
            for index in group.sample_indices
        }
    assert len(consumed) == STEPS * 12 * 4
    ends = defaultdict(list)
    for event in timeline.events:
        if event["ph"] in ("s", "t", "f"):
            ends[event["name"]].append(event)
    for sample, step in consumed.items():
        assert [event["ph"] for event in sorted(ends[sample], key=lambda event: event["ts"])] == ["s", "t", "f"]
        start, through, arrival = sorted(ends[sample], key=lambda event: event["ts"])
        assert len({(event["cat"], event["name"], event["id"]) for event in ends[sample]}) == 1
        generated, scored, used = map(timeline.slice_at, (start, through, arrival))
        assert generated["name"] == "generate"
        assert f"g{generated['args']['group']}.{generated['args']['sample']}" == sample
        assert (scored["name"], scored["args"]["sample"]) == ("score", sample)
        assert (used["name"], used["args"]["step"]) == ("forward_backward", step)
        assert used["where"] == ("trainer", "main")


def test_slices_of_a_lane_nest_or_do_not_overlap(timeline):
    for where, lane in timeline.lanes.items():
        open_until = []
        for event in sorted(lane, key=lambda event: (event["ts"], -event["dur"])):
            end = event["ts"] + event["dur"]
            while open_until and open_until[-1] <= event["ts"]:
                open_until.pop()
            assert not open_until or end <= open_until[-1], (where, event)
            open_until.append(end)


def test_main_lane_of_every_process_says_what_it_does(timeline):
    assert timeline.main("trainer").keys() >= {
        "load", "wait:batch", "forward_backward", "update", "publish", "checkpoint", "export",
    }  # fmt: skip
    assert timeline.main("trainer")["forward_backward"] == STEPS
    assert timeline.main("rollout-0").keys() >= {"load", "generate", "swap", "wait:work"}
    assert timeline.main("reward").keys() <= {"score", "wait:requests"}
    assert timeline.main("controller").keys() == {"ledger"}
    for process in ("rollout-0", "reward"):
        lane = sorted(timeline.lanes[process, "main"], key=lambda event: event["ts"])
        for before, after in itertools.pairwise(lane):
            assert before["ts"] + before["dur"] == after["ts"], "no gap, no overlap"
    lanes = {lane.rstrip("0123456789") for process, lane in timeline.lanes if process == "rollout-0"}
    assert lanes >= {"main", "slot ", "sample-", "versions"}


def test_pulses_and_status_tell_the_run_while_it_lasts_and_at_its_end(finished):
    pulses = finished.metrics("pulse")
    names = {"rollout-0", "rollout-1", "trainer", "reward"}
    assert any(row["processes"].keys() == names for row in pulses)
    counters = pulses[-1]["processes"]["rollout-0"]["counters"]
    assert counters.keys() >= {"tokens", "busy_s", "idle_s", "paused_s", "wait_score_s", "wait_work_s"}
    assert pulses[-1]["processes"]["reward"]["counters"].keys() >= {"queue", "busy_workers", "scored"}
    assert finished.seen["status"] == "running"
    assert finished.seen["processes"].keys() == names
    assert finished.seen["processes"]["trainer"]["rss_mb"] > 50
    status = json.loads((finished.folder / "status.json").read_text())
    assert (status["status"], status["step"], status["version"], status["num_steps"]) == (
        "finished",
        STEPS,
        STEPS,
        STEPS,
    )
    assert status["accuracy"].keys() == {"0", str(STEPS)}
    assert status["last_step"]["step"] == STEPS
    state = json.loads((finished.folder / "state.json").read_text())
    assert state["host"]
    assert state["ended_s"] >= status["time_s"]


def test_sinks_of_a_real_run_have_every_step(finished):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(finished.folder / "tensorboard")).Reload()
    assert [event.step for event in found.Scalars("train/reward_mean")] == [1, 2, 3, 4]
    assert len(found.Scalars("eval/accuracy")) == 2
    assert TRAINER_BUSY in finished.scraped
    sinks = finished.summary["sinks"]
    assert sinks.keys() == {"tensorboard", "prometheus"}
    assert all(counts["lost"] == 0 for counts in sinks.values())
    assert [row["event"] for row in finished.metrics("sink")] == ["closed", "closed"]


def test_run_without_a_trace_writes_none_in_any_process(areal, quickstart, short):
    run = areal("train", quickstart, *short, *PLAIN, "metrics.trace=false", "num_steps=2")
    assert run.wait() == 0, run.output
    assert not list(run.folder.rglob("*trace*"))
    assert len(run.metrics("step")) == 2


def test_small_bound_holds_in_every_process_and_thins_whole_groups(areal, quickstart, short):
    run = areal("train", quickstart, *short, *PLAIN, "metrics.max_trace_events=200")
    assert run.wait() == 0, run.output
    for path in (run.folder / "logs").glob("*.trace.jsonl"):
        events = [json.loads(line) for line in path.read_text().splitlines()]
        assert sum(event["ph"] != "M" for event in events) <= 200, path.name
    timeline = Timeline(run.folder / "trace.json")
    from controller.cli.jobs import read_config
    from controller.run_folder.run_folder import RunFolder

    every = trace_settings(read_config(RunFolder(run.folder))).every_group
    groups = {event["args"]["group"] for event in timeline.events if "group" in event.get("args", {})}
    assert every > 1
    assert groups
    assert all(group % every == 0 for group in groups)
