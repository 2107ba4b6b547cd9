"""Checks of torch, its devices and their driver. torch is inspected in a separate process, because a broken driver can
hang.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from controller.doctor import versions
from controller.doctor.finding import Check, Finding, absent, count, ok, problem, size, warning
from controller.doctor.machine import Answer, Machine
from controller.doctor.remedies import remedy

TOPIC = "torch"
CUDA_INDEX = "https://download.pytorch.org/whl/"
LEAST_DRIVER = {11: 450, 12: 525, 13: 580}
"""Minimum major version of NVIDIA's Linux driver by major version of CUDA (NVIDIA's CUDA compatibility tables)."""
PROBE_S, DEVICES_S = 60.0, 60.0


def _build(machine: Machine) -> Answer:
    return machine.probe("torch_build", deadline_s=PROBE_S)


def _devices(machine: Machine) -> Answer:
    return machine.probe("torch_devices", deadline_s=DEVICES_S)


def _nvidia_gpus(machine: Machine) -> int:
    """NVIDIA GPUs known to the kernel, whether or not CUDA works."""
    return len([name for name in machine.names("/dev") if re.fullmatch(r"nvidia\d+", name)])


def _has_amd_gpu(machine: Machine) -> bool:
    return "kfd" in machine.names("/dev")


def torch(machine: Machine) -> Finding:
    """Check the build: version, CPU, CUDA or ROCm, and whether it computes."""
    from controller.doctor.supported_versions import torch_fault

    installed, entry = machine.version("torch"), versions.required_of("torch")
    advice = f"pip install '{entry.text}' (without a GPU: with --index-url {CUDA_INDEX}cpu)"
    if fault := torch_fault(installed or None):
        return problem(fault, advice, version=installed)
    answer = _build(machine)
    if not answer.data:
        words = f"{installed} is installed, but does not work: {answer.fault}"
        again = advice.replace("pip install", "pip install --force-reinstall")
        return problem(words, remedy(answer.fault, again), version=installed)
    facts = answer.data
    if not facts["computes"]:
        return problem(f"{installed} computes wrong results", advice, version=installed)
    kind = f"CUDA {facts['cuda']}" if facts["cuda"] else f"ROCm {facts['hip']}" if facts["hip"] else "CPU build"
    data = {**facts, "build": kind}
    data.pop("version")
    threads = count(int(facts["num_threads"]), "thread")
    words = f"{installed}, {kind}, {facts['instructions'] or 'unknown'} instructions, {threads}"
    return ok(f"{words}, imported in {facts['import_s']:.1f} s", version=installed, **data)


def devices(machine: Machine) -> Finding:
    """Check the devices that torch can use, each with a small product."""
    build = _build(machine)
    if not build.data:
        return warning("this check requires a working installation of torch", "fix the torch installation first")
    if not build.data["cuda"] and not build.data["hip"]:
        return _without_gpu_build(machine, build.data)
    answer = _devices(machine)
    hidden = "CUDA_VISIBLE_DEVICES" in machine.environment
    if not answer.data:
        return warning(
            f"CUDA does not respond: {answer.fault}",
            "check whether nvidia-smi works, restart the driver or the machine, or disable CUDA: "
            "CUDA_VISIBLE_DEVICES=''",
        )
    found = answer.data["devices"]
    if not found:
        if _nvidia_gpus(machine) and not hidden:
            here, why = count(_nvidia_gpus(machine), "NVIDIA GPU"), answer.data["fault"] or "no reason given"
            return warning(
                f"this machine has {here}, but CUDA does not find any: {why}",
                "the driver must support the CUDA version of this torch: update the driver, or install torch for an "
                "older CUDA version",
            )
        return ok("CPU only: this torch supports GPUs, but none is visible", devices=[])
    bad = [f"cuda:{index}: {device['fault']}" for index, device in enumerate(found) if device["fault"]]
    words = "; ".join(_words(index, device) for index, device in enumerate(found))
    if bad:
        return warning(
            "; ".join(bad), "reset each of these devices, or exclude it with CUDA_VISIBLE_DEVICES", **answer.data
        )
    taken = [i for i, device in enumerate(found) if device.get("free_bytes", 0) < 0.5 * device["total_bytes"]]
    if taken:
        who = ", ".join(f"cuda:{index}" for index in taken)
        return warning(
            f"{words}; {who}: most of the memory is in use by other programs",
            "run nvidia-smi to see which processes use the memory",
            **answer.data,
        )
    return ok(words, **answer.data)


def _words(index: int, device: Mapping[str, Any]) -> str:
    major, minor = device["capability"]
    free = f", {size(device['free_bytes'])} free" if "free_bytes" in device else ""
    return f"cuda:{index} {device['name']}, {size(device['total_bytes'])}{free}, capability {major}.{minor}"


def _without_gpu_build(machine: Machine, build: Mapping[str, Any]) -> Finding:
    number = _nvidia_gpus(machine)
    if number:
        return warning(
            f"torch cannot use the {count(number, 'NVIDIA GPU')} of this machine, because the installed "
            "build is for CPUs",
            f"pip install --force-reinstall torch --index-url {CUDA_INDEX}cu130 (or the index for the CUDA version of "
            "your driver)",
        )
    if _has_amd_gpu(machine):
        return warning(
            "torch cannot use the AMD GPU of this machine, because the installed build is for CPUs",
            f"install a ROCm build from {CUDA_INDEX} (not tested)",
        )
    return ok("CPU only" + (" (Apple's GPU is not used)" if build.get("has_mps") else ""), devices=[])


def driver(machine: Machine) -> Finding:
    """Check the GPU's driver against the version that this torch's CUDA requires."""
    smi = machine.which("nvidia-smi")
    if not smi and not _nvidia_gpus(machine):
        if _has_amd_gpu(machine):
            return ok(f"amdgpu {machine.text('/sys/module/amdgpu/version') or '(in the kernel)'}")
        return absent("no NVIDIA or AMD GPU on this machine")
    version = ""
    if smi:
        ran = machine.run([smi, "--query-gpu=driver_version", "--format=csv,noheader"], deadline_s=20)
        if ran.fault:
            said = " ".join((ran.out or ran.fault).split())[:160]
            return warning(
                f"nvidia-smi: {said}",
                "restart the machine if its driver was updated, or, in a container, start the container "
                "with --gpus all",
            )
        version = ran.out.strip().splitlines()[0].strip() if ran.out.strip() else ""
    else:
        match = re.search(r"Kernel Module\D*(\d[\d.]+)", machine.text("/proc/driver/nvidia/version"))
        version = match.group(1) if match else ""
    if not version:
        return warning("an NVIDIA GPU is present, but no driver version was found", "install NVIDIA's driver")
    cuda = versions.number(str(_build(machine).data.get("cuda") or ""))
    least = LEAST_DRIVER.get(cuda[0], 0) if cuda else 0
    if versions.number(version)[:1] < (least,):
        return warning(
            f"the NVIDIA driver has version {version}, but CUDA {'.'.join(map(str, cuda))} requires version "
            f"{least} or newer",
            f"update the driver, or install torch for an older CUDA version from {CUDA_INDEX}", version=version,
        )  # fmt: skip
    return ok(f"NVIDIA {version}", version=version)


def attention(machine: Machine) -> Finding:
    """Check which attention kernel packs sequences of unequal length without padding."""
    flash, build = machine.version("flash-attn"), _build(machine)
    if not build.data:
        return warning("this check requires a working installation of torch", "fix the torch installation first")
    has_varlen = bool(build.data["has_varlen"])
    found = [
        f"torch's varlen {'is available' if has_varlen else 'is not in this torch'}",
        f"flash-attn {flash}" if flash else "flash-attn not installed (not needed with varlen)",
    ]
    data = {"varlen": has_varlen, "flash_attn": flash}
    if not build.data["cuda"] and not build.data["hip"]:
        return ok("SDPA, sequence by sequence (packed kernels need a GPU)", **data)
    capabilities = [tuple(device["capability"]) for device in _devices(machine).data.get("devices", [])]
    if capabilities and min(capabilities) < (8, 0):
        return warning(
            "; ".join([*found, "this GPU is older than capability 8.0, so SDPA is used"]),
            "training works, but is slower; kernels for packed sequences require an Ampere GPU or newer", **data,
        )  # fmt: skip
    if not has_varlen and not flash:
        return warning("; ".join(found), f"update torch, or {versions.how_to_install('flash-attn')}", **data)
    return ok("; ".join(found), **data)


def topology(machine: Machine) -> Finding | None:
    """Check the connections between several GPUs; None with fewer than two."""
    facts = _devices(machine).data if _build(machine).data.get("cuda") or _build(machine).data.get("hip") else {}
    number = len(facts.get("devices", []))
    if number < 2:
        return None
    apart = [(a, b) for a in range(number) for b in range(a + 1, number) if not facts["peers"][a][b]]
    links = _links(machine)
    words = f"{number} GPUs, {links or 'links unknown'}"
    if apart:
        pairs = ", ".join(f"{a}-{b}" for a, b in apart[:6]) + (", ..." if len(apart) > 6 else "")
        return warning(
            f"{words}; there is no direct connection between {pairs}", "transfers use host memory, which is slower",
            links=links, apart=apart,
        )  # fmt: skip
    return ok(f"{words}; all are connected directly", links=links)


def _links(machine: Machine) -> str:
    """Kinds of links in `nvidia-smi topo -m`, e.g. `NV18` or `PIX, SYS`."""
    smi = machine.which("nvidia-smi")
    if not smi:
        return ""
    ran = machine.run([smi, "topo", "-m"], deadline_s=20)
    rows = [line.split() for line in ran.out.splitlines() if line.startswith("GPU")]
    return ", ".join(
        sorted({cell for row in rows for cell in row if re.fullmatch(r"NV\d+|PIX|PXB|PHB|NODE|SYS", cell)})
    )


CHECKS = (
    Check(TOPIC, "torch", torch, deadline_s=70, is_needed=True),
    Check(TOPIC, "devices", devices, deadline_s=140),
    Check(TOPIC, "GPU driver", driver, deadline_s=100),
    Check(TOPIC, "GPU topology", topology, deadline_s=170),
    Check(TOPIC, "attention kernel", attention, deadline_s=150),
)
