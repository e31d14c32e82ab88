"""Every op once on a device against the reference on the CPU: what `latentkv doctor` runs on a GPU.

A small model takes a few steps and the other ops are called by hand. Each call is repeated by the reference on copies
of its inputs, so that one wrong kernel does not make the next one look wrong.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import latentkv as lk
from latentkv import numerics
from latentkv._text import error_line
from latentkv.layout import INDEX_DIM, LATENT_DIM, IndexKeyLayout, IndexQueryLayout
from latentkv.ops._library import OPS

# share of values that may differ, and by how much of the largest: sums whose order is free (docs/numerics.md, 6)
BEHIND_A_NORM = ("norm_rope_store_kv", "compress1", "compress2", "compress2_prefill", "store_index_key")
SUMS = {
    **dict.fromkeys(("linear_fp32", "router_partials", "router_logits", "route_topk"), 1e-5),
    **dict.fromkeys(("head_weights", "merge_partials"), 2.0**-7),
    "sparse_mla": 2.0**-6,
}
DIFFERING = 5e-3  # one bf16 step of a largest value moves the scale of 32 codes


@dataclass
class Check:
    """How an op's calls compared.

    Attributes:
        op: its name.
        stage: its stage.
        calls: how many.
        values: compared: those returned, and those that the call or the reference changed.
        differing: of them.
        largest: difference of two numbers, over the largest magnitude of the call's result.
        error: what it raised, if it did.
        passed: whether all is within what the op promises.
    """

    op: str
    stage: str
    calls: int = 0
    values: int = 0
    differing: int = 0
    largest: float = 0.0
    error: str | None = None
    passed: bool = False


def run(device: torch.device | str, progress: Callable[[str], None] | None = None) -> list[dict[str, Any]]:
    """Call every op on a device and compare.

    Args:
        device: a GPU; on the CPU the reference is compared with itself.
        progress: called with an op's name before each call.

    Returns:
        A record an op, with the fields of `Check`, in order of stage and name.
    """
    device = torch.device(device)
    watch = _Watch(progress or (lambda name: None))
    with torch.random.fork_rng(devices=[]), watch, torch.no_grad():
        torch.manual_seed(0)
        for part in PARTS:
            part(device)
    for check in watch.checks.values():
        check.passed = _passes(check)
    return [asdict(watch.checks[op.name]) for op in sorted(OPS.values(), key=lambda op: (op.stage, op.name))]


def _passes(check: Check) -> bool:
    if check.error is not None or not check.calls:
        return False
    if check.op in SUMS:
        return check.largest <= SUMS[check.op]
    return check.differing <= (DIFFERING * check.values if check.op in BEHIND_A_NORM else 0)


class _Watch(TorchDispatchMode):
    """Repeats every call of an op by the reference, and notes what differs."""

    def __init__(self, progress: Callable[[str], None]) -> None:
        super().__init__()
        self.checks = {op.name: Check(op.name, op.stage) for op in OPS.values()}
        self.progress = progress

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "latentkv":
            return func(*args, **(kwargs or {}))
        check = self.checks[func.__name__.split(".")[0]]
        self.progress(check.op)
        check.calls += 1
        theirs = tree_map(lambda x: x.cpu().clone() if isinstance(x, Tensor) else x, args)
        written = [i for i, a in enumerate(func._schema.arguments) if a.alias_info and a.alias_info.is_write]
        before = [theirs[i].clone() if isinstance(theirs[i], Tensor) else None for i in written]
        expected = _reference(check)(*theirs)
        try:
            result = func(*args)
            self._compare(check, [args[i] for i in written], [theirs[i] for i in written], before)
            self._compare(check, result, expected)
        except Exception as failure:  # a report, whatever it is; the next call goes on with what was expected
            check.error = check.error or error_line(failure)
            device = next(x.device for x in args if isinstance(x, Tensor))
            return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, expected)
        return result

    def _compare(self, check: Check, ours: Any, theirs: Any, before: Any = None) -> None:
        if isinstance(ours, (list, tuple)):
            for mine, other, old in zip(ours, theirs, before or [None] * len(ours), strict=True):
                self._compare(check, mine, other, old)
        elif isinstance(ours, Tensor):
            _note(check, ours.cpu(), theirs, before)


def _note(check: Check, ours: Tensor, theirs: Tensor, before: Tensor | None) -> None:
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        raise ValueError(f"{ours.dtype} {list(ours.shape)} returned, {theirs.dtype} {list(theirs.shape)} expected")
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    check.values += ours.numel() if before is None else int((~same | (theirs != before)).sum())
    check.differing += int((~same).sum())
    if bool(same.all()):
        return
    if not ours.is_floating_point():  # codes and ids have no small differences
        check.largest = max(check.largest, 1.0 if check.op in SUMS else 0.0)
        return
    distance = (ours[~same].double() - theirs[~same].double()).abs()
    size = theirs.double().nan_to_num(0.0, 0.0, 0.0).abs().max().clamp(min=2.0**-126)
    check.largest = max(check.largest, float((distance / size).nan_to_num(float("inf")).max()))


def _reference(check: Check) -> Callable[..., Any]:
    module = importlib.import_module(f"latentkv.reference.{check.stage}")
    return getattr(module, check.op, None) or getattr(numerics, check.op)


# --- calls ------------------------------------------------------------------------------------------------------------


def _random(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(*shape).to(device)


def _ints(device: torch.device, *values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def _table(device: torch.device) -> Tensor:
    return numerics.yarn_freqs(64, theta=10000.0).to(device)


def _pages(device: torch.device) -> None:
    rows, slots = _random(device, 9, LATENT_DIM).bfloat16(), _ints(device, 3, 0, 40, 63, 64, -1, 128, 17, 127)
    for layout in lk.KVLayout.members():
        cache = lk.new_kv_cache(layout, 2, 64, device=device)
        lk.store_kv(rows, cache, slots, layout=layout, page_size=64)
        lk.load_kv(cache, slots, layout=layout, page_size=64)
        lk.load_kv_pages(cache, layout=layout, page_size=64)
    for kind in ("index", "latent"):
        lk.rope_fake_quant(rows, _table(device), kind=kind, positions=slots.clamp(0, 63))


def _keys(device: torch.device) -> None:
    values, slots = _random(device, 6, INDEX_DIM).bfloat16(), _ints(device, 1, 63, 64, 100, -1, 5)
    for layout in IndexKeyLayout:
        cache = lk.new_index_key_cache(layout, 2 if layout is not IndexKeyLayout.SPLIT8 else 16, device=device)
        lk.store_index_key_plain(values, cache, slots)
        lk.dequantize_index(*lk.load_index_key(cache, slots))
    query = _random(device, 3, 32, INDEX_DIM).bfloat16()
    for query_layout in IndexQueryLayout:
        lk.pack_index_query(query, _table(device), _ints(device, 0, 7, 63), layout=query_layout)


def _schedules(device: torch.device) -> None:
    lengths = _ints(device, 700, 0, 65, 2000)
    lk.decode_schedule(lengths, workers=24, max_len=2048)
    lk.prefill_schedule(lengths, workers=24, max_len=2048)
    lk.pad_page_table(_ints(device, 4, 7, 1).reshape(1, 3))


def _attention(device: torch.device) -> None:
    near, far = lk.KVLayout.V41, lk.KVLayout.V41_FP4
    sources = []
    for layout, count in ((near, 128), (far, 192)):
        cache = lk.new_kv_cache(layout, 4, 64, device=device)
        rows = _random(device, 256, LATENT_DIM).bfloat16()
        lk.store_kv(rows, cache, torch.arange(256, device=device), layout=layout, page_size=64)
        slots = torch.stack([torch.randperm(256)[:count] for _ in range(2)]).int()
        slots[1, 5:9] = -1
        sources.append(lk.Rows(cache, slots.to(device), layout, 64))
    for heads in (4, 32):
        query, sink = _random(device, 2, heads, LATENT_DIM).bfloat16(), _random(device, heads)
        rotation = (_table(device), _ints(device, 5, 60))
        lk.sparse_mla(query, *sources, sink=sink, inverse_rope=rotation)
    lk.merge_partials(_random(device, 3, 2, 4, LATENT_DIM), _random(device, 3, 2, 4), sink=_random(device, 4))


def _gate(device: torch.device) -> None:
    x, w = _random(device, 3, 1280).bfloat16(), _random(device, 32, 1280).bfloat16()
    lk.head_weights(x, w, 0.02)
    lk.route_topk(lk.router_logits(x, w) / 16, _random(device, 32), k=6, scale=1.5, num_shared=1)


def _pairs(device: torch.device) -> None:
    kv, score = _random(device, 3, LATENT_DIM), _random(device, 3, LATENT_DIM)
    state_kv, state_score = _random(device, 8, LATENT_DIM), _random(device, 8, LATENT_DIM)
    places = _ints(device, 4, 5, 0), _ints(device, 8, 21, 0), _ints(device, 4, 10, 0), _ints(device, 0, 1, 2)
    lk.pool_pairs(kv, score, *places, state_kv, state_score, 7)


def _model(device: torch.device) -> None:
    """A chunk and three tokens through every kind of layer."""
    from latentkv.model import ModelCache, ModelConfig, PagedModel
    from latentkv.model.weights import init_weights, weight_dtype

    config = ModelConfig(
        hidden=64, heads=2, q_rank=32, o_rank=16, ratios=(0, 2, 1, 1, 1), kv_source_layers=(1, 2),
        index_source_layers=(1, 2, 3), candidate_source_layer=2, candidate_blocks=3, index_topk=8, experts=4,
        expert_width=16, max_positions=64,
    )  # fmt: skip
    weights = {n: w.to(device, weight_dtype(n)) for n, w in init_weights(config, seed=0).items()}
    model = PagedModel(config, weights)
    cache = ModelCache(config, max_tokens=128, max_context=64, device=device)
    request = cache.open()
    model.step(cache, [(request, torch.arange(41))])
    for token in (7, 8, 9):
        model.step(cache, [(request, [token])])


PARTS: tuple[Callable[[torch.device], None], ...] = (
    _pages,
    _keys,
    _schedules,
    _attention,
    _gate,
    _pairs,
    _model,
)
