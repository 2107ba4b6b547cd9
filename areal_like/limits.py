"""Upper limits of the settings: far above any sensible value, and low enough that no single setting exhausts memory."""

from __future__ import annotations

SECONDS = 1_000_000.0
"""Longest duration, 11 days: operating systems store waits as 32-bit milliseconds, which overflow after 24 days."""
TOKENS = 2**24
"""Tokens of one sequence or one micro-batch, and entries of a vocabulary."""
STEPS = 10_000_000
"""Counts such as steps, versions and restarts."""
ROWS = 1_000_000_000
"""Rows of a data set."""
GENERATED_ROWS = 20_000_000
"""Rows of a generator, which are created at once and stay in memory."""
GROUPS = 2**20
"""Groups or samples of one batch, requests in one queue."""
GROUP_SIZE = 2**16
"""Samples of one prompt."""
SAMPLES_IN_FLIGHT = 2**22
"""Samples the controller keeps track of at once."""
SAMPLE_BYTES = 170
"""Memory of the controller for the state of one sample (controller/coordinator/groups.py), measured."""
PROCESSES = 2**16
"""Processes of one kind, slots of one worker."""
DEVICES = 2**20
"""GPUs or CPUs of a pool."""
THREADS = 4096
"""Threads of one process."""
ELEMENTS = 10**12
"""Elements of a buffer of parameters."""
MEGABYTES = 2**24
"""Memory of one process, 16 TB."""
FILE_MEGABYTES = 10**9
"""Files of a run, a petabyte."""
KILOBYTES = 2**20
"""One message or reply, a gigabyte."""
STOP_STRINGS = 64
"""Stop strings of a run."""
STOP_CHARACTERS = 256
"""Of one stop string: so many tokens are decoded for each new one."""
CHARACTERS = 100_000_000
"""One text."""
PRICE = 1_000_000_000.0
"""Of one unit, in any currency."""
