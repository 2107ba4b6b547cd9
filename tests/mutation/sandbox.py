"""A copy of the checkout with an environment of its own, in which mutants live: the working tree is never touched."""

from __future__ import annotations

import compileall
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from py_compile import PycInvalidationMode

CHILD_HOOK = "import sys; sys.path.append({tools!r}); import lines; lines.follow_in_child()"
"""In the environment's .pth file: processes that tests start record their lines as well."""


@contextmanager
def sandbox(root: Path) -> Iterator[Path]:
    """A temporary copy of all files of the checkout that git does not ignore; `python` in it runs the copy."""
    folder = Path(tempfile.mkdtemp(prefix="mut-"))
    try:
        copy = folder / "copy"
        copy_checkout(root, copy)
        make_environment(folder / "env", copy)
        # Checked by content: a mutant that is written within the clock's tick and has the same size is seen.
        compileall.compile_dir(copy, quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def copy_checkout(root: Path, copy: Path) -> None:
    """Copy what git tracks and what it does not ignore."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name and (root / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, copy / name)


def make_environment(folder: Path, copy: Path) -> None:
    """A virtual environment that has the copy before everything that is installed for this interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    inherited = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    inside = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    lines = [str(copy), *inherited, CHILD_HOOK.format(tools=str(copy / "tests" / "mutation"))]
    (Path(inside) / "mutation.pth").write_text("\n".join(lines) + "\n")
    scripts = Path(sys.executable).parent  # of installed tools, which some tests start by name
    for script in scripts.iterdir():
        if not (target := folder / "bin" / script.name).exists() and os.access(script, os.X_OK):
            target.symlink_to(script)
