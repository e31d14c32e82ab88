"""Argument checks shared by the ops: each says what was given and what is accepted, before any byte changes."""

from __future__ import annotations

import math
import operator
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
    """Have ops also check *values* that they would otherwise skip or clamp, and raise instead.

    Outside this context a slot past the cache writes nothing and reads zeros, a position past the table reads row 0, a
    pair whose request has no state is skipped, and a page outside the cache reads as zero keys, because looking at
    values would synchronize the device. Inside, all four raise `ValueError` before any byte changes. -1 stays legal as
    the slot of a skipped row. What else indexes is taken as it is: page tables that selections translate, lengths, and
    the chunks of a prefill. Not usable while a graph is captured or traced.

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


def integer(name: str, x: object, least: int, most: int | None = None) -> int:
    """Check an integer argument of any integer type and return it as an `int`.

    Raises:
        TypeError: not an integer; a bool and a tensor, whose value would have to come from its device, are none.
        ValueError: outside the range.
    """
    if not isinstance(x, int) or isinstance(x, bool):
        if isinstance(x, bool | Tensor) or not hasattr(x, "__index__"):
            raise TypeError(f"{name}: {type(x).__name__} given, an integer needed")
        try:
            x = operator.index(x)
        except TypeError:  # an array of several numbers, or of one that is no integer
            raise TypeError(f"{name}: {type(x).__name__} given, an integer needed") from None
    if x < least or (most is not None and x > most):
        wanted = f"at least {least} needed" if most is None else f"{least} to {most} accepted"
        raise ValueError(f"{name}: {x} given, {wanted}")
    return x


def power_of_two(name: str, x: object, least: int = 1, most: int | None = None) -> int:
    """Check an argument that must be a power of two."""
    x = integer(name, x, -(2**63))
    if x < least or x & (x - 1):
        raise ValueError(f"{name}: {x} given, a power of two{f' of at least {least}' if least > 1 else ''} needed")
    if most is not None and x > most:
        raise ValueError(f"{name}: {x} given, a power of two up to {most} accepted")
    return x


def number(name: str, x: object) -> float:
    """Check a number and return it as a `float`."""
    if isinstance(x, str | Tensor) or not (hasattr(x, "__float__") or hasattr(x, "__index__")):
        raise TypeError(f"{name}: {type(x).__name__} given, a number needed")
    try:
        return float(x)  # type: ignore[arg-type]
    except TypeError:  # an array of several numbers
        raise TypeError(f"{name}: {type(x).__name__} given, a number needed") from None
    except OverflowError:
        raise ValueError(f"{name}: {x!s:.20} given, more than a float holds") from None


def flag(name: str, x: object) -> bool:
    """Check a yes or no."""
    if not isinstance(x, bool):
        raise TypeError(f"{name}: {type(x).__name__} given, True or False needed")
    return x


def fp32(name: str, x: object) -> float:
    """Check a number that is finite in fp32 and return it rounded to that."""
    # on the CPU whatever the default device is: nothing waits for a GPU
    value = torch.tensor(number(name, x), dtype=torch.float32, device="cpu").item()
    if not math.isfinite(value):
        raise ValueError(f"{name}: {x} given, a finite number needed")
    return value


def kv_cache(cache: object, layout: KVLayout | str, page_size: int, *, name: str = "cache") -> tuple[Tensor, KVLayout]:
    """Check a key-value cache against its layout; returns the cache and the parsed layout."""
    layout = KVLayout.parse(layout)
    page_size = power_of_two("page_size", page_size)
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


def positions(x: object, count: int | str, device: torch.device, table: Tensor, *, ratio: int = 1) -> Tensor:
    """Check positions `[count]`; in checked mode the first of every one's `ratio` must be inside the table."""
    x = tensor("positions", x, (count,), INTS, device, inner=False)
    if is_checked() and x.numel():
        low, high = int(x.min()), int(x.max())
        if low < 0 or high & -ratio >= table.shape[0]:
            bad = low if low < 0 else high
            raise ValueError(f"positions: {bad} is outside the rotation table's 0..{table.shape[0] - 1}")
    return x


def freqs(x: object, device: torch.device, *, rows: int | None = None, width: int = ROPE_DIM) -> Tensor:
    """Check a rotation table and return its fp32 `[rows, width]` view; complex64 `[rows, width / 2]` is accepted."""
    if isinstance(x, Tensor) and x.dtype == torch.complex64:
        x = tensor("freqs", x, ("positions", width // 2), (torch.complex64,), device)
        x = torch.view_as_real(x.resolve_conj()).flatten(1)
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


def output(name: str, x: object, shape: tuple[int | str, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Check a tensor that is written in place: no two of its elements may share memory."""
    x = tensor(name, x, shape, (dtype,), device)
    extent = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride < extent:
                raise ValueError(f"{name}: strides {x.stride()} of shape {list(x.shape)} given, elements overlap")
            extent += stride * (size - 1)
    return x


def apart(name: str, written: Tensor, **read: Tensor | None) -> None:
    """Check that a written tensor shares no memory with others; columns of one buffer's rows share none."""

    def extent(shape: torch.Size, strides: tuple[int, ...]) -> int:
        return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))

    if torch.compiler.is_compiling():  # storages are not known while tracing
        return
    for other_name, other in read.items():
        if other is None or written.untyped_storage()._cdata != other.untyped_storage()._cdata:
            continue
        if not (written.numel() and other.numel()):
            continue
        spans = []
        for x in (written, other):
            size, first = x.element_size(), x.storage_offset() * x.element_size()
            row, step = size * extent(x.shape[1:], x.stride()[1:]), size * x.stride(0)
            spans.append((first, first + size * extent(x.shape, x.stride()), row, step))
        (a, a_end, a_row, step), (b, b_end, b_row, other_step) = spans
        if a_end <= b or b_end <= a:
            continue
        ahead = (b - a) % step if 0 < step == other_step else 0
        if not (a_row <= ahead and ahead + b_row <= step):
            raise ValueError(f"{name}: overlaps {other_name}, one of the two is written")


def requests(x: object, raw_slots: Tensor, state_rows: int, ring: int) -> Tensor:
    """Check requests `[count]`; in checked mode every row that is not padded must have a request with state rows."""
    x = tensor("requests", x, (raw_slots.shape[0],), INTS, raw_slots.device, inner=False)
    if is_checked():
        foreign = x[(raw_slots > 0) & ((x < 0) | (x >= state_rows // ring))]
        if foreign.numel():
            raise ValueError(f"requests: {int(foreign[0])} has no rows in a state of {state_rows} (ring {ring})")
    return x


def eps_value(eps: float) -> float:
    """Check a norm's epsilon."""
    value = fp32("eps", eps)
    if value < 0.0:
        raise ValueError(f"eps: {eps} given, a finite number >= 0 needed")
    return value


def same_device(device: torch.device, **others: Tensor) -> None:
    """Check that further tensors are on the call's device."""
    for name, x in others.items():
        if x.device != device:
            raise ValueError(f"{name}: on {x.device}, the other arguments are on {device}")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
