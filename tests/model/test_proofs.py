"""What `test_gpu.py` measures with, on a small model and a CPU: it passes what is right and catches what is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from latentkv.model import ModelConfig, PagedModel, save_checkpoint
from latentkv.model.weights import Weights
from tests.model import proofs


@pytest.fixture(scope="module")
def model(config: ModelConfig, weights: Weights) -> PagedModel:
    return PagedModel(config, weights)


@pytest.fixture(scope="module")
def checkpoint(config: ModelConfig, weights: Weights, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "small.safetensors"
    save_checkpoint(path, config, weights)
    return path


def test_the_reference_agrees_with_its_own_text_and_with_no_other(model: PagedModel, checkpoint: Path):
    given = proofs.prompts(2)
    texts = proofs.greedy(model, given, 7)
    tokens = [([*p, *t], len(p)) for p, t in zip(given, texts, strict=True)]
    verdicts = proofs.judge_all(tokens, processes=1, checkpoint=checkpoint)
    assert [v.first_other for v in verdicts] == [None, None]
    assert all(len(v.gaps) == 7 and min(v.gaps) >= 0 for v in verdicts)
    tokens[0][0][len(given[0]) + 5] ^= 1
    other = proofs.judge(tokens[0], checkpoint)
    assert other.first_other == 5
    assert other.shortfalls[5] >= other.gaps[5] > 0


def test_work_in_processes_is_work_here(checkpoint: Path):
    parts = [([256, 40, 41], 1)]
    here = proofs.judge_all(parts, processes=1, checkpoint=checkpoint)
    assert proofs.judge_all(parts, processes=2, checkpoint=checkpoint) == here


def test_bits_of_windows_are_the_mean_of_single_ones(model: PagedModel, checkpoint: Path, tokens: torch.Tensor):
    windows = [torch.cat((torch.tensor([256]), tokens[a : a + 40])) for a in (0, 40)]
    single = [proofs.reference_bits(w, checkpoint) for w in windows]
    assert proofs.bits_per_byte(model, windows) == pytest.approx(sum(single) / 2, abs=1e-5)


def test_serving_is_repeatable_and_busy(model: PagedModel, tokens: torch.Tensor):
    options = {"requests": 2, "rows": 3, "steps": 8, "every": 2, "life": (2, 5)}
    first, second = (proofs.serve(model, tokens.tolist(), **options) for _ in range(2))
    assert first.texts == second.texts
    assert all(torch.equal(a, b) for a, b in zip(first.cache.pools, second.cache.pools, strict=True))
    assert first.joined > 2
    assert first.drafted > 8
