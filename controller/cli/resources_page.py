"""Memory, hours and cost of a run, as `areal-like validate` prints them.

The estimate is in config/memory/, the simulation in simulate/forecast.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from areal_like.decoder_shape import DecoderShape
from areal_like.device_names import names_gpu
from areal_like.errors import UserError
from controller.config.memory.estimate import ProcessMemory, estimate, shape_of_run
from controller.config.memory.fit import CONTEXT_BYTES
from controller.config.run_config import RunConfig
from controller.data.length_distribution import parse_lengths
from controller.preflight.found import Preflight
from controller.run_folder.units import size_text
from controller.simulate.forecast import forecast


def resource_lines(config: RunConfig, found: Preflight, *, price: float | None, lengths: str) -> Iterator[str]:
    """Sections `Memory` and `Time`. price: price of a GPU-hour; lengths: answer lengths, in the format of
    `simulate`.
    """
    if config.emulation is not None:
        return
    shape = shape_of_run(config, found.model)
    if shape is None:
        yield "# Memory is not estimated: the sizes of the model are not known here"
        return
    yield "# Memory of each device (estimate)"
    yield from (f"#   {line}" for line in _memory_lines(config, shape, found.device_bytes))
    yield ""
    yield "# Time (simulated, not measured)"
    yield from (f"#   {line}" for line in _time_lines(config, shape, price, lengths))


def _memory_lines(config: RunConfig, shape: DecoderShape, device_bytes: float | None) -> Iterator[str]:
    found = estimate(config, shape, device_bytes)
    places = {True: config.trainer.device, False: config.rollout.engine.device}
    of_gpu = "" if device_bytes is None else f" of {size_text(device_bytes)}"
    lines: list[tuple[str, str, str]] = []
    for process, device in [*((one, places[True]) for one in found.trainer), (found.rollout, places[False])]:
        is_cuda = names_gpu(device)
        parts = dict(process.parts) | ({"CUDA context": CONTEXT_BYTES} if is_cuda and not _fills(process) else {})
        name = f"{process.count} {process.name}" if process.count > 1 and process.pool == "rollout" else process.name
        lines.append(
            (name, size_text(sum(parts.values())) + (of_gpu if is_cuda else ""), _listed(parts, process.words))
        )
    lines.append(("host, all processes", size_text(found.host_bytes), _listed(dict(found.host), "")))
    names, sizes = (max(len(line[column]) for line in lines) for column in (0, 1))
    for name, size, listed in lines:
        yield f"{name:<{names}}  {size:>{sizes}}  = {listed}"


def _fills(process: ProcessMemory) -> bool:
    """Return whether the listed parts are all memory of the device."""
    return process.total_bytes > process.needed_bytes


def _listed(parts: dict[str, float], words: str) -> str:
    listed = " + ".join(f"{name} {size_text(num_bytes)}" for name, num_bytes in parts.items()) or "nothing"
    return f"{listed} ({words})" if words else listed


def _time_lines(config: RunConfig, shape: DecoderShape, price: float | None, lengths: str) -> Iterator[str]:
    try:
        given = parse_lengths(lengths, config.sampling.max_new_tokens) if lengths else None
        found = forecast(config, shape, given)
    except UserError as error:
        yield f"not estimated: {error}"
        return
    yield f"{found.gpus} {found.gpu}, answers {found.lengths} (--lengths gives others), evaluations left out"
    yield (
        f"{found.step_s:,.1f} s per step, {found.hours:,.1f} h to the end, {found.gpu_hours:,.0f} GPU-hours; the"
        f" trainer waits {found.trainer_wait_share:.0%} of the time, rollout {found.rollout_idle_share:.0%}"
    )
    if price is not None:
        yield f"{found.gpu_hours * price:,.2f} at {price:g} per GPU-hour"
