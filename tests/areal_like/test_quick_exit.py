"""A program that ends without destroying its objects ends like any other program, as far as others can see."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import areal_like.quick_exit

FILE = areal_like.quick_exit.__file__
QUICKLY = """
import gc, runpy, sys
gc.freeze()  # as in the processes that programs are forked from
quick_exit = runpy.run_path(sys.argv[1])
quick_exit["run"](lambda: runpy.run_path(sys.argv[2], run_name="__main__"))
"""
PROGRAMS = {
    "end": "print('done')",
    "status": "import sys; print('before'); sys.exit(3)",
    "negative": "import sys; sys.exit(-1)",
    "none": "import sys; sys.exit()",
    "text": "import sys; sys.exit('no such file')",
    "exception": "raise ValueError('of the program')",
    "interrupt": "raise KeyboardInterrupt",
    "thread": "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()",
    "daemon": "import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
    "atexit": "import atexit; atexit.register(print, 'first'); atexit.register(print, 'second')",
    "open": "file = open('kept', 'w'); file.write('text'); other = open('bytes', 'wb'); other.write(b'bytes')",
    "proxy": """
class Proxy:
    @property
    def __class__(self):
        print("looked at")
        return Proxy

kept = Proxy()
""",
    "tee": """
import sys

class Tee:
    def __init__(self, stream):
        self.stream = stream
    def write(self, text):
        self.stream.write(text)
    def flush(self):
        self.stream.flush()

sys.stdout = Tee(sys.stdout)
print("through it")
""",
    "replaced": "import io, sys; real = sys.stdout; sys.stdout = io.StringIO(); real.write('to the real one')",
    "blocked": """
import os, threading
reader, writer = os.pipe()
pipe = os.fdopen(writer, "wb")
threading.Thread(target=pipe.write, args=(b"x" * 2_000_000,), daemon=True).start()
import time
time.sleep(0.2)
print("end")
""",
    "stderr": "import sys; sys.stderr.write('partial'); sys.exit(0)",
    "closed": "import sys; sys.stdout.close()",
    "full": "import sys; sys.stdout = open('/dev/full', 'w'); print('lost')",
}


def ended(command: list[str], folder: Path) -> tuple[int, str, str, dict[str, str]]:
    """Status, output, last line of errors, and what was written into the folder."""
    folder.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    files = {path.name: path.read_text() for path in folder.iterdir()}
    return done.returncode, done.stdout, done.stderr.strip().rpartition("\n")[2], files


@pytest.mark.processes
@pytest.mark.parametrize("name", PROGRAMS)
def test_status_output_and_files_are_those_of_the_interpreter(name: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAMS[name])
    usual = ended([sys.executable, str(program)], tmp_path / "usual")
    quick = ended([sys.executable, "-c", QUICKLY, FILE, str(program)], tmp_path / "quick")
    if name == "full":  # the interpreter names the file's object
        assert (usual[0], quick[0]) == (120, 120)
    else:
        assert quick == usual


@pytest.mark.processes
def test_objects_that_still_exist_are_not_destroyed(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("class Kept:\n    def __del__(self):\n        print('destroyed')\n\nkept = Kept()")
    assert ended([sys.executable, str(program)], tmp_path / "usual")[1] == "destroyed\n"
    assert ended([sys.executable, "-c", QUICKLY, FILE, str(program)], tmp_path / "quick")[1] == ""
