"""Rows for the index quantizers: largest values of every kind over every value below, and values around ties."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

# the exponent steps above 1.5, and the first stage's largest code below 1.75
MANTISSAS = (0, 1, 63, 64, 65, 95, 96, 97, 127)
IDENTITY = torch.tensor([1.0, 0.0]).repeat(32).unsqueeze(0)  # a table whose rotation changes nothing


def value_sweep(exponents: range = range(255), *, binades: int = 7, step: int = 1) -> Tensor:
    """bf16 rows `[n, 128]` whose groups hold a largest value and magnitudes of the binades below it, both signs.

    Args:
        exponents: biased exponents of the largest values; 0 is the subnormal ones.
        binades: below each largest value; smaller magnitudes are coded as zero anyway.
        step: every how many of the magnitudes.
    """
    groups = []
    for exponent in exponents:
        for mantissa in MANTISSAS:
            top = exponent << 7 | mantissa
            below = np.arange(max(0, top - 128 * binades), top + 1, step)
            both = np.concatenate((below, below | 0x8000))
            both = np.pad(both, (0, -len(both) % 31)).reshape(-1, 31)
            groups.append(np.concatenate((np.full((len(both), 1), top), both), 1))
    bits = np.concatenate(groups)
    bits = np.pad(bits, ((0, -len(bits) % 4), (0, 0))).reshape(-1, 128)
    return torch.from_numpy(bits.astype(np.uint16).view(np.int16)).view(torch.bfloat16)


def near_ties(exponents: range) -> Tensor:
    """fp32 rows `[n, 128]` with values at, just below and just above every middle of two codes, for scales 2^e."""
    middles = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6], np.float32)
    around = np.concatenate((np.nextafter(middles, np.float32(0)), middles, np.nextafter(middles[:-1], np.float32(9))))
    group = np.pad(np.concatenate((around, around[:8] * -1)), (0, 1))[:32]
    assert group.max() == 6
    assert len(group) == 32
    rows = np.stack([group * np.float32(2.0**e) for e in exponents])
    rows = np.concatenate((rows, -rows))
    return torch.from_numpy(np.pad(rows, ((0, -len(rows) % 4), (0, 0))).reshape(-1, 128))
