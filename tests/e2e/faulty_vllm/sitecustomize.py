"""As ../forked_server, and the server refuses or never finishes its next load if a file of that name is in the folder
FAULTS; the file is removed when it takes effect.
"""

import importlib.util
import os
import runpy
import sys
import time
from pathlib import Path

runpy.run_path(str(Path(__file__).parents[1] / "forked_server" / "sitecustomize.py"))

PATCHED = "areal_like_vllm"


def _has(fault: str) -> bool:
    try:
        os.unlink(os.path.join(os.environ["FAULTS"], fault))
    except FileNotFoundError:
        return False
    return True


class Patch:
    """Finds the module that runs inside vLLM, and patches it once it is imported."""

    def find_spec(self, name, path=None, target=None):
        if name != PATCHED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_patch(module):
            execute(module)
            check = module.check_folder

            def check_folder(folder, expected):
                if _has("refuse"):
                    raise ValueError("a test refuses this version")
                if _has("hang"):
                    time.sleep(3600)
                return check(folder, expected)

            module.check_folder = check_folder

        spec.loader.exec_module = execute_and_patch
        return spec


sys.meta_path.insert(0, Patch())
