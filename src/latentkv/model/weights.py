"""Names, shapes and initial values of the weights: one flat dictionary, shared by the paged and the dense forward."""

from __future__ import annotations

import torch
from torch import Tensor

from latentkv.layout import INDEX_DIM, LATENT_DIM
from latentkv.model.config import Mode, ModelConfig

Weights = dict[str, Tensor]

# Scalars and biases whose rounding to bf16 would show; all else is stored as bf16.
_FP32_SUFFIXES = (".sink", ".hc_scale", ".hc_base", ".router_bias")


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight of a model."""
    d, streams = config.hidden, config.streams
    mixes = 2 * streams + streams * streams
    shapes: dict[str, tuple[int, ...]] = {"embed": (config.vocab, d), "norm": (d,), "head": (config.vocab, d)}
    for layer, role in enumerate(config.roles()):
        local: dict[str, tuple[int, ...]] = {
            "attn.norm": (d,),
            "attn.wq_a": (config.q_rank, d),
            "attn.q_norm": (config.q_rank,),
            "attn.wq_b": (config.heads * LATENT_DIM, config.q_rank),
            "attn.wkv": (LATENT_DIM, d),
            "attn.kv_norm": (LATENT_DIM,),
            "attn.sink": (config.heads,),
            "attn.wo_a": (config.o_groups, config.o_rank, config.heads // config.o_groups * LATENT_DIM),
            "attn.wo_b": (d, config.o_groups * config.o_rank),
            "moe.norm": (d,),
            "moe.router": (config.experts, d),
            "moe.router_bias": (config.experts,),
            "moe.gate": (config.experts, config.expert_width, d),
            "moe.up": (config.experts, config.expert_width, d),
            "moe.down": (config.experts, d, config.expert_width),
            "moe.shared_gate": (config.expert_width, d),
            "moe.shared_up": (config.expert_width, d),
            "moe.shared_down": (d, config.expert_width),
        }
        for sublayer in ("attn", "moe"):
            local[f"{sublayer}.hc_fn"] = (mixes, streams * d)
            local[f"{sublayer}.hc_scale"] = (3,)
            local[f"{sublayer}.hc_base"] = (mixes,)
        if role.mode is Mode.FULL:
            # ratio 2: the first 512 rows project the values, the last 512 the scores of the pair
            local["compress.wkv"] = (role.ratio * LATENT_DIM, d)
            local["compress.norm"] = (LATENT_DIM,)
            local["index.wk"] = (INDEX_DIM, LATENT_DIM)
            local["index.k_norm"] = (INDEX_DIM,)
        if role.mode in (Mode.FULL, Mode.REINDEX):
            local["index.wq_b"] = (config.index_heads * INDEX_DIM, config.q_rank)
            local["index.head_weights"] = (config.index_heads, d)
        shapes.update({f"layers.{layer}.{name}": shape for name, shape in local.items()})
    return shapes


def weight_dtype(name: str) -> torch.dtype:
    """The stored dtype of a weight: bf16, or fp32 for sinks, biases and hyper-connection scalars."""
    return torch.float32 if name.endswith(_FP32_SUFFIXES) else torch.bfloat16


def init_weights(config: ModelConfig, *, seed: int = 0) -> Weights:
    """Random fp32 weights to start training from, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    weights: Weights = {}
    for name, shape in weight_shapes(config).items():
        suffix = name.rsplit(".", 1)[-1]
        if suffix in ("sink", "router_bias"):
            value = torch.zeros(shape)
        elif "norm" in suffix:
            value = torch.ones(shape)
        elif suffix == "hc_scale":
            value = torch.full(shape, 0.05)
        elif suffix == "hc_base":
            value = _initial_mix(config, _sublayer(name))
        else:
            value = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
            if suffix in ("wo_b", "down", "shared_down"):
                value *= (2 * config.layers) ** -0.5
            elif name == "embed":
                value *= 0.3 * shape[-1] ** 0.5
        weights[name] = value
    return weights


def _sublayer(name: str) -> int:
    _, layer, sublayer, _ = name.split(".")
    return 2 * int(layer) + (sublayer == "moe")


def _initial_mix(config: ModelConfig, sublayer: int) -> Tensor:
    """Bias that makes sublayer s read mostly stream s mod 4, write all streams, and mix them little."""
    n = config.streams
    pre = torch.full((n,), -2.0)
    pre[(sublayer + 1) % n] = 2.0  # this mix is handed to the next sublayer
    comb = torch.eye(n) * 4.0
    return torch.cat((pre, torch.zeros(n), comb.flatten()))
