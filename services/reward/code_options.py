"""Options of scorer `code`. Does not import torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from areal_like import limits
from areal_like.settings import Settings

SandboxLayer = Literal["namespaces", "landlock", "seccomp", "limits"]
"""Layers of the sandbox, strongest first: bubblewrap's namespaces; no namespaces but files hidden; files readable;
resource limits only."""


class CodeOptions(Settings):
    """Options of scorer `code`: how programs are found, judged and confined. Limits of a row take precedence."""

    partial_credit: bool = False
    """The value is the share of passed tests, instead of 1 for all and 0 otherwise."""
    compare: Literal["tokens", "lines", "exact"] = "tokens"
    """Printed output against the expected: words separated by any white space, lines, or every character."""
    float_tolerance: float = Field(0.0, ge=0, lt=1)
    """Tolerance for numbers (relative above 1): floats in asserts, decimal numbers in printed output."""
    extract: Literal["auto", "whole"] = "auto"
    """auto: the last fenced block of Python, else the whole answer, appended to the row's prompt if the answer
    continues it."""
    must_stop: bool = False
    """An answer truncated at the token limit counts as wrong."""
    own_classes: Literal["weaker", "invalid"] = "weaker"
    """If an assert compares objects of the program's own classes: allow it, with a remark, or give no verdict."""
    require: SandboxLayer = "landlock"
    """The weakest layer of the sandbox to accept; without it the service does not start. With `seccomp` and `limits` a
    program can read every file that its user can read, and programs are not run as root."""
    layer: SandboxLayer | None = None
    """Use this layer, even if there are others."""
    python: str | None = None
    """Interpreter for the programs, with its installed packages; None: this one, with only the standard library."""
    time_limit_s: float = Field(4.0, gt=0, le=600)
    """Own seconds for all asserts of a program together, or for each input: processor seconds of all its processes, and
    seconds in which they only wait. Time in which it waits for a processor does not count."""
    time_factor: float = Field(1.0, gt=0, le=limits.SECONDS)
    """Factor for a row's own `time_limit_s`: some limits are meant for faster languages."""
    total_limit_s: float = Field(8.0, gt=0, le=limits.SECONDS)
    """Own seconds for all tests of a program together. Must be below the service's timeout_s, which bounds the
    wall-clock time; leave some room for a busy machine."""
    memory_limit_mb: int = Field(1024, ge=16, le=limits.MEGABYTES)
    """Memory of a program and all its processes."""
    max_memory_limit_mb: int = Field(2048, ge=16, le=limits.MEGABYTES)
    """Largest memory limit of a row."""
    max_processes: int = Field(32, ge=1, le=limits.PROCESSES)
    """Number of processes and threads of a program."""
    max_output_kb: int = Field(4096, ge=1, le=limits.KILOBYTES)
    """Largest output of a program, and largest result of one call."""
    max_file_mb: int = Field(16, ge=0, le=limits.KILOBYTES)
    """Longest file a program may write."""
    max_open_files: int = Field(64, ge=16, le=limits.DEVICES)
    """Number of files that a program may keep open."""
    tmp_mb: int = Field(32, ge=1, le=limits.MEGABYTES)
    """Size of a program's private /tmp."""
    max_program_chars: int = Field(1_000_000, gt=0, le=limits.CHARACTERS)
    """A longer program is wrong."""

    ROOM_S: ClassVar[float] = 1.5
    """Longest time of judging beyond `total_limit_s`."""
    ROOM_MB: ClassVar[int] = 1024
    """Memory of a scoring process and its judge in addition to the program."""
