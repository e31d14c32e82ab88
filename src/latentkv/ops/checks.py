"""Argument checks shared by the ops: each says what was given and what is accepted, before any byte changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from latentkv.layout import LATENT_DIM, ROPE_DIM, KVLayout

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
INTS = (torch.int32, torch.int64)

_checked: ContextVar[bool] = ContextVar("latentkv_checked", default=False)


@contextmanager
def checked(enabled: bool = True) -> Iterator[None]:
    """Have ops also check the *values* of slots and positions, and raise instead of skipping.

    Outside this context a slot past the cache writes nothing and reads zeros, and a position past the table reads row
    0, because looking at values would synchronize the device. Inside, both raise `ValueError` before any byte changes.
    -1 stays legal as the slot of a skipped row. Not usable while a graph is captured or traced.

    Args:
        enabled: False switches an outer context off.
    """
    token = _checked.set(enabled)
    try:
        yield
    finally:
        _checked.reset(token)


def is_checked() -> bool:
    """Whether values are checked in this context."""
    return not torch.compiler.is_compiling() and _checked.get()


def tensor(
    name: str,
    x: object,
    shape: tuple[int | str | None, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device | None = None,
    *,
    contiguous: bool = False,
    inner: bool = True,
) -> Tensor:
    """Check one tensor argument and return it.

    Args:
        name: the argument's name, for the message.
        x: what was given.
        shape: a number where the size is fixed, a word where it is free.
        dtypes: what is accepted.
        device: the device that the call runs on.
        contiguous: whether every stride is fixed.
        inner: whether the last dimension must have stride 1.

    Raises:
        TypeError: not a tensor, or another dtype.
        ValueError: another shape, stride or device.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: {type(x).__name__} given, a tensor is needed")
    if x.dtype not in dtypes:
        raise TypeError(f"{name}: dtype {_short(x.dtype)} given, {' or '.join(_short(d) for d in dtypes)} accepted")
    fits = x.dim() == len(shape) and all(not isinstance(w, int) or s == w for s, w in zip(x.shape, shape, strict=False))
    if not fits:
        want = ", ".join("any" if w is None else str(w) for w in shape)
        raise ValueError(f"{name}: shape {list(x.shape)} given, [{want}] needed")
    if device is not None and x.device != device:
        raise ValueError(f"{name}: on {x.device}, the other arguments are on {device}")
    if contiguous and not x.is_contiguous():
        raise ValueError(f"{name}: strides {x.stride()} given, a contiguous tensor is needed")
    if inner and x.dim() and x.shape[-1] > 1 and x.numel() and x.stride(-1) != 1:
        raise ValueError(f"{name}: last stride {x.stride(-1)} given, 1 needed")
    return x


def kv_cache(cache: object, layout: KVLayout | str, page_size: int, *, name: str = "cache") -> tuple[Tensor, KVLayout]:
    """Check a key-value cache against its layout; returns the cache and the parsed layout."""
    layout = KVLayout.parse(layout)
    if not isinstance(page_size, int) or page_size < 1 or page_size & (page_size - 1):
        raise ValueError(f"page_size: {page_size!r} given, a power of two needed")
    cache = tensor(name, cache, ("num_pages", "page_stride"), (torch.uint8,))
    need = layout.page_bytes(page_size)
    if cache.shape[1] < need or (cache.shape[0] > 1 and cache.stride(0) < need):
        raise ValueError(
            f"{name}: pages of {cache.shape[1]} bytes at a stride of {cache.stride(0)} given, "
            f"a page of {page_size} {layout} rows takes {need}"
        )
    return cache, layout


def slots(
    x: object,
    count: int | str,
    device: torch.device,
    capacity: int,
    page_size: int,
    *,
    name: str = "slots",
) -> Tensor:
    """Check slots `[count]`; in checked mode every one must be -1 or inside the cache."""
    x = tensor(name, x, (count,), INTS, device, inner=False)
    if is_checked() and x.numel():
        low, high = int(x.min()), int(x.max())
        if high >= capacity:
            pages = capacity // page_size
            raise ValueError(f"{name}: {high} is past the cache's {capacity - 1} ({pages} pages of {page_size})")
        if low < -1:
            raise ValueError(f"{name}: {low} is negative; only -1 marks a row without a slot")
    return x


def positions(x: object, count: int | str, device: torch.device, table: Tensor, *, name: str = "positions") -> Tensor:
    """Check positions `[count]`; in checked mode every one must be inside the table."""
    x = tensor(name, x, (count,), INTS, device, inner=False)
    if is_checked() and x.numel():
        low, high = int(x.min()), int(x.max())
        if low < 0 or high >= table.shape[0]:
            bad = low if low < 0 else high
            raise ValueError(f"{name}: {bad} is outside the rotation table's 0..{table.shape[0] - 1}")
    return x


def freqs(x: object, device: torch.device, *, rows: int | None = None, width: int = ROPE_DIM) -> Tensor:
    """Check a rotation table and return its fp32 `[rows, width]` view; complex64 `[rows, width / 2]` is accepted."""
    if isinstance(x, Tensor) and x.dtype == torch.complex64:
        x = torch.view_as_real(tensor("freqs", x, ("positions", width // 2), (torch.complex64,), device)).flatten(1)
    x = tensor("freqs", x, ("positions", width), (torch.float32,), device)
    if rows is not None and x.shape[0] != rows:
        raise ValueError(f"freqs: {x.shape[0]} rows given, one for each of {rows} rows needed")
    if rows is None and x.shape[0] == 0:
        raise ValueError("freqs: the table is empty, at least one position needed")
    return x


def latent_rows(
    name: str, x: object, dtypes: tuple[torch.dtype, ...] = FLOATS, device: torch.device | None = None
) -> Tensor:
    """Check latent rows `[n, 512]`, last stride 1, any row stride."""
    return tensor(name, x, ("n", LATENT_DIM), dtypes, device)


def output(name: str, x: object, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Check a preallocated output."""
    return tensor(name, x, shape, (dtype,), device)


def eps_value(eps: float) -> float:
    """Check a norm's epsilon."""
    if not 0.0 <= float(eps) < float("inf"):
        raise ValueError(f"eps: {eps} given, a finite number >= 0 needed")
    return float(eps)


def same_device(device: torch.device, **others: Tensor) -> None:
    """Check that further tensors are on the call's device."""
    for name, x in others.items():
        if x.device != device:
            raise ValueError(f"{name}: on {x.device}, the other arguments are on {device}")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
