"""Where a run happens: the device, the precision, and a record of both."""

import contextlib
import datetime
import functools
import os
import platform
import subprocess
import sys
from contextlib import AbstractContextManager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import fedsieve
from fedsieve import plugins
from fedsieve.config import Experiment
from fedsieve.errors import FedsieveError
from fedsieve.train.feed import Autocast

PACKAGES = ("torch", "torchvision", "timm", "datasets", "safetensors", "numpy", "pydantic", "peft")


def choose_device(name: str) -> torch.device:
    """The device of an experiment; one that is not there is refused."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):  # others that torch knows were never tried
            raise RuntimeError
    except RuntimeError:
        raise FedsieveError(f"device: {name} is not allowed. Allowed: auto, cpu, cuda, cuda:N") from None
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            there = f"{count} GPU(s), numbered from 0. Allowed: auto, cpu, cuda, cuda:N"
            none = "no GPU that torch can use. Allowed here: auto, cpu"
            raise FedsieveError(f"device: {name} is not there: this machine has {there if count else none}")
    return device


def make_autocast(experiment: Experiment, device: torch.device) -> Autocast:
    """bf16 autocast where the experiment asks for it (by default on a GPU that computes in it), otherwise nothing."""
    # GPUs before compute capability 8, such as the T4, only emulate bf16: slower than fp32.
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    bf16 = experiment.precision == "bf16" or (experiment.precision == "auto" and able)

    def autocast() -> AbstractContextManager:
        return torch.autocast(device.type, torch.bfloat16) if bf16 else contextlib.nullcontext()

    return autocast


def set_deterministic(on: bool) -> None:
    """Make GPU arithmetic repeatable; cuBLAS reads its setting when it starts, so this comes before any GPU work."""
    if on:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if torch.are_deterministic_algorithms_enabled() != on:  # asked first, since setting it imports torch's compiler
        torch.use_deterministic_algorithms(on)
    torch.backends.cudnn.benchmark = False


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Versions, hardware and command, for environment.json."""
    described: dict[str, Any] = {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["fedsieve", *sys.argv[1:]])
        if Path(sys.argv[0]).stem == "fedsieve"
        else " ".join(sys.argv),
        "fedsieve": fedsieve.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": device_name(device),
    }
    if plugins.LOADED:
        described["plugins"] = {Path(name).name: digest for name, digest in plugins.LOADED.items()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            described[package] = metadata.version(package)
    if device.type == "cuda":
        described["cuda"] = torch.version.cuda
    return described


def device_name(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def _cpu_name() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@functools.cache  # the code that runs is the code that was loaded, whatever is committed meanwhile
def _commit() -> str | None:
    """The commit of fedsieve's own checkout, with + when it was changed; of a package or a copy, what FEDSIEVE_COMMIT says."""

    def git(*words: str) -> str | None:
        try:
            folder = Path(fedsieve.__file__).parent
            done = subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # A package inside some other project's repository (its virtual environment) must not report that one's commit.
    if git("ls-files", "--error-unmatch", "__init__.py") is None:
        return os.environ.get("FEDSIEVE_COMMIT")
    commit = git("rev-parse", "--short=12", "HEAD")
    return f"{commit}+" if commit and git("status", "--porcelain", "-uno") else commit
