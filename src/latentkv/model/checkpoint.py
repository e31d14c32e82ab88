"""Checkpoints: one safetensors file whose header holds the config."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import torch

from latentkv.model.config import ModelConfig
from latentkv.model.weights import Weights, weight_dtype, weight_shapes

FORMAT = "latentkv-model-1"
PACKAGED_NAME = "stdlib-5m.safetensors"


def packaged_checkpoint() -> Path:
    """The checkpoint that comes with the package."""
    return Path(str(files("latentkv.model"))) / "checkpoints" / PACKAGED_NAME


def save_checkpoint(path: Path, config: ModelConfig, weights: Weights) -> None:
    """Write weights, rounded to their stored dtypes, and the config.

    Raises:
        ValueError: the weights are not those of the config.
    """
    from safetensors.torch import save_file

    stored = {n: t.detach().to("cpu", weight_dtype(n)).contiguous() for n, t in weights.items()}
    _check(config, stored, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(stored, path, metadata={"format": FORMAT, "config": json.dumps(config.to_dict())})


def load_checkpoint(path: Path | None = None, *, device: torch.device | str = "cpu") -> tuple[ModelConfig, Weights]:
    """Read a checkpoint.

    Args:
        path: a file of `save_checkpoint`; the packaged one by default.
        device: where the weights go.

    Raises:
        ValueError: the file is missing, is no safetensors file, or is not a checkpoint of this library.
    """
    from safetensors import SafetensorError, safe_open

    path = path or packaged_checkpoint()
    if not path.is_file():
        raise ValueError(f"checkpoint: {path} is not a file")
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(f"checkpoint: {path} is no {FORMAT} file (format {metadata.get('format')!r})")
            config = ModelConfig.from_dict(json.loads(metadata["config"]))
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"checkpoint: {path} is not a safetensors file ({error})") from error
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"checkpoint: {path} has an unreadable config ({error})") from error
    _check(config, weights, path)
    return config, weights


def _check(config: ModelConfig, weights: Weights, path: Path) -> None:
    shapes = weight_shapes(config)
    if differing := sorted(set(shapes) ^ set(weights)):
        raise ValueError(f"checkpoint: {path} lacks or adds {len(differing)} weights, first {differing[0]}")
    for name, shape in shapes.items():
        given = weights[name]
        if tuple(given.shape) != shape or given.dtype != weight_dtype(name):
            raise ValueError(
                f"checkpoint: {name} is {given.dtype} {list(given.shape)}, not {weight_dtype(name)} {list(shape)}"
            )
