"""Python imports this first in an SGLang server whose PYTHONPATH names this folder: the server's further processes are
forked from the first one instead of importing torch and SGLang again, which is most of what a start costs.

All else is SGLang's own: the first process has started no thread by then and computes on a CPU. How it starts without
this is proved by test_sglang_experts.py.
"""

import multiprocessing.context
import multiprocessing.popen_fork

multiprocessing.context.SpawnProcess._Popen = staticmethod(multiprocessing.popen_fork.Popen)
