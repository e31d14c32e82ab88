"""Shape and layer roles of a V4.1 language model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import Enum
from functools import lru_cache
from typing import Any

from torch import Tensor

from latentkv.layout import INDEX_DIM, LATENT_DIM, ROPE_DIM
from latentkv.numerics import yarn_freqs

START_TOKEN = 256  # opens every document
PAD_TOKEN = 257
VOCAB_SIZE = 260  # 256 bytes, start, pad and two spare ids


class Mode(Enum):
    """What a layer does with compressed rows."""

    WINDOW = "window"  # none: the last tokens only
    FULL = "full"  # own compressor, own index keys, own selection
    REUSE = "reuse"  # rows and selection of earlier layers
    REINDEX = "reindex"  # rows and keys of an earlier layer, own selection inside published candidates


@dataclass(frozen=True)
class Role:
    """One layer's place: its mode, pooling ratio, and the layers that it takes rows and selections from."""

    mode: Mode
    ratio: int
    kv_source: int  # -1 in window-only layers
    index_source: int
    publishes_candidates: bool


@dataclass(frozen=True)
class ModelConfig:
    """Dimensions of a V4.1 backbone; the defaults are those of the packaged checkpoint.

    `head_dim` 512, 64 rotated values and `index_dim` 128 are fixed by the cache layouts.
    """

    hidden: int = 256
    heads: int = 4
    q_rank: int = 64
    o_groups: int = 2
    o_rank: int = 48
    window: int = 128
    ratios: tuple[int, ...] = (0, 2, 2, 1, 1, 1, 1)
    kv_source_layers: tuple[int, ...] = (1, 3)
    index_source_layers: tuple[int, ...] = (1, 3, 5)
    candidate_source_layer: int = 3
    candidate_blocks: int = 32
    candidate_block_size: int = 8
    index_heads: int = 16
    index_topk: int = 64
    experts: int = 8
    experts_per_token: int = 2
    expert_width: int = 32
    route_scale: float = 1.5
    swiglu_limit: float = 10.0
    streams: int = 4
    sinkhorn_steps: int = 20
    hc_eps: float = 1e-6
    norm_eps: float = 1e-20
    theta: float = 10000.0
    compress_theta: float = 160000.0
    yarn_factor: float = 1.0
    yarn_original: int = 65536
    max_positions: int = 16384
    vocab: int = VOCAB_SIZE

    def __post_init__(self) -> None:
        for name in ("ratios", "kv_source_layers", "index_source_layers"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if any(r not in (0, 1, 2) for r in self.ratios):
            raise ValueError(f"ratios: {self.ratios} has a ratio other than 0, 1 and 2")
        if self.heads % self.o_groups:
            raise ValueError(f"o_groups: {self.o_groups} does not divide {self.heads} heads")
        if self.index_heads % 16 or not 16 <= self.index_heads <= 128:
            raise ValueError(f"index_heads: {self.index_heads} is not a multiple of 16 up to 128")
        if not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(f"experts_per_token: {self.experts_per_token} is not in 1..{self.experts}")
        self.roles()

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.ratios)

    @property
    def scale(self) -> float:
        """Factor of the attention scores."""
        return LATENT_DIM**-0.5

    @property
    def index_scale(self) -> float:
        """Factor folded into the index head weights."""
        return INDEX_DIM**-0.5 * self.index_heads**-0.5

    def roles(self) -> tuple[Role, ...]:
        """Each layer's role, from the source lists.

        Raises:
            ValueError: a layer lacks a source of its ratio, or candidates are published by a layer that has none.
        """
        return _roles(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """The config of `to_dict`'s values.

        Raises:
            ValueError: a field is missing or unknown.
        """
        known = {f.name for f in fields(cls)}
        if set(values) != known:
            raise ValueError(f"config: fields {sorted(set(values) ^ known)} are missing or unknown")
        return cls(**values)


@lru_cache(maxsize=32)
def _roles(config: ModelConfig) -> tuple[Role, ...]:
    roles: list[Role] = []
    kv_source = index_source = -1
    for layer, ratio in enumerate(config.ratios):
        if ratio == 0:
            roles.append(Role(Mode.WINDOW, 0, -1, -1, False))
            continue
        owns_rows, owns_index = layer in config.kv_source_layers, layer in config.index_source_layers
        kv_source = layer if owns_rows else kv_source
        index_source = layer if owns_index else index_source
        if owns_rows and not owns_index:
            raise ValueError(f"kv_source_layers: layer {layer} makes rows but is no index source")
        if kv_source < 0 or config.ratios[kv_source] != ratio:
            raise ValueError(f"ratios: layer {layer} of ratio {ratio} has no source of rows before it")
        mode = Mode.FULL if owns_rows else Mode.REINDEX if owns_index else Mode.REUSE
        if mode is Mode.REINDEX and kv_source != config.candidate_source_layer:
            raise ValueError(f"index_source_layers: layer {layer} has no candidates to select from")
        roles.append(Role(mode, ratio, kv_source, index_source, layer == config.candidate_source_layer))
    if config.candidate_source_layer not in (-1, *config.kv_source_layers):
        raise ValueError(f"candidate_source_layer: {config.candidate_source_layer} makes no rows")
    return tuple(roles)


def rope_table(config: ModelConfig, ratio: int, max_positions: int | None = None) -> Tensor:
    """The rotation table of a layer: fp32 `[positions, 64]`, (cos, sin) interleaved.

    Window-only layers (ratio 0) use the plain table of `theta`, the others `compress_theta` with YaRN.
    """
    positions = max_positions or config.max_positions
    if ratio == 0:
        return yarn_freqs(positions, theta=config.theta, width=ROPE_DIM)
    return yarn_freqs(
        positions,
        theta=config.compress_theta,
        width=ROPE_DIM,
        factor=config.yarn_factor,
        original_positions=config.yarn_original,
    )
