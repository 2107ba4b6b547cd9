"""Options of scorer `code`. Torch-free."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from areal_like import limits
from areal_like.settings import Settings

SandboxLayer = Literal["namespaces", "landlock", "seccomp", "limits"]
"""Strongest first: bubblewrap's namespaces; no namespaces but files hidden; files readable; resource limits only."""


class CodeOptions(Settings):
    """Options of scorer `code`: how programs are found, judged and confined. A row's own limits come before these."""

    partial_credit: bool = False
    """The value is the share of tests passed, instead of 1 for all and 0 for any less."""
    compare: Literal["tokens", "lines", "exact"] = "tokens"
    """Printed output against the expected: words whatever space is between them, lines, or every character."""
    float_tolerance: float = Field(0.0, ge=0, lt=1)
    """Numbers may differ by so much (relative beyond 1): floats in asserts, decimal numbers in printed output."""
    extract: Literal["auto", "whole"] = "auto"
    """auto: the last fenced block of Python, else the whole answer; below the row's prompt where that begins it."""
    must_stop: bool = False
    """An answer cut at the token limit counts as wrong."""
    own_classes: Literal["weaker", "invalid"] = "weaker"
    """Where an assert compares objects of the program's own classes: let them, and say so, or give no verdict."""
    require: SandboxLayer = "landlock"
    """The weakest layer of the sandbox to accept; without it the service does not start. `seccomp` and `limits` let a
    program read every file that its user can read, and refuse to run programs as root."""
    layer: SandboxLayer | None = None
    """Use this layer, whatever else there is."""
    python: str | None = None
    """Interpreter for the programs, with its installed packages; None: this one, with the standard library alone."""
    time_limit_s: float = Field(4.0, gt=0, le=600)
    """Own seconds for all asserts of a program together, or for each input: processor seconds of all its processes, and
    seconds in which they only wait. Time in which it stands ready for a processor does not count."""
    time_factor: float = Field(1.0, gt=0, le=limits.SECONDS)
    """Times a row's own `time_limit_s`: some are meant for faster languages."""
    total_limit_s: float = Field(8.0, gt=0, le=limits.SECONDS)
    """Own seconds for all tests of a program together. Must stay below the service's timeout_s, which is what bounds
    the wall clock: leave some room for times when the machine is busy."""
    memory_limit_mb: int = Field(1024, ge=16, le=limits.MEGABYTES)
    """Memory of a program and all its processes."""
    max_memory_limit_mb: int = Field(2048, ge=16, le=limits.MEGABYTES)
    """No row may ask for more."""
    max_processes: int = Field(32, ge=1, le=limits.PROCESSES)
    """Processes and threads of a program."""
    max_output_kb: int = Field(4096, ge=1, le=limits.KILOBYTES)
    """What a program may print, and the longest answer it may give to one call."""
    max_file_mb: int = Field(16, ge=0, le=limits.KILOBYTES)
    """Longest file a program may write."""
    max_open_files: int = Field(64, ge=16, le=limits.DEVICES)
    """Files a program may hold open."""
    tmp_mb: int = Field(32, ge=1, le=limits.MEGABYTES)
    """Size of a program's private /tmp."""
    max_program_chars: int = Field(1_000_000, gt=0, le=limits.CHARACTERS)
    """A longer program is wrong."""

    ROOM_S: ClassVar[float] = 1.5
    """What judging takes beyond `total_limit_s` at worst."""
    ROOM_MB: ClassVar[int] = 1024
    """What a scoring process and its judge take alongside the program."""
