"""Selects the device, the dtype, the model and the data for this machine."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import urllib.request
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import psutil
import torch
from safetensors import SafetensorError, safe_open

from rlm.cli import terminal
from rlm.model.adapter_info import AdapterInfo
from rlm.ops import learning_dtype

EMBEDDED_MODEL = "smollm2-135m"
EMBEDDED_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
# Minimum GPU memory in GB → the largest base model that can be trained with it in 16 bits, with the
# memory for sampling included; the licence of the model; its download size in GB.
GPU_MODELS = {
    38: ("Qwen/Qwen2.5-7B-Instruct", "Apache 2.0", 15.2),
    15: ("Qwen/Qwen2.5-3B-Instruct", "Qwen Research: not for commercial use", 6.2),
    5: ("Qwen/Qwen2.5-1.5B-Instruct", "Apache 2.0", 3.1),
}
DRIVER = Path("/proc/driver/nvidia/version")
CGROUP = Path("/sys/fs/cgroup")  # the root of the control groups (version 2) that are visible here
OWN_CGROUP = Path("/proc/self/cgroup")  # names the control group of this process


@dataclass(frozen=True)
class Device:
    """The device on which the model runs, its dtype, and the reason for this selection."""

    type: str
    dtype: torch.dtype
    reason: str

    def __str__(self) -> str:
        return f"{self.type}, {str(self.dtype).removeprefix('torch.')} ({self.reason})"


def pick_device(dtype: str = "auto") -> Device:
    """Select a CUDA GPU if there is one, and the dtype that is fastest on this hardware.

    Args:
        dtype: "auto", or the name of the dtype to use.
    """
    if dtype != "auto":
        place = "cuda" if torch.cuda.is_available() else "cpu"
        return Device(place, getattr(torch, dtype), f"--dtype {dtype}")
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        name = torch.cuda.get_device_name()
        if major >= 8:
            return Device("cuda", torch.bfloat16, f"{name} computes bf16 fast")
        return Device("cuda", torch.float16, f"{name}, sm_{major}{minor}, has no fast bf16")
    unused = f"; {why}" if (why := why_no_gpu()) else ""
    fastest, reason = learning_dtype()
    return Device("cpu", fastest, f"{reason}{unused}")


def why_no_gpu() -> str:
    """Return the reason why PyTorch cannot use this machine's NVIDIA GPU.

    The reason is "" if PyTorch can use the GPU, or if there is no GPU.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")  # the user hid the GPU
    if hidden or torch.cuda.is_available() or not (driver := _nvidia_driver()):
        return ""
    if torch.version.cuda is None:
        return (
            f"there is an NVIDIA GPU (driver {driver}), but PyTorch {torch.__version__} is built "
            "without CUDA: install a build with CUDA, see https://pytorch.org"
        )
    return (
        f"there is an NVIDIA GPU, but its driver {driver} does not work with PyTorch "
        f"{torch.__version__} (CUDA {torch.version.cuda}): update the driver, or install PyTorch "
        "for an older CUDA"
    )


def _nvidia_driver() -> str | None:
    """Return the version of the NVIDIA driver, if any (under WSL only nvidia-smi reports it)."""
    if DRIVER.is_file():
        found = re.search(r"\d+\.\d+(\.\d+)?", DRIVER.read_text(encoding="utf-8"))
        return found[0] if found else "of unknown version"
    if shutil.which("nvidia-smi") is None:
        return None
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(ask, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None
    return None


@dataclass(frozen=True)
class Setup:
    """The model and the data that a training script uses if no flag names them.

    reason: the property of this machine, or of the initial adapter, that determined the selection.
    about_model, about_dataset: an additional reason for the model and for the dataset.
    """

    model: str
    dataset: str
    reason: str
    about_model: str = ""
    about_dataset: str = ""


def default_setup() -> Setup:
    """Select the default model and data for this machine.

    With a GPU and a reachable hub, these are GSM8K and the largest base model that fits the GPU.
    Otherwise they are the embedded model and word problems, which need no download.
    """
    if torch.cuda.is_available():
        device = torch.cuda.current_device()
        gigabytes = torch.cuda.get_device_properties(device).total_memory / 2**30
        fitting = [name for least, (name, *_) in GPU_MODELS.items() if gigabytes >= least]
        if fitting and hub_reachable():
            reason = f"a GPU with {gigabytes:.0f} GB"
            return Setup(fitting[0], "gsm8k", reason, model_download(fitting[0]))
        reason = "the hub is out of reach" if fitting else f"a GPU with {gigabytes:.1f} GB"
    else:
        reason = why_no_gpu() or "no GPU here"
    came = "the 135M model came with the installation"
    made = "word problems are made on this machine"
    return Setup(EMBEDDED_MODEL, "word-problems:1", reason, came, made)


def model_download(name: str) -> str:
    """Describe the licence and the size of a base model that `default_setup` may select.

    The result is "" for other models.
    """
    known = {model: about for model, *about in GPU_MODELS.values()}
    return "licence {}; a one-time download of {} GB".format(*known[name]) if name in known else ""


def parameter_count(model: str) -> float:
    """Count the parameters of a model; infinity if the model is not in a folder on this machine."""
    if model in (EMBEDDED_MODEL, EMBEDDED_HUB_ID):
        return 135e6
    count = 0
    for file in Path(model).glob("*.safetensors"):
        try:
            with cast("Any", safe_open(file, "pt")) as weights:  # its stub lacks some methods
                shapes = [weights.get_slice(name).get_shape() for name in weights.offset_keys()]
        except SafetensorError:  # such as a Git LFS pointer, which `load_base` reports
            return math.inf
        count += sum(map(math.prod, shapes))
    return count or math.inf


def hub_base(info: AdapterInfo) -> str:
    """Return the base model's name on the hub."""
    return EMBEDDED_HUB_ID if info.base_model == EMBEDDED_MODEL else str(info.base_model)


def licence_of(name: str) -> str:
    """Return the licence of a base model; "" if this module does not know it."""
    known = {model: licence for model, licence, _ in GPU_MODELS.values()}
    known |= dict.fromkeys((EMBEDDED_MODEL, "Qwen/Qwen2.5-0.5B-Instruct"), "Apache 2.0")
    return known.get(name, "")


def default_values(given: Mapping[str, Any], start: AdapterInfo | None) -> dict[str, Any]:
    """Add defaults for model, dataset and quantization to the values, and print the reasons.

    Args:
        given: the values set by a preset, a YAML file and the command line. The script's config has
            the fields model, dataset and quantize.
        start: the adapter from which training starts; its model and dataset take precedence over
            the defaults of this machine.
    """
    values: dict[str, Any] = {
        k: v for k, v in given.items() if v is not None or k not in ("model", "dataset")
    }
    if "quantize" in values:
        values["quantize"] = pick_quantization(values["quantize"])
    elif start and start.run:
        values["quantize"] = start.quantize
    if values.keys() >= {"model", "dataset"}:
        return values
    setup = default_setup()
    if start and start.run:  # otherwise, another tool made this adapter
        model, dataset = start.base_model or setup.model, start.dataset or setup.dataset
        setup = Setup(model, dataset, "taken from the initial adapter")
    chosen = {"model": setup.model, "dataset": setup.dataset}
    new = [name for name in chosen if name not in values]
    named = ", ".join(f"{name} {chosen[name]}" for name in new)
    about = {"model": setup.about_model, "dataset": setup.about_dataset}
    reasons = filter(None, [setup.reason, *(about[name] for name in new)])
    terminal.line(f"chosen: {named} ({'; '.join(reasons)})")
    return chosen | values


def pick_quantization(quantize: str) -> str:
    """Replace the quantization "auto" with "4bit" on a GPU, or else with "none".

    A message is printed if "auto" becomes "none". Other quantizations are returned unchanged.
    """
    if quantize != "auto":
        return quantize
    if torch.cuda.is_available():
        return "4bit"
    terminal.line(
        f"no CUDA GPU here, so the base model is loaded without quantization ({pick_device()}); "
        "--quantize 4bit also works on a CPU, but slowly"
    )
    return "none"


def hub_reachable() -> bool:
    """Return whether the hub, or its mirror in HF_ENDPOINT, answers within three seconds.

    Behind a proxy, only the hub's own libraries can test the connection, so the result is True.
    """
    hub = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    if hub.scheme in urllib.request.getproxies():
        return True
    port = hub.port or (80 if hub.scheme == "http" else 443)
    try:
        with socket.create_connection((hub.hostname, port), timeout=3):
            return True
    except OSError:
        return False


def prepare_process() -> None:
    """Silence libraries, and configure memory and threads. Every script calls this function first.

    Every layer allocates temporary buffers of a few megabytes. If glibc mapped these buffers anew
    each time, page faults would take a tenth of a training step on a CPU. Therefore glibc is
    configured to reuse freed blocks of up to 32 MB; larger blocks are still returned to the
    system, so memory stays bounded. By default oneDNN caches its code for 1,024 shapes of
    matmuls, with about a megabyte per shape; a cache of 64 shapes is as fast (docs/log.md).
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")  # read at the first matmul
    if "OMP_NUM_THREADS" not in os.environ:
        _limit_threads()
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    # Users of a script cannot act on the deprecation warnings of these libraries.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft|trl)\b")
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library without mallopt
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(ctypes.c_int(-3), ctypes.c_int(32 * 2**20))  # M_MMAP_THRESHOLD
            libc.mallopt(ctypes.c_int(-1), ctypes.c_int(512 * 2**20))  # M_TRIM_THRESHOLD


def _limit_threads() -> None:
    """Limit the threads to the CPUs that control groups allow, for example with Docker's --cpus.

    By default, torch uses all cores of the machine. Its threads would use up the allowed CPU time
    while they wait for each other, and the system would then stop all of them.
    """
    allowed = [torch.get_num_threads()]
    for group in _control_groups():
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max" instead of a number
            quota, period = map(int, (group / "cpu.max").read_text().split())
            allowed.append(math.ceil(quota / period))
    torch.set_num_threads(min(allowed))


def release_memory() -> None:
    """Return free memory to the system, or to other users of the GPU.

    Otherwise the peak memory of a step would be the sum of the peaks of sampling and training, and
    not the larger of the two peaks.
    """
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL("libc.so.6").malloc_trim(0)


def _control_groups() -> list[Path]:
    """Return the folders of this process's control groups, the innermost first."""
    lines = OWN_CGROUP.read_text().splitlines() if OWN_CGROUP.is_file() else []
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    return [CGROUP / own, *(CGROUP / above for above in Path(own).parents)]


def available_memory(device_type: str) -> int:
    """Return the available bytes of the GPU, or of this machine within its control groups' limits.

    Containers, Slurm and systemd limit memory with control groups. Only version 2 is read.
    The result for a CPU is this process's equal share among the processes that torchrun started.
    """
    if device_type == "cuda":
        # Memory that PyTorch has reserved but not allocated is also available.
        held = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return torch.cuda.mem_get_info()[0] + held
    available = psutil.virtual_memory().available
    for group in _control_groups():
        limit, used = (group / f"memory.{name}" for name in ("max", "current"))
        if limit.is_file() and limit.read_text().strip() != "max":
            # Used memory includes the page cache, which the system frees on demand.
            statistics = used.with_name("memory.stat").read_text().split()
            cached = int(statistics[statistics.index("inactive_file") + 1])
            in_use = max(0, int(used.read_text()) - cached)
            available = min(available, int(limit.read_text()) - in_use)
    return available // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def peak_memory_gb() -> float:
    """Return the peak memory of this process in GB: GPU memory if it used a GPU, else resident."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated() / 2**30
    status = Path("/proc/self/status")  # only on Linux, where getrusage includes the parent's peak
    if status.exists() and (found := re.search(r"VmHWM:\s+(\d+) kB", status.read_text())):
        return int(found[1]) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)  # bytes on macOS, else kilobytes
