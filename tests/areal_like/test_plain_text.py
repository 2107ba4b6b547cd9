"""Claims about text of models and programs: it forges no log line, no reason of a death, and commands no terminal."""

from __future__ import annotations

import io
import logging

from areal_like.plain_text import LineFormatter, one_line, printable
from areal_like.process import report_end

HOSTILE = "fine\nerror: the disk is full\r\n2026-01-01 ERROR forged\x1b[2J\u2028line\u202e"


def logged(emit) -> str:
    """What a logger with our formatter writes."""
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(LineFormatter("%(levelname)s %(message)s"))
    logger = logging.Logger("test")
    logger.addHandler(handler)
    emit(logger)
    return out.getvalue()


def test_message_is_one_line_of_the_log_whatever_it_holds():
    text = logged(lambda logger: logger.info("answer: %s", HOSTILE))
    assert text.splitlines() == [text.rstrip("\n")]
    assert "\x1b" not in text
    assert text.startswith("INFO answer: fine\\nerror: the disk is full")


def test_traceback_follows_on_indented_lines_so_that_none_passes_for_a_record():
    def fail(logger: logging.Logger) -> None:
        try:
            raise ValueError(HOSTILE)
        except ValueError:
            logger.exception("it failed")

    lines = logged(fail).splitlines()
    assert lines[0] == "ERROR it failed"
    assert all(line.startswith("  ") for line in lines[1:])
    assert any("forged" in line for line in lines[1:])


def test_control_characters_are_shown_and_line_breaks_too_where_one_line_is_wanted():
    assert printable("a\x1b[31mb\tc\nd\x00") == "a\\x1b[31mb\tc\nd\\x00"
    assert one_line("a\r\nb\rc") == "a\\nb\\rc"


def test_last_words_of_a_process_are_one_harmless_line(capsys):
    report_end(RuntimeError(f"worker said {HOSTILE}"))
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: RuntimeError: worker said fine error: the disk is full")
    assert "\x1b" not in last
