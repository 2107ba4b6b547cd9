"""One environment process: runs many episodes, each an object of the user's class, until its stream ends.

    python -m services.environment.host --marker N --fd N

It does not clean up after itself, because it may hang or die at any point: the service kills its process tree from
outside.

Methods that are not `async` run one at a time. `async` methods of many episodes wait concurrently: each interval
between two awaits is marked with its episode (marker.py), and the memory growth in it is attributed to that episode.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import inspect
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from typing import Any, NoReturn

import msgspec

from areal_like.environment import Environment, InvalidStep, Step, as_step
from areal_like.errors import UserError
from areal_like.import_check import append_user_path
from areal_like.process import die_with_parent, freeze_heap, start_logging
from areal_like.secret_values import print_traceback, without_secrets
from areal_like.verdict import MAX_REASON_CHARS
from services.environment.config import EnvironmentSettings
from services.environment.interruption import CallTimedOut, interrupted
from services.environment.job import (
    Act,
    Answered,
    Begin,
    Close,
    Failed,
    FailureKind,
    HostReady,
    HostRefusal,
    HostSetup,
    decode_for_process,
)
from services.environment.loading import check_environment, find_environment
from services.environment.marker import NOBODY, Marker
from services.processes.framing import PREFIX, frame
from services.processes.process_tree import become_subreaper

MAX_HUNG_CLOSES = 3
"""After this many interrupted calls of `close`, a process no longer calls it, because each blocks all its episodes."""


class Usage:
    """Memory and open files of this process."""

    def __init__(self) -> None:
        self._statm = os.open("/proc/self/statm", os.O_RDONLY) if os.path.exists("/proc/self/statm") else -1
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")

    def num_bytes(self) -> int:
        """Resident bytes; 0 if the system does not report them."""
        if self._statm < 0:
            return 0
        return int(os.pread(self._statm, 64, 0).split()[1]) * self._page_bytes

    def num_files(self) -> int:
        """Number of open descriptors; 0 if the system does not report it."""
        try:
            return len(os.listdir("/proc/self/fd"))
        except OSError:
            return 0


class HostedEpisode:
    """One episode."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.num_bytes = self.num_files = 0
        """Bytes by which the process grew in its calls."""
        self.environment: Environment | None = None


class _Marked(Coroutine[Any, Any, Any]):
    """A user's coroutine whose execution is marked with its episode."""

    def __init__(self, inner: Coroutine[Any, Any, Any], running: Callable[[], Any]) -> None:
        self._inner, self._running = inner, running

    def send(self, value: Any) -> Any:
        with self._running():
            return self._inner.send(value)

    def throw(self, *error: Any) -> Any:
        with self._running():
            return self._inner.throw(*error)

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        raise NotImplementedError("only an asyncio task can run this coroutine")


class Host:
    """Answers `Begin` and `Act` with `send`."""

    def __init__(
        self,
        make: Callable[[], Environment],
        settings: EnvironmentSettings,
        marker: Marker,
        send: Callable[[Answered | Failed], None],
        usage: Usage | None = None,
    ) -> None:
        self._make, self._settings, self._marker, self._send = make, settings, marker, send
        self._usage = usage or Usage()
        self._held: dict[int, HostedEpisode] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._heaviest: HostedEpisode | None = None
        self._num_hung_closes = 0

    def take(self, message: Begin | Act | Close) -> None:
        """Handle a message; an `async` method continues in a separate task."""
        if isinstance(message, Begin):
            held = self._held[message.episode] = HostedEpisode(message.episode)
            self._call(held, "reset", lambda: self._begin(held, message))
        elif isinstance(message, Act):
            known = self._held.get(message.episode)
            if known is not None and known.environment is not None:
                environment = known.environment
                self._call(known, "step", lambda: environment.step(message.action))
        else:
            self._drop(message.episode)

    def _begin(self, held: HostedEpisode, message: Begin) -> Any:
        held.environment = self._make()
        return held.environment.reset(message.row, message.seed)

    def _call(self, held: HostedEpisode, method: str, call: Callable[[], Any]) -> None:
        with self._running(held):
            outcome = self._outcome(held, method, call)
        if isinstance(outcome, Step | Failed):
            self._answer(held, outcome)
        else:
            self._go_on(self._wait_for(held, method, outcome))

    def _outcome(self, held: HostedEpisode, method: str, call: Callable[[], Any]) -> Step | Failed | Awaitable[Any]:
        """Make a call that may run the user's code, which may raise anything, including SystemExit."""
        try:
            returned = call()
            if inspect.isawaitable(returned):
                return returned
        except BaseException as error:
            return self._raised(held, method, error)
        return self._converted(held, method, returned)

    def _converted(self, held: HostedEpisode, method: str, returned: Any) -> Step | Failed:
        """Convert a return value. It runs while the episode is marked, because numbers, texts and dicts may be the
        user's objects."""
        try:
            return as_step(returned, is_reset=method == "reset", max_bytes=self._settings.max_observation_kb << 10)
        except InvalidStep as error:
            reason = f"{method}: {error}"
        except BaseException as error:
            reason = f"{method}: the returned value raised {_shown(error)}"
        return Failed(episode=held.number, kind="invalid", reason=reason)

    def _raised(self, held: HostedEpisode, method: str, error: BaseException) -> Failed:
        """Convert an exception. It runs while the episode is marked, because the exception's text may run the user's
        code, and stderr may be the user's object."""
        return Failed(episode=held.number, kind="crashed", reason=f"{method} raised {_shown(error)}")

    def _go_on(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _awaited(self, held: HostedEpisode, method: str, awaitable: Awaitable[Any]) -> Step | Failed:
        try:
            returned = await awaitable
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:
            return self._raised(held, method, error)
        return self._converted(held, method, returned)

    async def _wait_for(self, held: HostedEpisode, method: str, awaitable: Awaitable[Any]) -> None:
        """Wait for an awaitable, bounded by `step_timeout_s`; if it continues after it was cancelled, it is
        abandoned.
        """
        coroutine = _Marked(self._awaited(held, method, awaitable), lambda: self._running(held))
        inner = asyncio.get_running_loop().create_task(coroutine)
        done, _ = await asyncio.wait({inner}, timeout=self._settings.step_timeout_s)
        if not done:
            inner.cancel()
            self._fail(
                held, "timed_out", f"{method} took longer than {self._settings.step_timeout_s:g} s", is_left=True
            )
            return
        try:
            outcome = inner.result()
        except BaseException as error:  # it has cancelled itself
            outcome = self._raised(held, method, error)
        self._answer(held, outcome)

    @contextlib.contextmanager
    def _running(self, held: HostedEpisode) -> Iterator[None]:
        """Mark the episode while its code runs, and measure the growth of the process."""
        used_bytes = self._usage.num_bytes()
        num_files = self._usage.num_files()
        self._marker.enter(held.number, used_bytes)
        try:
            yield
        finally:
            with contextlib.suppress(BaseException):  # the user's code may have closed or replaced it
                sys.stdout.flush()
            self._marker.leave()
            held.num_bytes += self._usage.num_bytes() - used_bytes
            held.num_files += self._usage.num_files() - num_files

    def _answer(self, held: HostedEpisode, outcome: Step | Failed) -> None:
        if self._held.get(held.number) is not held:  # closed while it waited
            return
        settings = self._settings
        taken_mb = held.num_bytes >> 20
        if taken_mb > settings.max_episode_memory_mb:
            limit = f"max_episode_memory_mb {settings.max_episode_memory_mb}"
            what = f"the episode used {taken_mb} MB, which is more than {limit}"
            self._fail(held, "crashed", what, is_left=True)
        elif held.num_files > settings.max_episode_files:
            limit = f"max_episode_files {settings.max_episode_files}"
            what = f"the episode has {held.num_files} open files, which is more than {limit}"
            self._fail(held, "crashed", what, is_left=True)
        elif isinstance(outcome, Failed):
            self._fail(held, outcome.kind, outcome.reason)
        else:
            self._send(Answered(episode=held.number, step=outcome))
        self._note_heaviest(held)

    def _fail(self, held: HostedEpisode, kind: FailureKind, reason: str, *, is_left: bool = False) -> None:
        if self._held.get(held.number) is held:
            self._drop(held.number)
            reason = reason[:MAX_REASON_CHARS].encode("utf-8", "replace").decode("utf-8")
            self._send(Failed(episode=held.number, kind=kind, reason=reason, is_left=is_left))

    def _drop(self, episode: int) -> None:
        held = self._held.pop(episode, None)
        if held is None:
            return
        with self._running(held):
            awaitable = self._close(held)
        if awaitable is not None:
            self._go_on(self._closed(held, awaitable))

    def _close(self, held: HostedEpisode) -> Awaitable[Any] | None:
        """Call `close`; returns its result if that has to be awaited. Exceptions are ignored, because the episode has
        ended. A call that hangs is interrupted, because the other episodes of the process wait for it."""
        if self._num_hung_closes >= MAX_HUNG_CLOSES:
            return None
        try:
            close = getattr(held.environment, "close", None)
            returned = interrupted(close, self._settings.close_timeout_s) if callable(close) else None
            return returned if inspect.isawaitable(returned) else None
        except CallTimedOut:
            self._num_hung_closes += 1
            rest = "; it is no longer called in this process" if self._num_hung_closes == MAX_HUNG_CLOSES else ""
            with contextlib.suppress(BaseException):  # the user's code may have closed or replaced it
                print(
                    f"`close` of the environment took longer than {self._settings.close_timeout_s:g} s{rest}",
                    file=sys.stderr,
                )
        except BaseException as error:  # as in `_outcome`
            _shown(error)
        return None

    async def _closed(self, held: HostedEpisode, awaitable: Any) -> None:
        coroutine = _Marked(self._awaited(held, "close", awaitable), lambda: self._running(held))
        inner = asyncio.get_running_loop().create_task(coroutine)
        await asyncio.wait({inner}, timeout=self._settings.close_timeout_s)
        inner.cancel()

    def _note_heaviest(self, held: HostedEpisode) -> None:
        if self._heaviest is None or self._heaviest.number not in self._held:
            self._heaviest = max(self._held.values(), key=lambda one: one.num_bytes, default=None)
        elif held.num_bytes > self._heaviest.num_bytes and held.number in self._held:
            self._heaviest = held
        heaviest = self._heaviest
        self._marker.heaviest(*((heaviest.number, heaviest.num_bytes) if heaviest is not None else (NOBODY, 0)))


def _shown(error: BaseException) -> str:
    """Print it with its traceback. Returns its type and the last line of its text."""
    with contextlib.suppress(BaseException):  # the user's code may have closed or replaced stderr
        print_traceback(error, limit=8)
    try:
        lines = without_secrets(str(error)).strip().splitlines()
        return f"{type(error).__name__}: {lines[-1] if lines else ''}"
    except BaseException:  # an exception whose own text raises
        return f"{type(error).__name__}: (the message cannot be shown)"


def load(setup: HostSetup) -> tuple[Callable[[], Environment], EnvironmentSettings] | HostRefusal:
    """Import the class and create an instance; a user's mistake becomes a HostRefusal."""
    settings = EnvironmentSettings.model_validate(setup.settings)
    try:
        check_environment(settings.kind, settings.options)
        return find_environment(settings.kind, settings.options), settings
    except UserError as error:
        if error.__cause__ is not None:
            print_traceback(error.__cause__)
        return HostRefusal(sentence=str(error))


async def serve(stream: socket.socket, marker: Marker) -> int:
    """Answer until the stream ends. Returns the exit status."""
    reader, writer = await asyncio.open_connection(sock=stream)

    async def receive() -> HostSetup | Begin | Act | Close | None:
        try:
            length = PREFIX.unpack(await reader.readexactly(PREFIX.size))[0]
            return decode_for_process(await reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    setup = await receive()
    if not isinstance(setup, HostSetup):
        return 1
    die_with_parent(setup.service_pid)
    loaded = load(setup)
    if isinstance(loaded, HostRefusal):
        writer.write(frame(loaded))
        await writer.drain()
        return 2
    freeze_heap()
    writer.write(frame(HostReady()))
    make, settings = loaded

    def send(message: Answered | Failed) -> None:
        writer.write(frame(message))

    host = Host(make, settings, marker, send)
    while (message := await receive()) is not None:
        assert not isinstance(message, HostSetup)
        host.take(message)
        await asyncio.sleep(0)  # replies are sent before the next call begins
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="services.environment.host")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--marker", type=int, required=True)
    arguments = parser.parse_args()
    marker = Marker(arguments.marker)
    os.close(arguments.marker)
    stream = socket.socket(fileno=arguments.fd)
    os.set_inheritable(stream.fileno(), False)
    start_logging("environment", "WARNING")
    become_subreaper()
    faulthandler.enable()
    append_user_path()

    async def whole() -> NoReturn:
        status = 1
        with contextlib.suppress(ConnectionError, msgspec.MsgspecError):  # the service has exited
            status = await serve(stream, marker)
        os._exit(status)  # the user's threads, tasks and exit handlers must not keep a finished process

    asyncio.run(whole())


if __name__ == "__main__":
    main()
