"""The benchmark of a decode step: what it repeats is a step, and what it splits adds up."""

from __future__ import annotations

import json

import pytest
import torch

import latentkv as lk
from latentkv.bench import load_stage, timing
from latentkv.cli import main
from latentkv.model.captured import STEP_OPS
from latentkv.ops._library import OPS

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def module():
    return load_stage("model")


@pytest.fixture(scope="module")
def state(module):
    return module.state(CPU, 1, 2)


def test_a_repeated_step_says_the_same(state):
    state.body()
    logits = state.step._logits.clone()
    assert bool(logits.isfinite().all())
    assert float(logits.std()) > 0.1
    state.body()
    assert torch.equal(state.step._logits, logits)


def test_the_reference_takes_the_same_step(state):
    state.body()
    state.eager()
    # the same ops on the same pools; bf16 products and their sums differ
    assert float((state.step._logits - state._eager._logits).abs().mean()) < 0.1 * float(state.step._logits.std())


def test_calls_of_a_step_are_split_by_stage(module, state):
    calls = state.calls()
    layers, sources = 7, 2
    assert {stage: len(calls[stage]) for stage in module.STAGES} == {
        "store": layers,
        "compress": sources,
        "index": 2 * sources + 1,
        "select": 2 * 3 + 1,  # logits and top-k of three layers, blocks of one
        "attend": layers,
        "route": 2 * layers + 3,
        # attention 5, experts 3, hyper-connection 2; rows, keys, index queries; the head
        "linear": 10 * layers + 2 * sources + 3 + 1,
    }


def test_every_op_runs_the_reference_inside_and_its_own_path_behind(module, monkeypatch):
    from latentkv.reference import route

    monkeypatch.setattr(route, "router_logits", lambda x, w: torch.full((1, 2), 5.0))
    given = torch.ones(1, 4).bfloat16(), torch.ones(2, 4).bfloat16()
    with module.reference_ops(CPU):
        assert lk.router_logits(*given).tolist() == [[5.0, 5.0]]
    assert lk.router_logits(*given).tolist() == [[4.0, 4.0]]
    assert set(STEP_OPS) <= set(OPS)


def test_command_writes_every_stage_s_share(capsys, monkeypatch):
    monkeypatch.setattr(timing, "clock_for", lambda device: timing.WallClock(CPU, seconds=0.0))
    assert main(["bench", "model", "--device", "cpu", "--size", "1", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    (step,) = record["steps"]
    assert (step["requests"], step["rows"], step["eager_over_step"]) == (1, 1, None)
    assert step["tokens_per_second"] == pytest.approx(1e6 / step["us"])
    assert list(step["stages"]) == ["store", "compress", "index", "select", "attend", "route", "linear", "rest"]
    assert sum(stage["share"] for stage in step["stages"].values()) == pytest.approx(1)
    assert all(stage["us"] > 0 for name, stage in step["stages"].items() if name != "rest")


def test_nothing_is_measured_when_time_is_over(module):
    row = module.Row("decode_step", "v41+v41_fp4 x1", 1, "requests", 1, 0, timing=timing.Timing(2.0, 1.0, 3.0, "wall"))
    (step,) = module.steps([row], clock=None, is_over=lambda: True, progress=lambda what: None)
    assert step["stages"] == {}
    assert step["us"] == 2.0


def test_bytes_are_those_of_the_docstring(module):
    config, weights = module.load_checkpoint()
    stored = sum(w.numel() * w.element_size() for w in weights.values())
    rows = 7 * 128 * 528 + 6 * 64 * 288
    context = 4096 - 128
    keys = (context // 2 + 2 * context) * 68
    assert module.step_bytes(config, 1, 1) == stored + rows + keys
    assert module.step_bytes(config, 1, 6) == stored + 6 * rows + keys
