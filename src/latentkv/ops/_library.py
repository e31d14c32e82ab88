"""Registration of ops with PyTorch's dispatcher: the reference on the CPU, the Triton kernel on a GPU."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

LIBRARY = torch.library.Library("latentkv", "DEF")


@dataclass(frozen=True)
class OpRecord:
    """What `doctor`, `targets` and the tests ask of an op: its stage and the kernel that serves it on a GPU."""

    name: str
    stage: str
    kernel: str | None  # launch function in `latentkv.kernels.<stage>`; None while the reference serves GPUs too


OPS: dict[str, OpRecord] = {}


def define(
    stage: str,
    schema: str,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    kernel: str | None = None,
) -> None:
    """Define `latentkv::<name>` with its CPU, GPU and fake implementations.

    Args:
        stage: one of the six stage names.
        schema: `name(args) -> returns`, with every mutated argument annotated.
        reference: the CPU path; also the GPU path while `kernel` is None.
        fake: shapes and dtypes of the returns, for tracing.
        kernel: name of the launch function in `latentkv.kernels.<stage>`, imported at its first GPU call so that the
            package imports without Triton.
    """
    name = schema.split("(", 1)[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, _without_gradient(reference), "CPU")
    LIBRARY.impl(name, _lazy(stage, kernel) if kernel else _without_gradient(reference), "CUDA")
    LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")  # results never require a gradient
    torch.library.register_fake(f"latentkv::{name}", fake, lib=LIBRARY)
    OPS[name] = OpRecord(name, stage, kernel)


def _without_gradient(reference: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(reference)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return reference(*args, **kwargs)

    return call


def _lazy(stage: str, kernel: str) -> Callable[..., Any]:
    found: Callable[..., Any] | None = None

    def launch(*args: Any, **kwargs: Any) -> Any:
        nonlocal found
        if found is None:
            found = getattr(importlib.import_module(f"latentkv.kernels.{stage}"), kernel)
        return found(*args, **kwargs)

    return launch
