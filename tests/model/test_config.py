"""Roles of layers and rotation tables."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from latentkv.model.config import Mode, ModelConfig, rope_table


def flash() -> ModelConfig:
    """The layer plan of V4.1-Flash's 40 backbone layers."""
    return ModelConfig(
        ratios=(0, 0) + (2,) * 18 + (1,) * 20,
        kv_source_layers=(2, 8, 14, 20),
        index_source_layers=(2, 8, 14, 20, 24, 28, 32, 36),
        candidate_source_layer=20,
        yarn_factor=16.0,
        yarn_original=65536,
        max_positions=64,
    )


def test_roles_of_v41_flash_are_4_full_4_reindex_30_reuse_2_window():
    roles = flash().roles()
    counts = {mode: [r.mode for r in roles].count(mode) for mode in Mode}
    assert counts == {Mode.FULL: 4, Mode.REINDEX: 4, Mode.REUSE: 30, Mode.WINDOW: 2}
    assert [i for i, r in enumerate(roles) if r.publishes_candidates] == [20]


def test_reuse_layers_take_the_latest_source():
    roles = flash().roles()
    assert [(roles[i].kv_source, roles[i].index_source) for i in (3, 7, 9, 19)] == [(2, 2), (2, 2), (8, 8), (14, 14)]
    assert [(roles[i].kv_source, roles[i].index_source) for i in (21, 24, 27, 36, 39)] == [
        (20, 20),
        (20, 24),
        (20, 24),
        (20, 36),
        (20, 36),
    ]


def test_packaged_shape_has_every_role():
    assert [r.mode.value for r in ModelConfig().roles()] == [
        "window",
        "full",
        "reuse",
        "full",
        "reuse",
        "reindex",
        "reuse",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ratios": (0, 2, 4)}, "ratio other than"),
        ({"ratios": (2, 2), "kv_source_layers": (1,), "index_source_layers": (1,)}, "no source of rows"),
        ({"ratios": (0, 2, 1), "kv_source_layers": (1,), "index_source_layers": (1,)}, "no source of rows"),
        ({"index_source_layers": (1, 5)}, "no index source"),
        ({"index_source_layers": (1, 2, 3, 5)}, "no candidates"),
        ({"candidate_source_layer": 4, "index_source_layers": (1, 3)}, "makes no rows"),
        ({"o_groups": 3}, "does not divide"),
        ({"index_heads": 24}, "multiple of 16"),
        ({"experts_per_token": 9}, "is not in 1..8"),
    ],
)
def test_impossible_plan_is_refused(change: dict, message: str):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(ModelConfig(), **change)


def test_config_survives_plain_values():
    assert ModelConfig.from_dict(flash().to_dict()) == flash()
    with pytest.raises(ValueError, match="missing or unknown"):
        ModelConfig.from_dict({**flash().to_dict(), "extra": 1})


def test_window_layers_use_the_plain_table():
    table = rope_table(flash(), 0, 4)
    angle = 3 / 10000 ** (2 / 64)
    assert table[3, 2:4].tolist() == pytest.approx([math.cos(angle), math.sin(angle)], abs=1e-6)


def test_yarn_keeps_fast_pairs_and_slows_slow_ones_by_its_factor():
    # of V4.1's 32 pairs, those up to 15 keep their angle and those from 25 on turn 16 times slower
    config = flash()
    plain = dataclasses.replace(config, yarn_factor=1.0)
    slow, fast = rope_table(config, 1, 2)[1], rope_table(plain, 1, 2)[1]
    ratio = torch.atan2(fast[1::2].double(), fast[0::2].double()) / torch.atan2(
        slow[1::2].double(), slow[0::2].double()
    )
    assert torch.allclose(ratio[:16], torch.ones(16, dtype=torch.float64), atol=1e-5)
    assert torch.allclose(ratio[25:], torch.full((7,), 16.0, dtype=torch.float64), rtol=1e-3)
    assert bool(((ratio[16:25] > 1.01) & (ratio[16:25] < 15.99)).all())
