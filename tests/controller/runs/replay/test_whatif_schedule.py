"""Claims about `areal-like whatif` on another schedule: simulated with the run's costs, next to the recorded one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from report_run import report_run

from areal_like.errors import UserError
from controller.run_folder.run_folder import RunFolder
from controller.runs.replay.whatif_schedule import simulate_changed

QUICKSTART = Path(__file__).resolve().parents[4] / "configs" / "quickstart.yaml"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    from made_run import pulse_rows
    from report_run import write_metrics

    folder = report_run(tmp_path, has_traces=False)
    folder.config.write_text(QUICKSTART.read_text())
    work = {"steps": 4.0, "tokens": 400.0, "prefill_tokens": 100.0}
    pulses = [
        {
            **pulse, "kind": "pulse",
            "processes": {
                "rollout-0": {
                    "role": "rollout", "incarnation": "0",
                    "counters": {"busy_s": 2.0 * place, **{key: value * place for key, value in work.items()}},
                }
            },
        }
        for place, pulse in enumerate(pulse_rows(12, 4.0))
    ]  # fmt: skip
    steps = [
        {
            "kind": "step", "step": step, "wall_s": 4.0 * step, "tokens": 6000.0, "num_sampled_tokens": 4000.0,
            "step_s": 0.5, "num_samples": 100,
        }
        for step in range(1, 13)
    ]  # fmt: skip
    write_metrics(folder, [*pulses, *steps])
    return folder


def test_both_schedules_and_the_measured_steps_are_printed(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate_changed(run, ["staleness.max_staleness=0", "num_steps=5"], as_json=False) == 0
    said = capsys.readouterr().out
    assert "recorded" in said
    assert "staleness.max_staleness=0" in said
    assert "simulated with the costs of the run: a step takes " in said
    assert "the steps of the run took 4 s (median); the simulation of the unchanged schedule differs by " in said


def test_another_schedule_has_another_step(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate_changed(run, ["rollout.num_workers=4", "num_steps=8"], as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["changed"]["step_s"] < 0.5 * found["recorded"]["step_s"], "generation takes longer than training"
    assert found["measured_step_s"] == 4.0
    assert found["recorded"]["token_share_dropped"] == 0.0


def test_a_run_without_measurements_is_refused(tmp_path: Path) -> None:
    folder = report_run(tmp_path, num_steps=2, has_traces=False)
    folder.config.write_text(QUICKSTART.read_text())
    with pytest.raises(UserError, match="too few measurements"):
        simulate_changed(folder, ["rollout.num_workers=2"], as_json=False)
