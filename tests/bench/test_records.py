"""Running cases against a clock, and what is recorded."""

import itertools
import json

import pytest

from latentkv.bench import Peer, load_record, run


def test_bandwidth_is_bytes_over_time_and_a_share_of_the_copy_roof(fakes):
    (row,) = run([fakes.case(size=1000, us=2.0)], fakes.Clock(), fakes.ROOFS)
    assert row.bytes == 1_000_000
    assert row.gb_per_s == pytest.approx(500.0)  # 1e6 bytes in 2e-6 s
    assert row.copy_percent == pytest.approx(12.5)
    assert (row.timing.p10, row.timing.p90) == pytest.approx((1.8, 2.4))
    assert row.tflops is None
    assert row.error is None


def test_flops_become_a_rate(fakes):
    (row,) = run([fakes.case(us=4.0, flops=8_000_000)], fakes.Clock(), fakes.ROOFS)
    assert row.tflops == pytest.approx(2.0)


def test_without_a_copy_roof_there_is_no_share(fakes):
    (row,) = run([fakes.case()], fakes.Clock(), {"copy_gb_per_s": None})
    assert row.gb_per_s is not None
    assert row.copy_percent is None


def test_failure_stays_in_its_row(fakes):
    cases = [fakes.case(us=fakes.fails(RuntimeError("no\nmemory"))), fakes.case(us=3.0)]
    bad, good = run(cases, fakes.Clock(), fakes.ROOFS)
    assert bad.error == "RuntimeError: no memory"
    assert bad.timing is None
    assert bad.gb_per_s is None
    assert good.timing.us == 3.0


def test_peers_have_a_ratio_or_a_reason(fakes):
    peers = (
        Peer("slower", fakes.takes(5.0)),
        Peer("eager", fakes.takes(1.0), graph=False),
        Peer("missing", fakes.fails(ImportError("No module named 'x'"))),
        Peer("refuses", fakes.fails(NotImplementedError("not below sm100"))),
        Peer("broken", fakes.fails(RuntimeError("boom"))),
    )
    (row,) = run([fakes.case(us=2.0, peers=peers)], fakes.Clock(), fakes.ROOFS)
    assert row.peers == {
        "slower": {"us": 5.0, "ratio": 2.5, "method": "graph"},
        "eager": {"us": 1.0, "ratio": 0.5, "method": "stream"},
        "missing": {"absent": "ImportError: No module named 'x'"},
        "refuses": {"absent": "NotImplementedError: not below sm100"},
        "broken": {"absent": "failed: RuntimeError: boom"},
    }


def test_peer_of_a_failed_row_has_no_ratio(fakes):
    case = fakes.case(us=fakes.fails(RuntimeError("boom")), peers=(Peer("eager", fakes.takes(1.0)),))
    (row,) = run([case], fakes.Clock(), fakes.ROOFS)
    assert row.peers["eager"]["ratio"] is None


def test_own_rows_come_before_peers_and_quick_peers_before_slow_ones(fakes):
    seen = []
    peers = (Peer("quick", fakes.takes(1.0)), Peer("slow", fakes.takes(1.0)))
    cases = [fakes.case(size=1, peers=peers), fakes.case(size=2, peers=peers)]
    run(cases, fakes.Clock(), fakes.ROOFS, progress=seen.append)
    own = ["store_kv v41 1", "store_kv v41 2"]
    assert seen == [*own, *(f"{name}: {peer}" for peer in ("quick", "slow") for name in own)]


def test_nothing_starts_after_the_time_is_over(fakes):
    clock, ticks = fakes.Clock(), itertools.count(step=3.0)
    cases = [fakes.case(size=n, peers=(Peer("eager", fakes.takes(1.0)),)) for n in (1, 2, 4)]
    rows = run(cases, clock, fakes.ROOFS, seconds=7.0, now=lambda: next(ticks))
    assert [row.error for row in rows] == [None, None, "not measured: 7 s were over"]
    assert all(row.peers["eager"] == {"absent": "not measured: 7 s were over"} for row in rows)
    assert len(clock.asked) == 2


def test_clock_is_told_the_bytes_and_whether_to_capture(fakes):
    clock = fakes.Clock()
    run([fakes.case(size=3, peers=(Peer("eager", fakes.takes(1.0), graph=False),))], clock, fakes.ROOFS)
    assert clock.asked == [(3000, True), (3000, False)]


def test_record_survives_a_file(record, tmp_path):
    path = tmp_path / "r.json"
    path.write_text(json.dumps(record))
    assert load_record(path) == record
    assert record["rows"][0]["timing"] == {
        "us": 2.0,
        "p10": 1.8,
        "p90": 2.4,
        "method": "graph",
        "sets": 4,
        "cold": True,
    }


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 99}', "\xff"])
def test_what_is_no_record_is_refused(tmp_path, text):
    path = tmp_path / "r.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match="record: "):
        load_record(path)
    with pytest.raises(ValueError, match="cannot be read"):
        load_record(tmp_path / "missing")
