"""The doctor on torch, its devices, their driver: each verdict on a machine made up for it."""

from __future__ import annotations

import pytest
from fake_machine import CPU_TORCH, CUDA_TORCH, GB, FakeMachine, gpu, gpus

from controller.doctor.machine import Ran
from controller.doctor.topics import torch_build

NVIDIA = {"/dev": ("null", "nvidia0", "nvidiactl")}
SMI = {"nvidia-smi": "/usr/bin/nvidia-smi"}


def on_gpu(*devices: dict[str, object], **more: object) -> FakeMachine:
    """A machine with a CUDA torch that answers with these devices."""
    answers = {"torch_build": CUDA_TORCH, "torch_devices": gpus(*devices)}
    return FakeMachine(answers=answers, versions={"torch": "2.13.0"}, folders=NVIDIA, **more)  # type: ignore[arg-type]


def test_torch_that_computes_is_ok_and_names_its_build() -> None:
    found = torch_build.torch(FakeMachine(versions={"torch": "2.13.0+cpu"}, answers={"torch_build": CPU_TORCH}))
    assert found.verdict == "ok"
    assert "2.13.0+cpu, CPU build, AVX512" in found.found
    assert found.data["build"] == "CPU build"


@pytest.mark.parametrize("version", ["", "2.9.0", "3.0.0"])
def test_missing_or_other_torch_is_a_problem_with_a_command(version: str) -> None:
    found = torch_build.torch(FakeMachine(versions={"torch": version}))
    assert found.verdict == "problem"
    assert "pip install 'torch>=" in found.advice


@pytest.mark.parametrize(
    ("fault", "advice"),
    [
        ("no result within 60 s", "try again when the machine is idle"),
        ("ended by SIGILL", "lacks instructions"),
        ("OSError: libcudnn.so.9: cannot open shared object file", "LD_LIBRARY_PATH"),
        ("something nobody has seen", "pip install --force-reinstall 'torch"),
    ],
)
def test_torch_that_cannot_be_imported_is_a_problem_with_fitting_advice(fault: str, advice: str) -> None:
    found = torch_build.torch(FakeMachine(versions={"torch": "2.13.0"}, answers={"torch_build": fault}))
    assert found.verdict == "problem"
    assert fault in found.found
    assert advice in found.advice


def test_cpu_build_without_gpu_is_ok_and_cuda_is_never_started() -> None:
    machine = FakeMachine(answers={"torch_build": CPU_TORCH})
    assert torch_build.devices(machine).verdict == "ok"
    assert torch_build.attention(machine).verdict == "ok"
    assert torch_build.topology(machine) is None
    assert "torch_devices" not in machine.probed


def test_cpu_build_with_a_gpu_is_a_warning_that_says_how_to_get_the_other() -> None:
    found = torch_build.devices(FakeMachine(answers={"torch_build": CPU_TORCH}, folders=NVIDIA))
    assert (found.verdict, "1 NVIDIA GPU" in found.found) == ("warning", True)
    assert "--index-url" in found.advice
    amd = torch_build.devices(FakeMachine(answers={"torch_build": CPU_TORCH}, folders={"/dev": ("kfd",)}))
    assert (amd.verdict, "AMD" in amd.found) == ("warning", True)


def test_apple_build_is_ok_and_says_that_its_gpu_is_not_used() -> None:
    machine = FakeMachine(system="darwin", answers={"torch_build": {**CPU_TORCH, "has_mps": True}})
    found = torch_build.devices(machine)
    assert (found.verdict, "Apple" in found.found) == ("ok", True)


def test_healthy_gpu_is_ok_with_its_memory() -> None:
    found = torch_build.devices(on_gpu(gpu()))
    assert found.verdict == "ok"
    assert found.found == "cuda:0 NVIDIA H200, 140 GB, 139 GB free, capability 9.0"


def test_cuda_that_hangs_is_a_warning_and_not_a_hang() -> None:
    answers = {"torch_build": CUDA_TORCH, "torch_devices": "no result within 60 s"}
    found = torch_build.devices(FakeMachine(answers=answers, folders=NVIDIA))
    assert found.verdict == "warning"
    assert "no result within 60 s" in found.found
    assert "CUDA_VISIBLE_DEVICES=''" in found.advice


def test_gpu_that_cuda_does_not_show_is_a_warning_with_cudas_words() -> None:
    fault = "The NVIDIA driver on your system is too old (found version 12020)"
    answers = {"torch_build": CUDA_TORCH, "torch_devices": gpus(fault=fault)}
    found = torch_build.devices(FakeMachine(answers=answers, folders=NVIDIA))
    assert (found.verdict, fault in found.found) == ("warning", True)


def test_hidden_gpus_and_no_gpus_are_ok_with_a_cuda_build() -> None:
    answers = {"torch_build": CUDA_TORCH, "torch_devices": gpus()}
    hidden = FakeMachine(answers=answers, folders=NVIDIA, environment={"CUDA_VISIBLE_DEVICES": ""})
    assert torch_build.devices(hidden).verdict == "ok"
    assert torch_build.devices(FakeMachine(answers=answers)).verdict == "ok"


def test_device_that_computes_wrongly_or_is_taken_is_a_warning() -> None:
    wrong = torch_build.devices(on_gpu(gpu(), gpu(fault="computes wrongly: 0.0 instead of 1.0")))
    assert (wrong.verdict, "cuda:1: computes wrongly" in wrong.found) == ("warning", True)
    taken = torch_build.devices(on_gpu(gpu(free_bytes=3 * GB)))
    assert (taken.verdict, "cuda:0: most of the memory is in use" in taken.found) == ("warning", True)


def test_devices_and_attention_say_so_when_torch_is_broken() -> None:
    machine = FakeMachine(answers={"torch_build": "boom"})
    assert torch_build.devices(machine).verdict == torch_build.attention(machine).verdict == "warning"


def test_driver_absent_fitting_too_old_and_broken() -> None:
    assert torch_build.driver(FakeMachine()).verdict == "absent"

    def driver(says: Ran) -> str:
        return torch_build.driver(on_gpu(gpu(), programs=SMI, says=lambda argv: says)).verdict

    assert driver(Ran(0, "580.65.06\n580.65.06\n")) == "ok"
    assert driver(Ran(0, "535.104.05\n")) == "warning"
    assert (
        driver(Ran(18, "Failed to initialize NVML: Driver/library version mismatch\n", fault="status 18")) == "warning"
    )
    assert driver(Ran(0, "")) == "warning"


def test_driver_too_old_for_this_cuda_names_both_numbers() -> None:
    found = torch_build.driver(on_gpu(gpu(), programs=SMI, says=lambda argv: Ran(0, "535.104.05\n")))
    assert found.found == "the NVIDIA driver has version 535.104.05, but CUDA 13.0 requires version 580 or newer"


def test_driver_is_read_from_the_kernel_where_nvidia_smi_is_missing() -> None:
    text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.82.07  Wed Aug 27 01:10:00 UTC 2025"
    found = torch_build.driver(on_gpu(gpu(), files={"/proc/driver/nvidia/version": text}))
    assert (found.verdict, found.found) == ("ok", "NVIDIA 580.82.07")
    assert torch_build.driver(on_gpu(gpu())).verdict == "warning"


def test_attention_kernel_by_build_device_and_package() -> None:
    assert "torch's varlen is available" in torch_build.attention(on_gpu(gpu())).found
    old = torch_build.attention(on_gpu(gpu(capability=[7, 5])))
    assert (old.verdict, "older than capability 8.0" in old.found) == ("warning", True)
    bare = FakeMachine(answers={"torch_build": {**CUDA_TORCH, "has_varlen": False}, "torch_devices": gpus(gpu())})
    assert torch_build.attention(bare).verdict == "warning"
    flash = FakeMachine(
        answers={"torch_build": {**CUDA_TORCH, "has_varlen": False}, "torch_devices": gpus(gpu())},
        versions={"flash-attn": "2.8.3"},
    )
    assert torch_build.attention(flash).verdict == "ok"


TOPO = """\
\tGPU0\tGPU1\tNIC0\tCPU Affinity
GPU0\t X \tNV18\tPIX\t0-31
GPU1\tNV18\t X \tSYS\t0-31
"""


def test_topology_speaks_of_several_gpus_only() -> None:
    assert torch_build.topology(on_gpu(gpu())) is None
    linked = torch_build.topology(on_gpu(gpu(), gpu(), programs=SMI, says=lambda argv: Ran(0, TOPO)))
    assert linked is not None
    assert linked.verdict == "ok"
    assert "2 GPUs, NV18, PIX, SYS" in linked.found
    apart = FakeMachine(answers={"torch_build": CUDA_TORCH, "torch_devices": gpus(gpu(), gpu(), gpu(), apart=[(0, 2)])})
    found = torch_build.topology(apart)
    assert found is not None
    assert (found.verdict, "no direct connection between 0-2" in found.found) == ("warning", True)
