"""The training script, on a tiny model."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from latentkv.model.checkpoint import load_checkpoint
from latentkv.model.corpus import is_held_out

SCRIPT = Path(__file__).parents[2] / "training" / "train.py"


@pytest.fixture(scope="module")
def train() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["train"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["train"]


@pytest.fixture
def trainer(train: ModuleType):
    stream = torch.arange(20000) % 7 + 65
    config = train._tiny_config()
    return train.Trainer(config, stream.to(torch.int16), device=torch.device("cpu"), seed=3, peak=3e-3)


def test_loss_falls_and_the_indexer_moves(train: ModuleType, trainer):
    stage = train.Stage(128, 2, 1.0)
    before = {n: w.detach().clone() for n, w in trainer.weights.items()}
    losses = [float(trainer.step(stage, 3e-3)[0]) for _ in range(12)]
    assert losses[-1] < 0.6 * losses[0]
    assert trainer.tokens == 12 * 256
    unmoved = {n for n, w in trainer.weights.items() if torch.equal(before[n], w)}
    assert not unmoved


def test_router_bias_moves_against_the_load(train: ModuleType, trainer, monkeypatch: pytest.MonkeyPatch):
    loads = []
    forward = train.dense.forward
    monkeypatch.setattr(train.dense, "forward", lambda *a: loads.append(out := forward(*a)) or out)
    trainer.step(train.Stage(128, 1, 1.0), 1e-3)
    for bias, load in zip(trainer.biases, loads[0].loads, strict=True):
        assert torch.equal(bias, train.BIAS_STEP * torch.sign(0.25 - load))


def test_run_writes_weights_and_a_record(train: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "lib"
    folder.mkdir()
    for i in range(30):
        (folder / f"m{i}.py").write_text(f"value_{i} = {i}\n" * 40)
    arguments = "--tiny --device cpu --seconds 2 --step-tokens 128 --lengths 128 128 --windows 1 --seed 5"
    monkeypatch.setattr(sys, "argv", ["train.py", "--corpus", str(folder), "--out", str(tmp_path), *arguments.split()])
    train.main()
    config, _ = load_checkpoint(next(tmp_path.glob("*.safetensors")))
    assert config == train._tiny_config()
    record = json.loads((tmp_path / "training.json").read_text())
    held_out = sum(is_held_out(f"m{i}.py") for i in range(30))
    assert (record["corpus"]["held_out_files"], record["corpus"]["training_files"]) == (held_out, 30 - held_out)
    assert record["seed"] == 5
    assert set(record["held_out_bits_per_byte"]) == {"bf16+bf16", "v41+v41_fp4"}
    assert record["curve"][0]["bits_per_byte"] > 7
