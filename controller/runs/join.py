"""`areal-like worker --join RUN`: starts one rollout worker on this machine for a run in progress.

It connects to the run's controller as a candidate, adapts the spec that it receives (joined_spec.py), starts the worker
as its child and waits for it. The controller's side is runtime/admission.py.

SIGTERM or Ctrl-C once: the worker drains and exits, or is not started; twice: it is killed. The child ends with this
process.
Exit status: 0 the worker has left, or the run is over; 1 the worker failed; 2 this machine cannot join the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from areal_like import __version__
from areal_like.config import ProcessSpec
from areal_like.device_names import index_of, names_cpu
from areal_like.errors import ChannelError, DeadlineExceeded, OperationError, UserError
from areal_like.process import boot_id, describe_status, last_error, private_files
from areal_like.store_owner import claim, sweep_dead
from areal_like.transport.channel import Peer
from areal_like.transport.credentials import CANDIDATE, write_credentials
from areal_like.wire import messages as m
from controller.launch.environments import child_environment
from controller.launch.launcher import tail_of
from controller.run_folder.formatting import printable
from controller.run_folder.invitation import INVITATION_FILE, Invitation
from controller.run_folder.locate import find_run
from controller.run_folder.owner_host import whereabouts
from controller.runs.crew import goes_on
from controller.runs.joined_spec import Machine, localized, sees_run
from controller.wiring.process_specs import MODULES

CONNECT_S = 15.0
ANSWER_S = 30.0
"""Time limit for the controller's answer; it may be committing the ledger."""
PROBE_S = 5.0
HEARTBEAT_S = 1.0
LOG_LINES = 15


@private_files()
def join(source: str, *, device: str = "", model: str = "") -> int:
    """Run one worker until it leaves; return the exit status. Raises UserError, OperationError.

    Args:
        source: a run's folder or name, or a copy of its invitation.
        device: device of the engine; empty: as in the run.
        model: folder with a copy of the run's model; empty: the run's own.
    """
    if device and not names_cpu(device) and index_of(device) is None:
        raise UserError(f"{device!r} is not a device", where="--device", remedy="use cpu, cuda or cuda:N")
    invitation = find_invitation(source)
    check_invitation(invitation, source)
    with _folder() as folder:
        is_controllers = bool(invitation.boot_id) and invitation.boot_id == boot_id()
        machine = Machine(folder, device=device, model=model, is_controllers=is_controllers)
        return asyncio.run(_join(invitation, machine, source))


def find_invitation(source: str) -> Invitation:
    """Find the invitation of a run, or read a copy of one. Raises UserError if the run is not in progress."""
    path = Path(source).expanduser()
    if path.is_file():
        return Invitation.load(path)
    folder = find_run(source)
    where = whereabouts(folder)
    remedy = "name a run that is in progress; areal-like ps lists those of this machine"
    if not goes_on(where):
        raise UserError(f"{folder.name} {where.words}", where=str(folder.root), remedy=remedy)
    if not (folder.keys / INVITATION_FILE).is_file():
        raise UserError(
            "the run does not admit workers: it has not started its processes yet, or it trains from files",
            where=str(folder.root), remedy="try again when areal-like status shows its processes",
        )  # fmt: skip
    return Invitation.load(folder.keys / INVITATION_FILE)


def check_invitation(invitation: Invitation, source: str) -> None:
    """Raise UserError if this installation or machine cannot use the invitation."""
    if invitation.release != __version__:
        raise UserError(
            f"the run uses areal_like {invitation.release}, and this is {__version__}", where=source,
            remedy=f"install areal_like {invitation.release} on this machine",
        )  # fmt: skip
    if invitation.is_local and invitation.boot_id != boot_id():
        raise UserError(
            f"the run listens on {invitation.address} of {invitation.host}, which other machines cannot reach",
            where=source, remedy=f"start the run with launch.host set to an address of {invitation.host}",
        )  # fmt: skip


# ---------------------------------------------------------------- one worker


@dataclass
class Stop:
    """What signals have requested: once, that the worker drains; twice, that it ends at once."""

    child: asyncio.subprocess.Process | None = None
    num_signals: int = 0
    asking: asyncio.Task[m.JoinOffer] | None = None
    """Connects and asks; nothing is lost if it is cancelled."""

    def signalled(self) -> None:
        """Handle SIGTERM or SIGINT."""
        self.num_signals += 1
        if self.asking is not None:
            self.asking.cancel()
        if self.child is not None and self.child.returncode is None:
            self.child.send_signal(signal.SIGTERM if self.num_signals == 1 else signal.SIGKILL)


async def _join(invitation: Invitation, machine: Machine, source: str) -> int:
    stop, loop = Stop(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.signalled)
    candidate = _candidate(invitation, machine.folder)
    try:
        stop.asking = asyncio.create_task(_asked(candidate, invitation, source))
        try:
            offer = await stop.asking
        except asyncio.CancelledError:
            if stop.num_signals:
                return 0
            raise
        spec = localized(offer, machine)
        if stop.num_signals:
            return 0
        return await _work(spec, invitation, machine, candidate, stop)
    finally:
        await candidate.close("the candidate has ended")


async def _asked(candidate: Peer, invitation: Invitation, source: str) -> m.JoinOffer:
    await _connect(candidate, invitation, source)
    return await _offer(candidate, source)


def _candidate(invitation: Invitation, folder: Path) -> Peer:
    """A candidate that is not connected yet."""
    files = {name: content.encode() for name, content in invitation.credentials.items()}
    hello = m.Hello(
        role="candidate", name=f"{CANDIDATE}/{secrets.token_hex(8)}", pid=os.getpid(), run_id=invitation.run_id,
        incarnation=secrets.token_hex(8),
    )  # fmt: skip
    return Peer(
        address=invitation.address,
        hello=hello,
        curve_dir=write_credentials(folder / "invitation", files),
        audience="controller",
        accept=frozenset({m.JoinOffer}),
        heartbeat_s=HEARTBEAT_S,
        silence_s=CONNECT_S,
        status=lambda: m.Heartbeat(state="candidate"),
    )


async def _connect(candidate: Peer, invitation: Invitation, source: str) -> None:
    """Register. Raises UserError that says why it is not possible."""
    try:
        await candidate.connect(CONNECT_S)
    except ChannelError as error:
        raise UserError(f"the run refuses this machine ({error})", where=source, remedy=_RENEW) from error
    except DeadlineExceeded as error:
        raise _unreachable(invitation, source) from error


_RENEW = "use the invitation of the run's present session: RUN/keys/invitation.json"


def _unreachable(invitation: Invitation, source: str) -> UserError:
    """Why the controller does not answer: nothing listens there, or it does not know these keys."""
    parts = urlsplit(invitation.address)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 0), PROBE_S).close()
    except OSError as error:
        return UserError(
            f"nothing answers at {invitation.address} of {invitation.host} ({error.strerror or error}): the run has "
            "ended, or this machine cannot reach it",
            where=source, remedy=f"run areal-like status on {invitation.host}, and check its firewall",
        )  # fmt: skip
    return UserError(
        f"the process at {invitation.address} does not accept the keys of this invitation: the run was resumed since, "
        "or another one uses the port",
        where=source, remedy=_RENEW,
    )  # fmt: skip


async def _offer(candidate: Peer, source: str) -> m.JoinOffer:
    """Ask to join. Raises UserError with the run's reason if it refuses."""
    await candidate.send(m.JoinRequest(host=socket.gethostname()))
    due_s = time.monotonic() + ANSWER_S
    while (left_s := due_s - time.monotonic()) > 0:
        match await candidate.receive(left_s):
            case m.JoinOffer(reason="") as offer:
                return offer
            case m.JoinOffer() as refusal:
                raise UserError(refusal.reason, where=source, remedy="join a run that can use another worker")
            case m.Shutdown() as shutdown:
                raise UserError(shutdown.reason, where=source, remedy="join a run that is in progress")
    raise OperationError(f"the run did not answer within {ANSWER_S:g} s")


async def _work(
    spec: ProcessSpec, invitation: Invitation, machine: Machine, candidate: Peer, stop: Stop
) -> int:  # fmt: skip
    """Start the worker and wait for its end; the run is notified if it fails."""
    spec_path, log_path = machine.folder / "spec.json", None
    spec.save(spec_path)
    if sees_run(spec):
        log_path = Path(spec.run_dir) / "logs" / f"{spec.name}.log"
    print(f"{spec.name} joins {invitation.run}" + (f"; its log: {log_path}" if log_path else ""), flush=True)
    stop.child = child = await _start(spec, spec_path, log_path)
    if stop.num_signals:
        child.send_signal(signal.SIGTERM if stop.num_signals == 1 else signal.SIGKILL)
    try:
        returncode = await child.wait()
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)  # what it has started
    if returncode == 0:
        print(f"{spec.name} has left {invitation.run}", flush=True)
        return 0
    said = last_error(tail_of(log_path, LOG_LINES)) if log_path else ""
    reason = said or f"ended with {describe_status(returncode)}"
    with contextlib.suppress(OperationError):  # the controller may be gone
        await candidate.send(m.JoinedWorkerEnded(name=spec.name, reason=reason), timeout_s=PROBE_S)
    print(f"error: {spec.name}: {printable(reason)}; its samples continue on other workers", file=sys.stderr)
    return 1


async def _start(spec: ProcessSpec, spec_path: Path, log_path: Path | None) -> asyncio.subprocess.Process:
    """Start the worker in a session of its own, with its output in the run's folder, or on this terminal."""
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(log_path.open("ab")) if log_path is not None else None
        return await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", MODULES["rollout"], "--spec", str(spec_path),
            stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
            env=child_environment(spec.num_threads, user_path=Path.cwd()), start_new_session=True,
        )  # fmt: skip


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A private folder for this worker's keys and files; those of killed predecessors are removed."""
    temporary = Path(tempfile.gettempdir())
    sweep_dead(temporary)
    folder = Path(tempfile.mkdtemp(prefix="areal_like-worker-", dir=temporary))
    claim(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        sweep_dead()  # versions that a killed worker kept in shared memory
        sweep_dead(temporary)
