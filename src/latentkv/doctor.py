"""The environment report: what a bug report about this library should carry."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import latentkv
from latentkv.ops._library import OPS, OpRecord

REFERENCE = "reference"
KERNEL = "kernel"
INTERPRETED = "kernel, interpreted"
NO_TRITON = "none: Triton is missing"


def interpreter_is_on() -> bool:
    """Whether `TRITON_INTERPRET` makes Triton run kernels as Python on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "").strip().lower() in ("1", "true", "on", "yes", "y")


def triton_version() -> str | None:
    """Triton's version, or None where it cannot be imported."""
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)


def find_device(name: str | None) -> torch.device:
    """The device of a name.

    Args:
        name: "cpu", "cuda" or "cuda:N"; if None, the first GPU, or the CPU where there is none.

    Raises:
        ValueError: another name, or a GPU that PyTorch does not see.
    """
    kind, _, index = (name or ("cuda" if torch.cuda.is_available() else "cpu")).partition(":")
    if kind not in ("cpu", "cuda") or (index and not (kind == "cuda" and index.isdecimal())):
        raise ValueError(f"device: {name!r} is none of cpu, cuda, cuda:N")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device: {name} given, PyTorch sees {torch.cuda.device_count()} GPUs")
    return torch.device(kind, int(index)) if index else torch.device(kind)


def environment() -> dict[str, Any]:
    """Versions and devices, as plain values.

    Returns:
        `latentkv`, `revision`, `python`, `platform`, `torch`, `triton`, `cuda`, `hip`, `driver`, `interpreter`,
        `packages` (name to version) and `devices` (one record a GPU: index, name, target, memory in bytes, L2 in bytes,
        multiprocessors). What cannot be told is None.
    """
    return {
        "latentkv": latentkv.__version__,
        "revision": revision(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": str(torch.__version__),
        "triton": triton_version(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "driver": _driver(),
        "interpreter": interpreter_is_on(),
        "packages": {name: _version(name) for name in ("numpy", "safetensors", "typer", "rich", "matplotlib")},
        "devices": [_device(index) for index in range(torch.cuda.device_count())],
    }


def report() -> dict[str, Any]:
    """`environment()` and, under `ops`, the path that each op takes on the CPU and on a GPU."""
    found = environment()
    return {**found, "ops": [_op_paths(op, found) for op in sorted(OPS.values(), key=lambda op: (op.stage, op.name))]}


def revision(root: Path | None = None) -> str | None:
    """The git revision of a clone, with `+` if tracked files were changed; None where there is no clone.

    Args:
        root: the clone's folder; the one that this package runs from by default.
    """
    root = root or Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    commit = _output("git", "-C", str(root), "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return None
    changed = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return commit + ("+" if changed else "")


def _op_paths(op: OpRecord, found: dict[str, Any]) -> dict[str, str]:
    if op.kernel is None:
        gpu = REFERENCE
    elif found["triton"] is None:
        gpu = NO_TRITON
    else:
        gpu = INTERPRETED if found["interpreter"] else KERNEL
    return {"op": op.name, "stage": op.stage, "cpu": REFERENCE, "gpu": gpu}


def _device(index: int) -> dict[str, Any]:
    facts = torch.cuda.get_device_properties(index)
    architecture = getattr(facts, "gcnArchName", "").split(":")[0] if torch.version.hip else ""
    return {
        "index": index,
        "name": facts.name,
        "target": architecture or f"sm{facts.major}{facts.minor}",
        "memory": facts.total_memory,
        "l2": getattr(facts, "L2_cache_size", None),
        "multiprocessors": facts.multi_processor_count,
    }


@lru_cache(maxsize=1)
def _driver() -> str | None:
    if torch.version.hip:
        version = Path("/sys/module/amdgpu/version")
        return version.read_text().strip() if version.is_file() else None
    if not torch.cuda.is_available():
        return None
    versions = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return versions.splitlines()[0] if versions else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """What a command prints, stripped; None where it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
