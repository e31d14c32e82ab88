"""A small random model whose selection is at work from a context of about 40 tokens on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from latentkv.model.config import ModelConfig
from latentkv.model.weights import Weights, init_weights, weight_dtype


@pytest.fixture(scope="session")
def config() -> ModelConfig:
    return ModelConfig(
        hidden=64,
        heads=2,
        q_rank=32,
        o_rank=16,
        index_topk=16,
        candidate_blocks=6,
        experts=4,
        expert_width=16,
        max_positions=1024,
    )


def make_weights(config: ModelConfig, seed: int) -> Weights:
    """Weights in their stored dtypes, with biases and sinks away from zero."""
    torch.manual_seed(seed)
    weights = init_weights(config, seed=seed)
    for name, value in weights.items():
        if name.endswith(("sink", "router_bias")):
            weights[name] = torch.randn_like(value)
        elif "norm" in name.rsplit(".", 1)[-1]:
            weights[name] = 1 + 0.2 * torch.randn_like(value)
    return {n: w.to(weight_dtype(n)) for n, w in weights.items()}


@pytest.fixture(scope="session")
def random_weights() -> Callable[[ModelConfig, int], Weights]:
    return make_weights


@pytest.fixture(scope="session")
def weights(config: ModelConfig) -> Weights:
    return make_weights(config, 7)


@pytest.fixture(scope="session")
def tokens() -> torch.Tensor:
    return torch.randint(0, 256, (600,), generator=torch.Generator().manual_seed(5))
