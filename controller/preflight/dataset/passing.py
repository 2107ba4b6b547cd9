"""One pass of all stages over the lines of a set.

A chunk of lines goes to a process, which parses it, runs the row stages and makes the sketches of set stages; this
process takes the chunks back in order and lets the set stages decide. A row is seen by a stage only if no stage before
it removed it. So the result does not depend on the number of processes.

The first chunks are looked at in this process: a small file needs no other. At most `2 * num_processes` chunks are out
at a time, so memory does not grow with the rows. A process that loses this one ends itself.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

from areal_like.errors import OperationError, UserError, first_line
from controller.preflight.dataset.columns import Columns
from controller.preflight.dataset.port import Finding, Row, RowStage, SetStage, Stage
from controller.preflight.dataset.reading import Line, parse
from controller.preflight.dataset.registry import StageSpec, make_stages

CHUNK_LINES = 256
INLINE_CHUNKS = 2
"""Number of chunks that are looked at before other processes are started."""


@dataclass(frozen=True)
class Looked:
    """What a process found in a line. removed_by: index of the row stage that removes it; sketches: by index of the set
    stages before that."""

    line: Line
    removed_by: int | None
    finding: Finding | None
    sketches: dict[int, Any]


@dataclass(frozen=True)
class Outcome:
    """A row and, if it is removed, the index of the stage and why."""

    row: Row
    line: Line
    stage: int | None = None
    finding: Finding | None = None


class Looker:
    """The part of the stages that needs one row only."""

    def __init__(self, specs: Sequence[StageSpec], columns: Columns, reads_faults: bool) -> None:
        self.stages = make_stages(specs)
        self._columns, self._reads_faults = columns, reads_faults
        for stage, spec in zip(self.stages, specs, strict=True):
            try:
                stage.prepare()
            except UserError as error:
                if error.where or not spec.where:
                    raise
                raise UserError(error.what, where=f"{spec.where}: stage {spec.kind}", remedy=error.remedy) from error
            except Exception as error:  # fault boundary: a stage may be the user's code
                raise OperationError(f"stage {spec.kind} cannot be prepared ({_cause(error)})") from error
        self._specs = specs

    def row_of(self, number: int, line: Line) -> Row:
        """The row of a line."""
        fields, fault = parse(line)
        return Row(number, line.where, fields, self._columns, fault)

    def look(self, chunk: Sequence[Line]) -> list[Looked]:
        """Look at a chunk of lines. Raises UserError for an unreadable line without stage `schema`, OperationError if a
        stage fails."""
        return [self._look(line) for line in chunk]

    def _look(self, line: Line) -> Looked:
        row = self.row_of(0, line)
        if row.fault and not self._reads_faults:
            remedy = "correct the line, or add the stage `schema`, which removes such lines"
            raise UserError(row.fault, where=line.where, remedy=remedy)
        sketches: dict[int, Any] = {}
        for index, stage in enumerate(self.stages):
            try:
                if isinstance(stage, SetStage):
                    sketches[index] = None if row.fault else stage.sketch(row)
                elif isinstance(stage, RowStage) and (finding := _checked(stage.check(row))) is not None:
                    return Looked(line, index, finding, sketches)
            except UserError:
                raise
            except Exception as error:  # fault boundary: a stage may be the user's code
                raise self.failure(index, line.where, error) from error
        return Looked(line, None, None, sketches)

    def failure(self, index: int, where: str, error: Exception) -> OperationError:
        """The error of a stage on a row, in one sentence."""
        return OperationError(f"stage {self._specs[index].kind} failed on {where} ({_cause(error)})")


def _cause(error: Exception) -> str:
    return str(error) if isinstance(error, OperationError) else f"{type(error).__name__}: {first_line(error)}"


def _checked(finding: Any) -> Finding | None:
    """What a stage returned, which may be the user's. Raises OperationError."""
    if finding is None or isinstance(finding, Finding):
        return finding
    raise OperationError(f"the stage returned {finding!r:.80} instead of a Finding or None")


class Pass:
    """All stages over a set. num_processes: 1 or fewer uses this process only."""

    def __init__(self, specs: Sequence[StageSpec], columns: Columns, num_processes: int) -> None:
        schema = [index for index, spec in enumerate(specs) if spec.kind == "schema"]
        if schema and schema[0] != 0:
            remedy = "move `schema` to the beginning of the list, because the other stages do not see unreadable rows"
            raise UserError("the stage `schema` must be the first stage", where=specs[schema[0]].where, remedy=remedy)
        self._arguments = (tuple(specs), columns, bool(schema))
        self._looker = Looker(*self._arguments)
        self._num_processes = num_processes

    @property
    def stages(self) -> list[Stage[Any]]:
        """The stages, prepared."""
        return self._looker.stages

    def run(self, lines: Iterator[Line]) -> Generator[Outcome, None, None]:
        """The outcome of each line, in order. Raises UserError, OperationError."""
        sets = {index: stage for index, stage in enumerate(self.stages) if isinstance(stage, SetStage)}
        for index, stage in sets.items():
            try:
                stage.open()
            except UserError:
                raise
            except Exception as error:  # fault boundary: a stage may be the user's code
                raise self._looker.failure(index, "opening", error) from error
        chunks = self._looked(lines)
        try:
            for number, looked in enumerate(itertools.chain.from_iterable(chunks), 1):
                yield self._decided(number, looked, sets)
        finally:
            chunks.close()
            for stage in sets.values():
                stage.close()

    def _decided(self, number: int, looked: Looked, sets: dict[int, SetStage[Any]]) -> Outcome:
        row = self._looker.row_of(number, looked.line)
        for index, sketch in looked.sketches.items():
            try:
                finding = None if sketch is None else _checked(sets[index].decide(number, row.where, sketch))
            except UserError:
                raise
            except Exception as error:  # fault boundary: a stage may be the user's code
                raise self._looker.failure(index, row.where, error) from error
            if finding is not None:
                return Outcome(row, looked.line, index, finding)
        return Outcome(row, looked.line, looked.removed_by, looked.finding)

    def _looked(self, lines: Iterator[Line]) -> Generator[list[Looked], None, None]:
        chunks = iter(lambda: list(itertools.islice(lines, CHUNK_LINES)), [])
        if self._num_processes <= 1:
            yield from map(self._looker.look, chunks)
            return
        yield from map(self._looker.look, itertools.islice(chunks, INLINE_CHUNKS))
        following = next(chunks, None)
        if following is not None:
            yield from self._in_processes(itertools.chain([following], chunks))

    def _in_processes(self, chunks: Iterator[list[Line]]) -> Generator[list[Looked], None, None]:
        pool = ProcessPoolExecutor(self._num_processes, multiprocessing.get_context("spawn"), _start, self._arguments)
        waiting: deque[Future[list[Looked]]] = deque()
        try:
            for chunk in chunks:
                waiting.append(pool.submit(_look, chunk))
                if len(waiting) >= 2 * self._num_processes:
                    yield _result(waiting.popleft())
            while waiting:
                yield _result(waiting.popleft())
        except BrokenProcessPool as error:
            raise OperationError(
                "a process that checked rows was killed; nothing was written; check whether the machine ran out of "
                "memory"
            ) from error
        except BaseException:  # an error, Ctrl-C, or the caller wants no more
            _kill(pool)
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _result(future: Future[list[Looked]]) -> list[Looked]:
    try:
        return future.result()
    except (UserError, OperationError, BrokenProcessPool):
        raise
    except Exception as error:
        raise OperationError(f"the result of a stage cannot be passed between processes ({_cause(error)})") from error


def _kill(pool: Any) -> None:
    """End the processes of a pool at once: they ignore Ctrl-C, and a chunk may take minutes."""
    for process in list((pool._processes or {}).values()):
        process.kill()
    if pool._result_queue is not None:  # a process may have sent half of a result: reading it must end too
        pool._result_queue._writer.close()


_looker: Looker | None = None
"""The stages of this process, if it was started by `_in_processes`."""


def _start(specs: Sequence[StageSpec], columns: Columns, reads_faults: bool) -> None:
    global _looker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _looker = Looker(specs, columns, reads_faults)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _look(chunk: list[Line]) -> list[Looked]:
    assert _looker is not None
    return _looker.look(chunk)
