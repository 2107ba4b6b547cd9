"""`areal-like serve RUN|MODEL`: serves a policy at an endpoint for clients of the OpenAI and Anthropic APIs.

Finds and prepares the model and the client key, then replaces its own process with the server (rollout/serve.py).
Signals therefore reach the server directly, and its exit status is the command's. Its files are in a temporary folder,
which the server removes. The folder of a killed server is removed when the next one starts.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pydantic
import yaml

from areal_like.device_names import names_gpu
from areal_like.encryption.files import read_text
from areal_like.encryption.run_key import check_key, encrypted_root
from areal_like.errors import OperationError, UserError
from areal_like.plain_folder import decrypt_folder, is_encrypted_model, required_memory, use_memory_for_scratch
from areal_like.safety import SafetyFilter, SafetyStage
from areal_like.serve_files import UNNAMED_MODEL, ServeSpec
from areal_like.settings import DType
from areal_like.store_owner import claim, sweep_dead
from areal_like.transport.ports import can_listen
from areal_like.weights.adapter_folder import AdapterFolder, base_problem, read_adapter
from areal_like.weights.tensor_parts import has_parts
from areal_like.weights.weight_store import WeightStore
from controller.config import model_folder
from controller.launch.environments import child_environment
from controller.launch.short_process import run_module
from controller.preflight.chat_format import chat_template
from controller.run_folder.locate import find_run_to_read
from controller.run_folder.run_folder import RunFolder
from controller.runs.convert import checkpoint_of
from controller.wiring.checkpoints import export_checkpoint, is_checkpoint
from controller.wiring.process_specs import PREPARATION, SERVER, num_cores, serve_spec

FOLDER_PREFIX = "areal_like-serve-"
KEY_VARIABLE = "AREAL_LIKE_API_KEY"
DEFAULT_CONTEXT = 4096
PREPARATION_LIMIT_S = 3600.0
ENDING = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Found:
    """What to serve.

    model: folder or hub name; None: it is first made from `checkpoint`. name: the model's name for clients. facts: the
    run's configuration; empty: there is none.
    """

    name: str
    model: str | None
    checkpoint: Path | None
    facts: Mapping[str, Any]


def serve(arguments: argparse.Namespace) -> NoReturn:
    """Prepare the model, then replace this process with the server. Raises UserError, OperationError,
    KeyboardInterrupt.
    """
    key = key_of(arguments)
    if arguments.port and _is_ipv4(arguments.host) and not can_listen(arguments.port, arguments.host):
        # Checked here, because the preparation may take minutes.
        raise UserError(
            f"port {arguments.port} on {arguments.host} is in use, or you do not have permission to use it",
            where="--port",
            remedy="choose a different port, or 0 for any free port",
        )  # fmt: skip
    found = find(arguments.model, arguments.version)
    if found.model is not None and Path(found.model).is_dir() and not chat_template(Path(found.model)):
        what = "the model's tokenizer has no chat template, which is required for the messages of clients"
        raise UserError(what, where=arguments.model, remedy="choose a model with a chat template")
    adapters = adapters_of(arguments.adapter, arguments.name or found.name)
    if encrypted_root(Path(found.model or found.checkpoint or "")) is None:
        place = Path(tempfile.gettempdir())
    else:  # TMPDIR may be on a disk
        place = required_memory()
        use_memory_for_scratch()
    sweep_dead(place, FOLDER_PREFIX)
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=place))
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the folder may hold a whole model
    try:
        claim(folder)
        order = folder / "order.json"
        made = msgspec.json.encode(prepare(arguments, found, key, folder, adapters))
        order.touch(mode=0o600)
        order.write_bytes(made)
        sys.stdout.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # signals stay pending until the server handles them
        signal.signal(signal.SIGTERM, before)
        environment = child_environment(num_cores(), user_path=Path.cwd())
        environment.pop(KEY_VARIABLE, None)
        os.execve(sys.executable, [sys.executable, "-P", "-m", SERVER, str(order)], environment)
    finally:  # exec failed
        signal.signal(signal.SIGTERM, before)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        shutil.rmtree(folder, ignore_errors=True)


def prepare(
    arguments: argparse.Namespace, found: Found, key: str, folder: Path, adapters: Mapping[str, AdapterFolder]
) -> ServeSpec:
    """Prepare the model in `folder`, and return how to serve it. Raises UserError, OperationError."""
    model, facts = found.model, found.facts
    dtype: DType = arguments.dtype or ("bfloat16" if names_gpu(arguments.device) else "float32")
    if found.checkpoint is not None:
        model = str(folder / "exported")
        export_checkpoint(found.checkpoint, Path(model), None, None, is_decrypted=True)
    assert model is not None
    if is_encrypted_model(Path(model)):
        plain = folder / "decrypted"
        plain.mkdir()
        decrypt_folder(Path(model), plain)
        model = str(plain)
    weights = model_folder.tensor_shapes(model) if adapters else {}
    for adapter in adapters.values() if weights else ():  # of a model of the hub it is checked by the engine
        if (problem := base_problem(adapter, weights)) is not None:
            raise problem
    spec = serve_spec(model, dtype=dtype, out_dir=folder / "model", publish_to=folder / "weights")
    spec.save(folder / "prepare.json")
    run_module([PREPARATION, "--spec", str(folder / "prepare.json")], PREPARATION_LIMIT_S)
    manifest = WeightStore(folder / "weights", "disk", keep=2).newest()
    if manifest is None:
        raise OperationError(f"the model {arguments.model} was prepared, but no weights were written")
    return ServeSpec(
        folder=str(folder), model_dir=str(folder / "model"), manifest=str(manifest),
        name=arguments.name or found.name, host=arguments.host, port=arguments.port, key=key,
        format=arguments.format or _fact(facts, "rollout", "workflow_options", "format"),
        temperature=_first(arguments.temperature, _fact(facts, "sampling", "temperature"), 1.0),
        max_new_tokens=arguments.max_tokens,
        max_context=_first(arguments.max_context, _fact(facts, "rollout", "engine", "max_context"), DEFAULT_CONTEXT),
        num_slots=arguments.slots, device=arguments.device, dtype=dtype, num_threads=num_cores(),
        adapters={name: str(adapter.folder) for name, adapter in adapters.items()},
        safety=safety_of(arguments.safety, _fact(facts, "rollout", "safety")),
    )  # fmt: skip


def find(source: str, version: int | None) -> Found:
    """Find the run, checkpoint or model that a name refers to. Raises UserError."""
    folder = Path(source).expanduser()
    is_model, name = (folder / "config.json").is_file() and not has_parts(folder), folder.resolve().name
    if version is not None and (is_model or is_checkpoint(folder)):
        raise UserError(
            "--version can only be used with a run", where="--version", remedy="remove --version, or specify the run"
        )
    if is_model:
        _check_weights(folder)
        return Found(name, str(folder.resolve()), None, {})
    if is_checkpoint(folder):
        return Found(name, None, folder.resolve(), {})
    try:
        run = find_run_to_read(source)
    except UserError as error:
        if model_folder.is_hub_name(source):
            model_folder.find_model(source)
            return Found(source, source, None, {})
        raise UserError(
            f"{error.what}, and there is no model folder at this path either", where=error.where, remedy=error.remedy
        ) from error
    facts = _facts(run)
    if version is None and (run.final / "config.json").is_file():
        _check_weights(run.final)
        return Found(run.name, str(run.final), None, facts)
    return Found(run.name, None, checkpoint_of(source, version), facts)


def _check_weights(folder: Path) -> None:
    """Check the files of a model, or the key of an encrypted one. Raises UserError."""
    if is_encrypted_model(folder):
        check_key(folder)
    else:
        model_folder.check_weights(folder)


def adapters_of(given: Sequence[tuple[str, str]], model: str) -> dict[str, AdapterFolder]:
    """The adapters by their names. model: name of the base. Raises UserError."""
    found: dict[str, AdapterFolder] = {}
    for name, folder in given:
        if name in (model, UNNAMED_MODEL):
            what = f"{name} is already the name of the base model"
            raise UserError(
                what,
                where="--adapter",
                remedy="choose a different name for the adapter, or set the name of the base model with --name",
            )
        if name in found:
            raise UserError(
                f"two adapters have the name {name}", where="--adapter", remedy="give each adapter a different name"
            )
        found[name] = read_adapter(Path(folder).expanduser().resolve())
    return found


def safety_of(file: str | None, of_run: Any) -> tuple[dict[str, Any], ...]:
    """The safety stages of a file, else those of the run. Raises UserError."""
    where, stages = "rollout.safety of the run", of_run or []
    if file is not None:
        where = f"--safety {file}"
        try:
            stages = yaml.safe_load(Path(file).expanduser().read_text("utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            remedy = "specify a YAML file with a list of stages (docs/safety.md)"
            raise UserError(f"the file cannot be read ({error})", where=where, remedy=remedy) from error
    if not isinstance(stages, list) or not all(isinstance(one, dict) for one in stages):
        raise UserError(
            "the safety stages must be a list of mappings",
            where=where,
            remedy="write each stage as `- {kind: words, options: {...}}`",
        )
    checked = []
    for place, one in enumerate(stages):
        try:
            checked.append(SafetyStage.model_validate(one))
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            entry = ".".join(str(part) for part in (place, *first["loc"]))
            raise UserError(first["msg"].removeprefix("Value error, "), where=f"{where}: stages.{entry}") from error
    SafetyFilter(checked, f"{where}: stages")
    return tuple(one.model_dump() for one in checked)


def key_of(arguments: argparse.Namespace) -> str:
    """The clients' key; empty: a random one is generated. Raises UserError, also if the address is reachable from other
    machines and no key is given.
    """
    where, key = KEY_VARIABLE, os.environ.get(KEY_VARIABLE, "")
    if arguments.key_file is not None:
        where = "--key-file"
        try:
            key = Path(arguments.key_file).expanduser().read_text("utf-8").strip()
        except (OSError, ValueError) as error:
            remedy = "specify a readable text file that contains only the API key"
            raise UserError(f"{arguments.key_file} cannot be read ({error})", where=where, remedy=remedy) from error
        if not key:
            raise UserError(f"{arguments.key_file} is empty", where=where, remedy="write an API key into the file")
    if key and not (key.isascii() and key.isprintable() and " " not in key):
        raise UserError("an API key must consist of printable ASCII characters without spaces", where=where)
    if not key and not is_loopback(arguments.host):
        what = f"{arguments.host} is reachable from other machines, so an API key is required"
        raise UserError(what, where="--host", remedy=f"set {KEY_VARIABLE}, or use --key-file")
    return key


def is_loopback(host: str) -> bool:
    """Return whether the address is reachable only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_ipv4(host: str) -> bool:
    return host == "localhost" or host.replace(".", "").isdecimal()


def _facts(run: RunFolder) -> Mapping[str, Any]:
    try:
        loaded = yaml.safe_load(read_text(run.config))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def _fact(facts: Any, *keys: str) -> Any:
    for key in keys:
        facts = facts.get(key) if isinstance(facts, Mapping) else None
    return facts


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
