"""What every launch shares: layout numbers as constexprs, the device guard, and what `latentkv targets` compiles."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from latentkv.layout import KVLayout

PORTABLE, BF16_CAST, E4M3_CAST = 0, 1, 2  # values of CAST, as in device.py


@dataclass(frozen=True)
class TargetCase:
    """One kernel variant that is compiled offline for every target.

    Args:
        kernel: a `@triton.jit` function.
        label: what the variant is, for the table.
        signature: Triton types of the runtime arguments, such as `{"rows": "*bf16", "count": "i32"}`.
        constexprs: values of the constexpr arguments.
        num_warps: warps a program.
        aligned: names of runtime arguments known to be divisible by 16.
        options: further compile options.
        targets: names of the targets that launch this variant; empty if all do.
        spills_allowed: spilled registers that are known, and why they may stand is said where they are set.
    """

    kernel: Any
    label: str
    signature: dict[str, str]
    constexprs: dict[str, Any]
    num_warps: int = 4
    aligned: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=lambda: {"enable_fp_fusion": False})
    targets: tuple[str, ...] = ()
    spills_allowed: int = 0


# what `common_options` passes on each target, for the cases that are compiled offline
DEVICE_VARIANTS: tuple[dict[str, Any], ...] = (
    {"targets": ("gfx950", "gfx942"), "wave": 64, "constexprs": {"CAST": PORTABLE, "OVERLAP": False}},
    {"targets": ("gfx1201",), "constexprs": {"CAST": PORTABLE, "OVERLAP": False}},
    {"targets": ("sm80",), "constexprs": {"CAST": BF16_CAST, "OVERLAP": False}},
    {"targets": ("sm90",), "constexprs": {"CAST": E4M3_CAST, "OVERLAP": True}},
    {"targets": ("sm100", "sm120"), "constexprs": {"CAST": BF16_CAST, "OVERLAP": True}},
)


def layout_constants(layout: KVLayout, page_size: int) -> dict[str, Any]:
    """The constexprs by which a kernel addresses rows of a layout.

    A row's data starts at byte `offset * DATA_STEP` of its page and its scales at `SCALE_BASE + offset * SCALE_STEP`.
    """
    return {
        "ENCODING": layout.split.name,
        "PAGE_SHIFT": page_size.bit_length() - 1,
        "DATA_STEP": layout.data_in_page(1, page_size),
        "SCALE_BASE": layout.scale_in_page(0, page_size),
        "SCALE_STEP": layout.scale_in_page(1, page_size) - layout.scale_in_page(0, page_size),
    }


def words(x: Tensor) -> bool:
    """Whether pairs of a tensor's values are aligned words: an even address and row strides that are even in values."""
    size = 2 * x.element_size()
    return x.data_ptr() % size == 0 and all(stride % 2 == 0 for stride in x.stride()[:-1])


def page_words(cache: Tensor) -> bool:
    """Whether every page starts at a multiple of four bytes, so that encoded pairs are aligned words."""
    return cache.data_ptr() % 4 == 0 and cache.stride(0) % 4 == 0


def pair_stride(stride: int, in_words: bool) -> int:
    """A stride given in values, in the unit of `pair_pointer`."""
    return stride // 2 if in_words else stride


@lru_cache(maxsize=64)
def common_options(device: torch.device) -> dict[str, Any]:
    """Constexprs and options that depend on the device alone; bits never depend on them.

    `CAST` names conversions proven equal to the integer encoders there. `OVERLAP` lets a kernel's launch run beside the
    kernel before it (programmatic dependent launch, sm_90 and later); each kernel waits before it reads anything.
    """
    options: dict[str, Any] = {"CAST": PORTABLE, "OVERLAP": False, "enable_fp_fusion": False}
    if device.type == "cuda" and torch.version.hip is None:
        options["CAST"] = E4M3_CAST if is_hopper(device) else BF16_CAST
        if torch.cuda.get_device_capability(device) >= (9, 0):
            options.update(OVERLAP=True, launch_pdl=True)
    return options


@lru_cache(maxsize=64)
def wave_size(device: torch.device) -> int:
    """Lanes that run together; only launch choices may ask."""
    return torch.cuda.get_device_properties(device).warp_size if device.type == "cuda" else 32


@lru_cache(maxsize=64)
def is_rdna(device: torch.device) -> bool:
    """Whether the device is an AMD GPU with 32 lanes a wave; only launch choices may ask."""
    return torch.version.hip is not None and wave_size(device) == 32


@lru_cache(maxsize=64)
def is_hopper(device: torch.device) -> bool:
    """Whether the device is sm_90; only launch choices may ask."""
    cuda = device.type == "cuda" and torch.version.hip is None
    return cuda and torch.cuda.get_device_capability(device) == (9, 0)


def narrow(dtype: torch.dtype) -> int:
    """Significant bits of a dtype whose values the short encoders take exactly; 0 for fp32."""
    return {torch.bfloat16: 8, torch.float16: 11}.get(dtype, 0)


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Launch on the tensor's own device (Triton launches on the current one)."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
