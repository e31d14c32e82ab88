"""An oracle of the index stage that shares no code with the library: NumPy, ml_dtypes and reshapes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

import latentkv as lk

F32 = np.float32


class IndexOracle:
    """Number formats of the index path (spec sections 1.1 to 1.4) and the layouts as permutations (section 2)."""

    @staticmethod
    def bf16(x: np.ndarray) -> np.ndarray:
        return x.astype(ml_dtypes.bfloat16).astype(F32)

    @staticmethod
    def ceil_exponent(x: np.ndarray) -> np.ndarray:
        mantissa, exponent = np.frexp(x)  # in [0.5, 1)
        return exponent - (mantissa == 0.5)

    @classmethod
    def norm(cls, x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        mean = (x * x).sum(-1, dtype=F32, keepdims=True) * F32(1 / 128) + F32(eps)
        return cls.bf16(weight * (x * (1.0 / np.sqrt(mean.astype(np.float64))).astype(F32)))

    @classmethod
    def rope(cls, x: np.ndarray, angles: np.ndarray) -> np.ndarray:
        out = x.copy()
        re, im, c, s = x[..., 64::2], x[..., 65::2], angles[..., 0::2], angles[..., 1::2]
        out[..., 64::2], out[..., 65::2] = cls.bf16(re * c - im * s), cls.bf16(re * s + im * c)
        return out

    @classmethod
    def stage1(cls, x: np.ndarray) -> np.ndarray:
        x = x.reshape(*x.shape[:-1], -1, 32)
        amax = np.maximum(np.abs(x).max(-1, keepdims=True), F32(6 * 2.0**-126)) * F32(1 / 6)
        scale = np.exp2(cls.ceil_exponent(amax).astype(np.float64))
        grid = (np.abs(x) / scale).astype(F32).astype(ml_dtypes.float4_e2m1fn).astype(np.float64)
        return (np.where(x < 0, -grid, grid) * scale).astype(F32).reshape(*x.shape[:-2], -1)

    @classmethod
    def stage2(cls, x: np.ndarray, half_even: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """Codes 0..15 `[..., 128]` and exponents `[..., 4]`."""
        groups = x.reshape(*x.shape[:-1], -1, 32)
        amax = np.maximum(np.abs(groups).max(-1, keepdims=True) / F32(6), F32(1e-4))
        exponent = np.clip(cls.ceil_exponent(amax) + 127, 1, 254)
        scaled = (groups / np.exp2(exponent.astype(np.float64) - 127)).astype(F32)
        if half_even:
            magnitude = np.abs(scaled).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
        else:
            magnitude = (np.abs(scaled)[..., None] > np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], F32)).sum(-1)
        codes = magnitude.astype(np.uint8) | (((groups < 0) & (magnitude > 0)).astype(np.uint8) << 3)
        return codes.reshape(x.shape), exponent[..., 0].astype(np.uint8)

    @classmethod
    def bytes_of(cls, x: np.ndarray, half_even: bool = True) -> tuple[Tensor, Tensor]:
        """Payload int8 `[..., 64]` and scale words int32 `[...]` of finished values."""
        codes, exponents = cls.stage2(x, half_even)
        payload = (codes[..., 0::2] | (codes[..., 1::2] << 4)).view(np.int8)
        words = np.ascontiguousarray(exponents).view("<i4")[..., 0]
        return torch.from_numpy(payload.copy()), torch.from_numpy(words.copy())

    @staticmethod
    def pages_of(layout: str, page_size: int, payload: Tensor, words: Tensor) -> tuple[Tensor, Tensor | None]:
        """The tensors of a cache whose slots in order hold these rows; whole pages only."""
        scales = words.contiguous().unsqueeze(-1).view(torch.uint8)
        payload = payload.view(torch.uint8)
        pages = payload.shape[0] // page_size
        if layout == "fused":
            return torch.cat((payload.reshape(pages, -1), scales.reshape(pages, -1)), 1), None
        if layout == "split64":
            rows = payload.reshape(pages, 1, 64, 4, 16).transpose(2, 3)
            return rows.contiguous(), scales.reshape(pages, 1, 4, 16, 4).permute(0, 1, 4, 3, 2).reshape(pages, 1, 4, 64)
        rows = payload.reshape(-1, 2, 4, 4, 16).permute(0, 2, 3, 1, 4).reshape(pages, 1, 4, 64, 16)
        return rows, scales.reshape(-1, 8, 4).transpose(1, 2).reshape(pages, 1, 4, 64)

    @staticmethod
    def flydsl_scale(words: Tensor) -> Tensor:
        """uint8 `[T, 1, 4, 16, 4]` of scale words `[T, H]`."""
        tokens, heads = words.shape
        scales = torch.zeros(tokens, 64, 4, dtype=torch.uint8)
        scales[:, :heads] = words.contiguous().unsqueeze(-1).view(torch.uint8)
        return scales.reshape(tokens, 1, 4, 16, 4).permute(0, 1, 4, 3, 2).contiguous()


@pytest.fixture(scope="session")
def oracle() -> type[IndexOracle]:
    return IndexOracle


@pytest.fixture(params=[("fused", 64), ("fused", 128), ("split64", 64), ("split8", 64)], ids=lambda p: f"{p[0]}-{p[1]}")
def form(request: pytest.FixtureRequest) -> tuple[str, int]:
    """A key layout and its page size."""
    return request.param


@pytest.fixture(scope="session")
def angles() -> Tensor:
    """A rotation table fp32 `[512, 64]`."""
    angle = torch.outer(torch.arange(512.0), 160000.0 ** -(torch.arange(0, 64, 2) / 64))
    return torch.stack((angle.cos(), angle.sin()), -1).flatten(1)


@pytest.fixture(scope="session")
def summable():
    """Makes bf16 rows whose squares sum exactly in any order, so that every device norms them alike."""

    def make(rows: int, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return (torch.randint(-255, 256, (rows, 128), generator=generator) / 64).bfloat16()

    return make


@pytest.fixture
def slab():
    """Makes a cache whose pages lie apart in a larger buffer filled with 0xA5, and a check of the bytes between."""

    def make(layout: str, pages: int, page_size: int, device: torch.device, gap: int = 48):
        def apart(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
            size = int(np.prod(shape))
            buffer = torch.full((pages * (size + gap) + gap,), 0xA5, dtype=torch.uint8, device=device)
            view = buffer[gap:].unflatten(0, (pages, size + gap))[:, :size]
            view.zero_()
            return buffer, view.unflatten(1, shape) if len(shape) > 1 else view

        if layout == "fused":
            buffer, payload = apart((page_size * 68,))
            cache = lk.IndexKeyCache(payload, None, lk.IndexKeyLayout(layout), page_size)
            buffers = [(buffer, page_size * 68)]
        else:
            first, payload = apart((1, 4, 64, 16))
            second, scale = apart((1, 4, 64))
            cache = lk.IndexKeyCache(payload, scale, lk.IndexKeyLayout(layout), page_size)
            buffers = [(first, 4096), (second, 256)]

        def between_is_untouched() -> bool:
            outside = [b[gap:].unflatten(0, (pages, size + gap))[:, size:] for b, size in buffers]
            outside += [b[:gap] for b, _ in buffers]
            return all(bool((x == 0xA5).all()) for x in outside)

        return cache, between_is_untouched

    return make
