"""`areal-like status` and `ps`: what they say of every kind of run, and that it is true."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
import run_zoo as zoo
from rich.console import Console

from controller.run_folder import registry
from controller.run_folder.run_folder import RunFolder
from controller.runs.facts import Memory, read_facts
from controller.runs.ps import ps
from controller.runs.status import as_line, health, status


def said(folder: RunFolder, width: int = 100, **options: Any) -> tuple[int, str]:
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False, markup=False)
    return status(folder, console=console, **options), out.getvalue()


class TestPage:
    @pytest.mark.processes
    @pytest.mark.parametrize(
        ("kind", "code"),
        [("running", 0), ("finished", 0), ("stopped", 0), ("failed", 1), ("crashed", 1), ("foreign", 3)],
    )
    @pytest.mark.parametrize("width", [40, 80, 160])
    def test_every_kind_is_shown_at_every_width(self, tmp_path, kind, code, width):
        found, text = said(zoo.make_run(tmp_path, kind), width)
        assert found == code
        assert kind in text.splitlines()[0]
        assert max(map(len, text.splitlines())) <= width

    def test_running_run_tells_health_progress_waits_processes_and_accuracy(self, tmp_path):
        _, text = said(zoo.make_run(tmp_path, "running"), 120)
        for words in (
            "good", "step 3 of 6 (50 %)", "version 3", "1 min 22 s so far", "about 7 min 30 s left",
            "trainer waits for batch 4: 5 of 12 groups ready", "rollout-0", "wait:batch", "312 MB", "reward 0.410",
            "v0 0.235", "v3 0.610", "drawn 60",
        ):  # fmt: skip
            assert words in text

    def test_rates_are_of_the_last_seconds_and_of_the_same_start(self, tmp_path):
        folder = zoo.make_run(tmp_path, "running")
        rates = read_facts(folder).rates
        assert rates["rollout-0"].per_s == pytest.approx(20_000 / 9.7, rel=0.05)
        assert rates["reward"].per_s == pytest.approx(200 / 9.7, rel=0.05)
        assert rates["rollout-0"].busy == pytest.approx(8 / 9.7, abs=0.1)
        assert rates["trainer"].busy == pytest.approx(4 / 9.7, abs=0.05)
        rows = json.loads(folder.status.read_text())["processes"]
        rows["rollout-0"]["incarnation"] = "restarted"
        zoo.write_status(folder, processes=rows)
        assert "rollout-0" not in read_facts(folder).rates

    def test_two_looks_make_a_rate_without_any_pulse(self, tmp_path):
        folder, memory = zoo.make_run(tmp_path, "running"), Memory()
        folder.metrics.unlink()
        zoo.write_status(folder, age_s=5)
        assert read_facts(folder, memory).rates == {}
        rows = {"rollout-0": zoo.process_row("rollout", tokens=35_000.0, busy_s=10.0)}
        zoo.write_status(folder, processes=rows)
        assert read_facts(folder, memory).rates["rollout-0"].per_s == pytest.approx(5000 / 4.7, rel=0.05)

    def test_finished_run_tells_how_it_went(self, tmp_path):
        _, text = said(zoo.make_run(tmp_path, "finished"), 120)
        assert "accuracy 0.235 -> 0.953" in text
        assert "audit clean" in text
        assert "6 steps done" in text
        assert "waits" not in text

    @pytest.mark.processes
    @pytest.mark.parametrize("kind", ["crashed", "stopped", "failed"])
    def test_what_to_do_next_is_reported(self, tmp_path, kind):
        assert "areal-like resume" in said(zoo.make_run(tmp_path, kind))[1]

    def test_preparing_run_tells_what_it_prepares(self, tmp_path):
        folder = zoo.make_run(tmp_path, "running")
        zoo.write_status(
            folder, status="preparing", preparing="  step 50  loss 1.2", step=0, processes={}, last_step=None
        )
        assert "step 50 loss 1.2" in said(folder)[1]

    def test_foreign_text_cannot_play_with_the_terminal(self, tmp_path):
        folder = zoo.make_run(tmp_path, "running")
        zoo.write_status(folder, waits=["a\x1b[2Jb"])
        assert "\x1b[2J" not in said(folder)[1]


class TestHealth:
    def judged(self, folder: RunFolder) -> tuple[str, str]:
        found = health(read_facts(folder))
        return found.verdict, found.words

    def test_silent_controller_is_bad(self, tmp_path):
        folder = zoo.make_run(tmp_path, "running")
        zoo.write_status(folder, age_s=40)
        verdict, words = self.judged(folder)
        assert verdict == "bad"
        assert "no message from the controller for 40 s" in words

    def test_suspended_controller_is_reported_with_the_remedy(self, tmp_path):
        facts = read_facts(zoo.make_run(tmp_path, "running"))
        facts.controller["is_suspended"] = True
        assert "kill -CONT" in health(facts).words

    @pytest.mark.parametrize(
        "facts",
        [
            {"processes": {"rollout-1": zoo.process_row("rollout", "restarting (1 of 3)")}},
            {"waits": ["rollout-1 is lost; its restart is awaited"]},
            {"waits": ["rollout-1 is quarantined, it could not load version 3: checksum"]},
        ],
    )
    def test_run_with_a_process_in_trouble_is_not_called_good(self, tmp_path, facts):
        folder = zoo.make_run(tmp_path, "running")
        zoo.write_status(folder, **facts)
        verdict, words = self.judged(folder)
        assert verdict == "warning"
        assert "rollout-1" in words

    def test_overdue_step_is_reported_with_the_usual_time(self, tmp_path):
        folder = zoo.make_run(tmp_path, "running")
        zoo.write_status(folder, last_step={"step": 3, "time_s": time.time() - 300})
        verdict, words = self.judged(folder)
        assert verdict == "warning"
        assert "no step has finished for 5 min; a step usually takes 4 s" in words

    def test_step_that_waits_for_clients_is_not_overdue(self, tmp_path):
        folder = zoo.make_run(tmp_path, "running")
        wait = "rollout-0 waits for clients at http://127.0.0.1:8001"
        zoo.write_status(folder, last_step={"step": 3, "time_s": time.time() - 300}, waits=["trainer waits", wait])
        assert self.judged(folder) == ("ok", wait)

    def test_last_evaluation_is_no_overdue_step(self, tmp_path):
        folder = zoo.make_run(tmp_path, "running")
        zoo.write_status(folder, step=6, last_step={"step": 6, "time_s": time.time() - 300})
        assert self.judged(folder)[0] == "ok"


class TestDamage:
    @pytest.mark.parametrize("name", ["status.json", "summary.json"])
    @pytest.mark.parametrize("text", ["", "{", "[]", "3", "\x00\xff"])
    def test_damaged_file_costs_a_note_and_nothing_else(self, tmp_path, name, text):
        folder = zoo.make_run(tmp_path, "finished")
        (folder.root / name).write_text(text)
        code, page = said(folder)
        assert code == 0
        assert f"note: {name}" in page

    def test_newer_status_is_left_out_with_a_note(self, tmp_path):
        folder = zoo.make_run(tmp_path, "running")
        zoo.write_status(folder, format=2)
        assert "newer version" in said(folder)[1]

    @pytest.mark.parametrize(
        "key", ["waits", "counts", "processes", "last_step", "accuracy", "step", "eta_s", "elapsed_s"]
    )
    @pytest.mark.parametrize("value", [3, "x", [1], {"a": []}, None, True])
    def test_nonsense_inside_never_ends_in_a_traceback(self, tmp_path, key, value):
        folder = zoo.make_run(tmp_path, "running")
        zoo.write_status(folder, **{key: value})
        assert said(folder)[0] == 0
        assert said(folder, as_json=True)[0] == 0

    @pytest.mark.processes
    def test_run_without_any_file_but_its_state_is_shown(self, tmp_path):
        folder = zoo.make_run(tmp_path, "crashed")
        for path in (folder.status, folder.metrics):
            path.unlink()
        assert said(folder)[0] == 1


class TestJson:
    def test_is_one_object_with_everything(self, tmp_path):
        code, text = said(zoo.make_run(tmp_path, "running"), as_json=True)
        found = json.loads(text)
        assert (code, found["kind"], found["step"], found["num_steps"]) == (0, "running", 3, 6)
        assert found["status"]["waits"]
        assert found["rates"]["trainer"]["busy"] > 0

    def test_has_no_number_that_json_lacks(self, tmp_path):
        folder = zoo.make_run(tmp_path, "running")
        zoo.write_status(folder, last_step={"step": 3, "loss": float("nan"), "parts": [float("inf")]})
        text = as_line(read_facts(folder))
        assert "NaN" not in text
        assert "Infinity" not in text


class TestWhy:
    @pytest.mark.processes
    def test_findings_follow_the_status_and_stand_in_json(self, tmp_path):
        folder = zoo.make_run(tmp_path, "crashed")
        text = said(folder, why=True)[1]
        assert text.lstrip().startswith("bad: The run crashed"), "the cause comes before all else"
        assert "-> " in text
        assert json.loads(said(folder, as_json=True, why=True)[1])["findings"][0]["severity"] == "bad"
        assert "findings" not in json.loads(said(folder, as_json=True)[1])


class TestWatch:
    def end_after(self, folder: RunFolder, looks: int) -> Any:
        """A sleep that ends the run at its n-th call."""
        calls = []

        def sleep(_: float) -> None:
            calls.append(1)
            zoo.write_status(folder, step=3 + len(calls))
            if len(calls) == looks:
                folder.write_state("failed", reason="enough")

        return sleep

    def test_ends_with_the_run_and_its_exit_status(self, tmp_path):
        folder = zoo.make_run(tmp_path, "running")
        code, text = said(folder, watch=True, sleep=self.end_after(folder, 2))
        assert code == 1
        assert [line.split("  ")[2] for line in text.splitlines()] == ["step 3/6", "step 4/6", "step 5/6"]
        assert "enough" in text.splitlines()[-1]

    def test_on_a_terminal_the_last_picture_stays(self, tmp_path):
        folder = zoo.make_run(tmp_path, "running")
        out = io.StringIO()
        console = Console(file=out, width=100, force_terminal=True, highlight=False)
        assert status(folder, watch=True, console=console, sleep=self.end_after(folder, 2)) == 1
        assert "enough" in out.getvalue()

    def test_json_is_one_object_a_line(self, tmp_path):
        folder = zoo.make_run(tmp_path, "running")
        _, text = said(folder, watch=True, as_json=True, sleep=self.end_after(folder, 3))
        assert [json.loads(line)["kind"] for line in text.splitlines()] == ["running"] * 3 + ["failed"]

    def test_leaving_with_ctrl_c_is_no_failure(self, tmp_path):
        def sleep(_: float) -> None:
            raise KeyboardInterrupt

        assert said(zoo.make_run(tmp_path, "running"), watch=True, sleep=sleep)[0] == 0

    def test_run_that_is_over_is_not_watched(self, tmp_path):
        assert said(zoo.make_run(tmp_path, "finished"), watch=True)[0] == 0


class TestPs:
    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        monkeypatch.setattr(registry, "seen_in_processes", list)
        monkeypatch.chdir(tmp_path)

    def said(self, width: int = 120, **options: Any) -> str:
        out = io.StringIO()
        assert ps(console=Console(file=out, width=width, highlight=False, markup=False), **options) == 0
        return out.getvalue()

    def test_nothing_is_a_sentence(self):
        assert self.said() == "no runs are active on this machine\n"
        assert self.said(show_all=True) == "no runs are known on this machine\n"
        assert json.loads(self.said(as_json=True)) == []

    @pytest.mark.processes
    def test_what_runs_is_shown_and_the_rest_counted(self, tmp_path):
        for kind in zoo.KINDS:
            registry.enlist(zoo.make_run(tmp_path / f"of-{kind}", kind))
        text = self.said()
        assert "running" in text
        assert "finished" not in text.splitlines()[2]
        assert "not shown: 1 foreign, 1 crashed, 1 failed, 1 stopped, 1 finished" in text

    @pytest.mark.processes
    @pytest.mark.parametrize("width", [60, 80, 160])
    def test_all_shows_every_kind_at_every_width(self, tmp_path, width):
        for kind in zoo.KINDS:
            zoo.make_run(tmp_path / "runs", kind)
        text = self.said(width, show_all=True)
        assert max(map(len, text.splitlines())) <= width
        for kind in zoo.KINDS:
            assert kind in text

    def test_folder_of_runs_can_be_named(self, tmp_path):
        zoo.make_run(tmp_path / "else", "running", "hidden")
        assert "hidden" not in self.said()
        assert "hidden" in self.said(runs_dirs=["else"])

    def test_run_known_twice_is_listed_once(self, tmp_path):
        registry.enlist(zoo.make_run(tmp_path / "runs", "running", "once"))
        assert len(json.loads(self.said(as_json=True, runs_dirs=["runs"]))) == 1

    def test_damaged_run_is_a_row_and_no_error(self, tmp_path):
        zoo.make_run(tmp_path / "runs", "running", "whole")
        zoo.make_run(tmp_path / "runs", "finished", "broken").state.write_text("{")
        zoo.make_run(tmp_path / "runs", "finished", "newer", format=99)
        text = self.said(160, show_all=True)
        assert "damaged" in text
        assert "newer version" in text
        assert json.loads(self.said(as_json=True))[0]["run"] == "whole"

    def test_json_has_what_a_script_needs(self, tmp_path):
        zoo.make_run(tmp_path / "runs", "running", "job")
        (row,) = json.loads(self.said(as_json=True))
        assert (row["run"], row["kind"], row["step"], row["num_steps"]) == ("job", "running", 3, 6)
        assert row["memory_mb"] > 900
        assert row["pid"]
