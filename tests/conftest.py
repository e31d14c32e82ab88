"""One suite, every path: the reference on the CPU, kernels in Triton's interpreter, and kernels on a GPU.

A test that takes `backend` runs once a path that its stage (its folder's name) has. It builds its tensors on
`backend.device`, calls the public ops, and compares with `latentkv.reference.<stage>` on CPU copies.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:  # must be set before Triton is imported anywhere
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.set_num_threads(1)  # pytest-xdist uses the cores

from hypothesis import HealthCheck, settings  # noqa: E402

from latentkv.ops._library import OPS  # noqa: E402

settings.register_profile(
    "latentkv",
    deadline=None,
    derandomize=True,
    max_examples=int(os.environ.get("LATENTKV_TEST_EXAMPLES", "25")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("latentkv")


def _run_kernels_untraced() -> None:
    """Coverage leaves kernels' bodies out, but its tracer would see every line of them and halve the suite's speed."""
    from triton.runtime.interpreter import GridExecutor

    run = GridExecutor.__call__

    @functools.wraps(run)
    def untraced(self: Any, *args: Any, **kwargs: Any) -> Any:
        tracer = sys.gettrace()
        sys.settrace(None)
        try:
            return run(self, *args, **kwargs)
        finally:
            sys.settrace(tracer)

    GridExecutor.__call__ = untraced


if os.environ.get("TRITON_INTERPRET") == "1":
    _run_kernels_untraced()


@dataclass(frozen=True)
class Backend:
    """A path under test: "reference", "interpreter" or "gpu"."""

    name: str

    @property
    def device(self) -> torch.device:
        """Where tensors of this path live."""
        return torch.device("cuda" if self.name == "gpu" else "cpu")

    @property
    def is_kernel(self) -> bool:
        """Whether Triton code runs."""
        return self.name != "reference"


def _paths_of(stage: str) -> list[str]:
    kernels = any(op.stage == stage and op.kernel for op in OPS.values())
    return ["reference", "gpu" if HAS_GPU else "interpreter"] if kernels else ["reference"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        stage = Path(str(metafunc.definition.path)).parent.name
        metafunc.parametrize("backend", _paths_of(stage), indirect=True, scope="module")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="module")
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    path = Backend(request.param)
    if path.name != "interpreter":
        yield path
        return
    library = torch.library.Library("latentkv", "IMPL")  # send CPU tensors to the interpreted kernels
    for op in OPS.values():
        if op.kernel:
            kernel = getattr(importlib.import_module(f"latentkv.kernels.{op.stage}"), op.kernel)
            library.impl(op.name, kernel, "CPU", allow_override=True)
    yield path
    library._destroy()
