"""The main job as a newcomer starts it: it learns, it says what it did, and its ledger keeps the invariants.

On short sums and with two updates a step, so that an eighth of its tokens will do; as it ships it is measured by
benchmarks/quickstart.py.
"""

from __future__ import annotations

import itertools
import json

import pytest
import yaml

from controller.launch.forked import SHARED
from controller.run_folder.run_folder import RunFolder
from controller.runs.verify.verify import verify

pytestmark = pytest.mark.e2e

SUMMARY_KEYS = {
    "accuracy_before", "accuracy_after", "wall_s", "steps", "samples_per_s", "tokens_per_s", "trainer_wait_share",
    "rollout_idle_share", "staleness_mean", "staleness_max", "samples_consumed", "samples_filtered", "samples_dropped",
}  # fmt: skip


SHOWN = ["data.eval.limit=400", "metrics.report=true"]


@pytest.fixture(scope="module")
def finished(request, runs_dir, quickstart, learning, tmp_path_factory):
    """One run, shared by the tests of this module."""
    from_module = request.getfixturevalue("run_class")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(SHARED, raising=False)  # all as a user has it
        run = from_module(
            ["train", quickstart, *learning, *SHOWN, f"runs_dir={runs_dir}"], tmp_path_factory.mktemp("main"), runs_dir
        )
    status = run.wait()
    assert status == 0, run.output
    return run


def test_quickstart_learns_to_add(finished):
    summary = finished.summary
    assert summary["accuracy_before"] < 0.5
    assert summary["accuracy_after"] >= 0.85, summary
    assert summary["eval_prompts"] == 400


def test_summary_is_whole_and_printed(finished):
    assert finished.summary.keys() >= SUMMARY_KEYS
    for key in SUMMARY_KEYS:
        assert finished.summary[key] is not None, key
        assert key in finished.output


def test_staleness_bound_held_and_ledger_adds_up(finished):
    summary = finished.summary
    assert summary["audit"] == "clean"
    assert 0 < summary["staleness_max"] <= 2
    assert summary["groups_drawn"] == (
        summary["groups_consumed"]
        + summary["groups_filtered"]
        + summary["groups_dropped"]
        + summary["groups_in_flight"]
    )
    config = yaml.safe_load((finished.folder / "config.yaml").read_text())
    assert summary["samples_consumed"] == config["num_steps"] * config["groups_per_step"] * config["group_size"]


def test_everything_that_was_recorded_is_verified(finished):
    found = verify(RunFolder(finished.folder))
    assert found.findings == []
    assert found.notes == []
    assert "1 exported models" in found.counts[0]


def test_run_folder_holds_what_it_promises(finished):
    folder = finished.folder
    for name in (
        "config.yaml", "ledger.sqlite", "metrics.jsonl", "trace.json", "summary.json", "report.html", "report.png"
    ):  # fmt: skip
        assert (folder / name).is_file(), name
    logs = {path.name for path in (folder / "logs").glob("*.log")}
    assert logs >= {"reward.log", "trainer.log", "rollout-0.log"}
    assert any((folder / "checkpoints").iterdir())
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert {"controller", "trainer", "rollout-0"} <= {
        event["args"]["name"] for event in events if event["name"] == "process_name"
    }


def test_final_policy_is_a_hugging_face_model(finished):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(finished.folder / "final")
    tokenizer = AutoTokenizer.from_pretrained(finished.folder / "final")
    right = 0
    for a, b in itertools.product(range(1, 10, 2), range(2, 10, 2)):  # one prompt alone may be of the few it gets wrong
        answer = model.generate(**tokenizer(f"{a}+{b}=", return_tensors="pt"), max_new_tokens=20, do_sample=False)
        text = tokenizer.decode(answer[0], skip_special_tokens=True).replace(" ", "")
        right += text.endswith(f";#{(a + b) % 10}")
    assert right >= 10, f"{right} of 20 sums are right"


def test_most_steps_saw_samples_of_more_than_one_version(finished):
    """Rollouts went on over weight swaps, so answers span versions: asynchrony was real."""
    stale = [row for row in finished.metrics("step") if any(value > 0 for value in row["staleness"])]
    assert len(stale) > 0.8 * finished.summary["steps"]
    assert finished.metrics("swap")


def test_evaluating_the_final_policy_by_command_gives_the_same_accuracy(finished, areal, quickstart, learning):
    run = areal("eval", quickstart, *learning, *SHOWN, f"model.path={finished.folder / 'final'}")
    assert run.wait() == 0, run.output
    assert run.summary["accuracy_before"] == pytest.approx(finished.summary["accuracy_after"], abs=0.005)
