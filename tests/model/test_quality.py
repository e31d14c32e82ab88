"""The packaged model on held-out text."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from latentkv.model import dense
from latentkv.model.checkpoint import load_checkpoint
from latentkv.model.evaluation import Report, evaluate, held_out_windows
from latentkv.model.generation import Sampling, generate
from latentkv.model.paged import PagedModel


@pytest.fixture(scope="module")
def model() -> PagedModel:
    return PagedModel(*load_checkpoint())


@pytest.fixture(scope="module")
def windows() -> list[torch.Tensor]:
    return held_out_windows(768, 1)


@pytest.fixture(scope="module")
def report(model: PagedModel, windows: list[torch.Tensor]) -> Report:
    return evaluate(model, windows, source="held out", pairs=[("bf16", "bf16"), ("v41", "v41_fp4")])


def test_held_out_text_takes_at_most_two_bits_a_byte(report: Report):
    assert report.rows[0].bits_per_byte <= 2.0


def test_v41_pages_are_within_two_hundredths_of_a_bit_of_bf16(report: Report):
    assert abs(report.rows[1].difference) <= 0.02
    assert report.rows[1].bytes_per_token < report.rows[0].bytes_per_token / 3


def test_selection_is_at_work_and_mostly_agrees(report: Report):
    assert 0.8 < report.rows[1].agreement < 1.0


def test_paged_quality_is_that_of_the_dense_forward(windows: list[torch.Tensor], report: Report):
    config, weights = load_checkpoint()
    with torch.no_grad():
        logits = dense.forward(config, weights, windows[0][None, :-1]).logits[0]
    bits = float(F.cross_entropy(logits, windows[0][1:])) / math.log(2)
    assert report.rows[1].bits_per_byte == pytest.approx(bits, abs=5e-3)


def test_model_continues_python(model: PagedModel):
    prompt = "import unittest\n\n\nclass T(unittest.TestCase):\n    pass\n\n\nif __name__ == '__ma"
    *_, last = generate(model, prompt, max_tokens=5, sampling=Sampling(temperature=0))
    assert last.summary.text == "in__'"
