"""What only the CPU promises."""

from __future__ import annotations

import torch

import latentkv as lk
from latentkv.reference import attend as reference
from tests.attend.cases import Pool, queries
from tests.attend.test_sparse_mla import same_bits


def test_on_the_cpu_skipped_slots_change_no_bit():
    pool = Pool.random(40, "v41", 32, torch.device("cpu"), seed=1)
    query, slots = queries(2, 3, pool.cache.device), pool.pick(2, 30, 1, holes=0)
    wide = torch.full((2, 77), -1, dtype=torch.int32)
    wide[:, torch.randperm(77, generator=torch.Generator().manual_seed(0))[:30].sort().values] = slots
    assert same_bits(lk.sparse_mla(query, pool.rows(slots)), lk.sparse_mla(query, pool.rows(wide)))


def test_on_the_cpu_a_large_batch_goes_through_in_chunks(monkeypatch):
    pool = Pool.random(40, "v41", 32, torch.device("cpu"), seed=1)
    query, rows = queries(9, 2, pool.cache.device), pool.rows(pool.pick(9, 30, 1))
    whole = lk.sparse_mla(query, rows)
    monkeypatch.setattr(reference, "CHUNK_ROWS", 60)  # two tokens a chunk
    assert same_bits(whole, lk.sparse_mla(query, rows))
    monkeypatch.setattr(reference, "CHUNK_ROWS", 1)
    assert same_bits(whole, lk.sparse_mla(query, rows))
