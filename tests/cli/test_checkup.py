"""What `latentkv doctor` finds where a kernel is wrong."""

from __future__ import annotations

import json

import pytest
import torch

from latentkv import checkup, doctor
from latentkv.ops._library import OPS
from latentkv.reference import attend, store


def only(monkeypatch: pytest.MonkeyPatch, *parts) -> None:
    monkeypatch.setattr(checkup, "PARTS", parts)


def found() -> dict[str, dict]:
    return {check["op"]: check for check in checkup.run("cpu")}


def test_every_op_is_called_and_equals_itself():
    checks = found()
    assert set(checks) == set(OPS)
    assert [name for name, check in checks.items() if not check["passed"]] == []
    assert all(check["calls"] and check["values"] and not check["differing"] for check in checks.values())


def test_one_wrong_byte_fails(monkeypatch):
    only(monkeypatch, checkup._pages)
    right = store.store_kv

    def wrong(rows, cache, *more):
        right(rows, cache, *more)
        cache[1, 5] ^= 1

    monkeypatch.setattr(store, "store_kv", wrong)
    check = found()["store_kv"]
    assert not check["passed"]
    assert check["differing"] == check["calls"] == 7


def test_a_wrong_row_fails_where_single_codes_may_differ(monkeypatch):
    only(monkeypatch, checkup._model)
    right = store.norm_rope_store_kv

    def wrong(rows, weight, cache, slots, *more):
        right(rows, weight, cache, slots, *more)
        cache[int(slots[0]) // 64, int(slots[0]) % 64 * 512] ^= 64  # a code of a row

    monkeypatch.setattr(store, "norm_rope_store_kv", wrong)
    assert found()["norm_rope_store_kv"]["passed"]

    def worse(rows, weight, cache, slots, *more):
        right(rows, weight, cache, slots, *more)
        cache[int(slots[0]) // 64, int(slots[0]) % 64 * 512 :][:512] ^= 64

    monkeypatch.setattr(store, "norm_rope_store_kv", worse)
    assert not found()["norm_rope_store_kv"]["passed"]


@pytest.mark.parametrize(("factor", "passes"), [(1.001, True), (1.1, False), (float("nan"), False)])
def test_sums_may_differ_by_their_bound(monkeypatch, factor, passes):
    only(monkeypatch, checkup._attention)
    right = attend.merge_partials

    def other(*args):
        out, lse = right(*args)
        return out * factor, lse

    monkeypatch.setattr(attend, "merge_partials", other)
    assert found()["merge_partials"]["passed"] is passes


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")  # overriding is the point
def test_an_op_that_raises_is_reported_and_the_others_go_on(monkeypatch):
    def fail(*args):
        raise RuntimeError("planted")

    only(monkeypatch, checkup._schedules)
    check = found()["store_kv"]
    assert (check["calls"], check["passed"]) == (0, False)
    library = torch.library.Library("latentkv", "IMPL")
    try:
        library.impl("decode_schedule", fail, "CPU", allow_override=True)
        checks = found()
    finally:
        library._destroy()
    assert checks["decode_schedule"]["error"] == "RuntimeError: planted"
    assert not checks["decode_schedule"]["passed"]
    assert checks["prefill_schedule"]["passed"]


def test_doctor_exits_with_1_where_a_check_fails(command, monkeypatch):
    device = {"index": 0, "name": "card", "target": "sm90", "memory": 2**37, "l2": 2**25, "multiprocessors": 132}
    right = doctor.environment()
    monkeypatch.setattr(doctor, "environment", lambda: {**right, "devices": [device]})
    monkeypatch.setattr(doctor, "find_device", lambda name: torch.device("cpu"))
    only(monkeypatch, checkup._schedules)  # the others count as not called
    result = command("doctor")
    assert result.code == 1
    assert "failed: not called" in result.out
    assert "equal" in result.out
    told = json.loads(command("doctor", "--json").out)
    assert {check["op"] for check in told["checks"] if check["passed"]} == {
        "decode_schedule",
        "prefill_schedule",
        "pad_page_table",
    }
    assert command("doctor", "--quick").code == 0
    assert "were not run" in command("doctor", "--quick").out
