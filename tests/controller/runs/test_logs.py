"""`areal-like logs`: in order, whole, and without waiting for anybody."""

from __future__ import annotations

import io
from typing import Any

import pytest
import run_zoo as zoo

from areal_like.errors import UserError
from controller.run_folder.run_folder import RunFolder
from controller.runs import logs as module
from controller.runs.logs import LogFile, choose, logs


def said(folder: RunFolder, **options: Any) -> list[str]:
    out = io.StringIO()
    assert logs(folder, out=out, **options) == 0
    return out.getvalue().splitlines()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class TestOrder:
    def test_processes_are_woven_by_time_and_a_traceback_stays_whole(self, tmp_path):
        lines = said(zoo.make_run(tmp_path))
        assert [line.split(" | ")[0].strip() for line in lines] == [
            "controller", "rollout-0", "trainer", "trainer", "trainer", "rollout-0", "controller", "trainer",
        ]  # fmt: skip
        assert lines[3].endswith("| Traceback (most recent call last):")

    def test_one_process_is_printed_as_it_wrote(self, tmp_path):
        folder = zoo.make_run(tmp_path)
        assert said(folder, processes=["trainer"]) == (folder.logs / "trainer.log").read_text().splitlines()

    def test_whole_and_tail_agree(self, tmp_path):
        folder = zoo.make_run(tmp_path)
        everything = said(folder, tail=None)
        for number in (0, 1, 3, 100):
            assert said(folder, tail=number) == (everything[-number:] if number else [])

    def test_clock_that_goes_back_does_not_turn_a_file_round(self, tmp_path):
        folder = zoo.make_run(tmp_path)
        text = "2026-11-21 12:00:00,000 later\n2026-11-21 11:00:00,000 earlier\n"
        (folder.logs / "trainer.log").write_text(text)
        own = [line for line in said(folder) if line.startswith("trainer")]
        assert [line[-5:] for line in own] == ["later", "rlier"]


class TestTail:
    @pytest.mark.parametrize("count", [1, 7, 5000])
    def test_last_lines_of_a_long_file_are_found_from_its_end(self, tmp_path, monkeypatch, count):
        monkeypatch.setattr(module, "BLOCK_BYTES", 100)
        path = tmp_path / "x.log"
        lines = [f"line {number} " + "y" * (number % 50) for number in range(2000)]
        path.write_text("\n".join(lines) + "\n")
        assert [line for _, line in LogFile("x", path).tail(count)] == lines[-count:]

    @pytest.mark.processes
    def test_last_line_without_its_newline_is_shown(self, tmp_path):
        folder = zoo.make_run(tmp_path, "crashed")
        with (folder.logs / "trainer.log").open("a") as file:
            file.write("half a li")
        assert said(folder)[-1].endswith("half a li")
        assert said(folder, tail=None)[-1].endswith("half a li")

    def test_bytes_that_are_no_text_do_not_stop_it(self, tmp_path):
        folder = zoo.make_run(tmp_path)
        (folder.logs / "trainer.log").write_bytes(b"\xff\xfe\x00\n" * 3)
        assert len(said(folder, processes=["trainer"])) == 3

    def test_endless_line_is_cut(self, tmp_path, monkeypatch):
        monkeypatch.setattr(module, "MAX_LINE_BYTES", 1000)
        path = tmp_path / "x.log"
        path.write_bytes(b"z" * 5500)
        file = LogFile("x", path)
        found = []
        while lines := file.news():
            found += lines
        assert [len(line) for _, line in found + file.last_words()] == [1000] * 5 + [500]


class TestNames:
    def test_unknown_process_names_the_known(self, tmp_path):
        with pytest.raises(UserError, match=r"did you mean trainer.*controller, rollout-0, trainer"):
            said(zoo.make_run(tmp_path), processes=["trainr"])

    def test_role_means_all_of_its_processes(self, tmp_path):
        folder = zoo.make_run(tmp_path)
        (folder.logs / "rollout-1.log").write_text("x\n")
        assert [file.name for file in choose(folder, ["rollout"])] == ["rollout-0", "rollout-1"]

    def test_process_that_has_not_written_yet_is_known_by_its_spec(self, tmp_path):
        folder = zoo.make_run(tmp_path)
        (folder.processes / "reward.json").write_text("{}")
        assert said(folder, processes=["reward"]) == []

    def test_run_without_logs_says_so(self, tmp_path, capsys):
        folder = zoo.make_run(tmp_path)
        for path in folder.logs.iterdir():
            path.unlink()
        assert said(folder) == []
        assert "no process of finished has written a log yet" in capsys.readouterr().err


class TestTerminal:
    def test_escape_sequences_are_shown_not_obeyed(self, tmp_path):
        folder = zoo.make_run(tmp_path)
        (folder.logs / "trainer.log").write_text("a\x1b[2Jb\n")
        out = Terminal()
        logs(folder, processes=["trainer"], out=out)
        assert out.getvalue() == "a\\x1b[2Jb\n"
        assert said(folder, processes=["trainer"]) == ["a\\x1b[2Jb"], "a pipe may end at a terminal too"


class TestFollow:
    def follow(self, folder: RunFolder, *actions: Any, **options: Any) -> list[str]:
        """Each action is called while the follower sleeps; after the last one the run ends."""
        left = list(actions)

        def sleep(_: float) -> None:
            if left:
                left.pop(0)()
            else:
                folder.write_state("finished", reason="done")

        return said(folder, follow=True, sleep=sleep, **options)

    def append(self, folder: RunFolder, name: str, text: str) -> None:
        with (folder.logs / f"{name}.log").open("a") as file:
            file.write(text)

    def test_news_come_until_the_run_is_over(self, tmp_path, capsys):
        folder = zoo.make_run(tmp_path, "running")
        lines = self.follow(
            folder,
            lambda: self.append(folder, "trainer", "2026-11-21 10:00:06,000 one\n2026-11-21 10:00:07,000 tw"),
            lambda: self.append(folder, "trainer", "o\n"),
            tail=0,
        )  # fmt: skip
        assert [line.split()[-1] for line in lines] == ["one", "two"]
        assert "finished" in capsys.readouterr().err

    def test_process_that_starts_late_is_followed_too(self, tmp_path):
        folder = zoo.make_run(tmp_path, "running")
        lines = self.follow(folder, lambda: self.append(folder, "rollout-7", "here\n"), tail=0, processes=["rollout"])
        assert lines == ["rollout-7 | here"]

    def test_last_words_of_a_run_are_not_lost(self, tmp_path):
        folder = zoo.make_run(tmp_path, "running")

        def end() -> None:
            self.append(folder, "controller", "the very last")
            folder.write_state("failed")

        assert self.follow(folder, end, tail=0)[-1].endswith("the very last")

    def test_file_that_was_cut_is_read_again(self, tmp_path):
        folder = zoo.make_run(tmp_path, "running")
        lines = self.follow(folder, lambda: (folder.logs / "trainer.log").write_text("new\n"), tail=0)
        assert lines == ["trainer    | new"]

    @pytest.mark.processes
    def test_run_that_is_over_is_printed_and_left(self, tmp_path):
        assert len(said(zoo.make_run(tmp_path, "crashed"), follow=True, tail=2)) == 2

    def test_leaving_with_ctrl_c_is_no_failure(self, tmp_path):
        def sleep(_: float) -> None:
            raise KeyboardInterrupt

        assert len(said(zoo.make_run(tmp_path, "running"), follow=True, tail=2, sleep=sleep)) == 2
