"""The clocks."""

import time

import pytest
import torch

from latentkv.bench import timing


def test_wall_clock_measures_wall_time():
    clock = timing.WallClock(seconds=0.05)
    got = clock.time(lambda device, seed: lambda: time.sleep(0.004), 1)
    assert 4000.0 <= got.p10 <= got.us <= got.p90
    assert got.us < 40000.0
    assert got.method == "wall"


def test_wall_clock_takes_at_least_three_samples():
    calls = []
    timing.WallClock(seconds=0.0).time(lambda device, seed: lambda: calls.append(device.type), 1)
    assert calls == ["cpu"] * 4  # one to warm up


def test_percentiles_are_of_single_calls():
    got = timing._timing([40.0, 10.0, 30.0, 20.0, 50.0], 10, "graph", 2, True)
    assert (got.p10, got.us, got.p90) == (1.0, 3.0, 5.0)


@pytest.mark.parametrize(
    ("footprint", "sets"),
    [(1, timing.MAX_SETS), (10 << 20, 13), (60 << 20, 3), (1 << 30, 2), (0, timing.MAX_SETS)],
)
def test_sets_exceed_twice_the_cache(footprint, sets):
    assert timing.set_count(footprint, 60 << 20) == sets
    assert sets == timing.MAX_SETS or sets * footprint > 2 * (60 << 20)


@pytest.mark.parametrize(
    ("us", "sets", "launches"), [(1.0, 32, 384), (0.0, 32, 384), (50.0, 3, 6), (50.0, 5, 5), (5000.0, 3, 3)]
)
def test_launches_are_whole_turns_of_about_the_sample_time(us, sets, launches):
    assert timing.launch_count(us, sets) == launches


def test_roofs_of_a_cpu_are_positive_and_lack_the_empty_kernel():
    roofs = timing.measure_roofs(timing.WallClock(seconds=0.01), 1 << 20, 64)
    assert min(roofs["copy_gb_per_s"], roofs["read_gb_per_s"], roofs["matmul_tflops"]) > 0
    assert roofs["empty_us"] is None
    assert roofs["errors"] == {}


def test_roof_that_fails_is_named_and_the_others_are_measured(monkeypatch):
    def broken(size: int):
        def build(device: torch.device, seed: int):
            raise RuntimeError("no room")

        return build

    monkeypatch.setattr(timing, "_copy", broken)
    roofs = timing.measure_roofs(timing.WallClock(seconds=0.01), 1 << 20, 64)
    assert roofs["copy_gb_per_s"] is None
    assert roofs["errors"] == {"copy_gb_per_s": "RuntimeError: no room"}
    assert roofs["read_gb_per_s"] > 0


def test_clock_of_a_device():
    assert isinstance(timing.clock_for("cpu"), timing.WallClock)
    with pytest.raises(ValueError, match="device: 'meta' is none of"):
        timing.clock_for("meta")


@pytest.mark.gpu
def test_graph_clock_times_a_copy():
    clock = timing.GraphClock("cuda")
    got = clock.time(timing._copy(64 << 20), 128 << 20)
    assert got.method == "graph"
    assert got.cold
    assert 5.0 < got.us < 5000.0
    stream = clock.time(timing._copy(64 << 20), 128 << 20, graph=False)
    assert stream.method == "stream"
    assert stream.us == pytest.approx(got.us, rel=0.5)


@pytest.mark.gpu
def test_graph_clock_refuses_what_cannot_be_captured():
    def build(device: torch.device, seed: int):
        x = torch.ones(4, device=device)
        return lambda: x.sum().item()

    with pytest.raises(RuntimeError):
        timing.GraphClock("cuda").time(build, 16)


@pytest.mark.gpu
def test_empty_kernel_has_a_time():
    assert 0.3 < timing.GraphClock("cuda").time(timing._empty, 1).us < 20.0
