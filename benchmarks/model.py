"""The packaged model's decode step: what all stages cost together, and which share each has.

A step takes one token of every request, or six (`x6`: one and five drafts to verify), at a context of about 3900 tokens
in pages of V41 window rows and V41_FP4 selected rows. The pools hold random rows, so the text is noise; no cost depends
on a value. What is timed is the body of a step as it is captured: addresses, the layers, logits and the likeliest
token, on the device. Bytes that a step must move, counted by hand:

    every weight once, as stored
    for each row and layer      128 window rows of 528, and 64 selected rows of 288 in layers that have them
    for each request            68 for each visible key of each of the layers that select

Peers, of the same step on the same pools: `with host`, a call of `DecodeStep` as a server makes it, which plans pages,
copies the inputs, replays the graph and reads the tokens; `uncaptured`, the same kernels launched one by one; `eager`,
this library's reference run by PyTorch, with bf16 matrix products and PyTorch's own operations between the stages.

`steps(...)` adds, for each size, tokens a second and every stage's time. A stage's time is that of a graph with the
stage's calls alone, on the inputs that they had in the step; `linear` is matrix products (`linear_fp32` among them),
`rest` is what the others leave of the whole step: addresses, norms, hyper-connection, gated experts, likeliest token.

All sets of inputs are one and the same: a step follows itself, as in decoding, and finds the small model's weights in
the L2 cache. A stage alone finds more of its inputs there than in the step, so `rest` is the least certain number.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import latentkv as lk
from latentkv.bench import Case, Peer, Row
from latentkv.bench.records import Build
from latentkv.layout import INDEX_DIM, LATENT_DIM
from latentkv.model import ModelCache, ModelConfig, PagedModel, load_checkpoint
from latentkv.model.captured import STEP_OPS, DecodeStep
from latentkv.model.config import Mode
from latentkv.model.paged import one_thread
from latentkv.ops._library import OPS

SIZES = (1, 16, 64, 256)  # requests
VERIFIED = (256, 6)  # requests, rows of each: the largest step that is captured
CONTEXT = 4096  # tokens of the longest request that the captured step allows
SPARE = 128  # of them, which calls with the host use up
CHUNK = 128
STAGES = ("store", "compress", "index", "select", "attend", "route", "linear")
EAGER_CALLS, HOST_CALLS = 3, 48
FILL_ROWS = 1 << 16
KEY_BYTES = 68


def cases(sizes: Sequence[int] | None = None) -> list[Case]:
    """A step of each size; `sizes` are numbers of requests."""
    shapes = [(n, 1) for n in sizes or SIZES] + ([VERIFIED] if sizes is None else [])
    return [_case(requests, rows) for requests, rows in shapes]


def _case(requests: int, rows: int) -> Case:
    def build(device: torch.device, seed: int) -> Callable[[], object]:
        return state(device, requests, rows).body

    def with_host(device: torch.device, seed: int) -> Callable[[], object]:
        _needs_a_gpu(device)
        return state(device, requests, rows).call

    def uncaptured(device: torch.device, seed: int) -> Callable[[], object]:
        _needs_a_gpu(device)
        return state(device, requests, rows).body

    def eager(device: torch.device, seed: int) -> Callable[[], object]:
        _needs_a_gpu(device)
        return state(device, requests, rows).eager

    return Case(
        "decode_step",
        f"v41+v41_fp4 x{rows}",
        requests,
        "requests",
        step_bytes(load_checkpoint()[0], requests, rows),
        build,
        peers=(
            Peer("with host", with_host, graph=False, calls=HOST_CALLS),
            Peer("uncaptured", uncaptured, graph=False),
            # token by token in Python, 1536 of them take seconds
            *([Peer("eager", eager, graph=False, calls=EAGER_CALLS)] if rows == 1 else []),
        ),
    )


def step_bytes(config: ModelConfig, requests: int, rows: int) -> int:
    """Bytes that a step must move, as the module's docstring counts them."""
    _, weights = load_checkpoint()
    total = sum(w.numel() * w.element_size() for w in weights.values())
    near, far = lk.KVLayout.V41.row_bytes, lk.KVLayout.V41_FP4.row_bytes
    for role in config.roles():
        selects = role.mode is not Mode.WINDOW
        total += requests * rows * (config.window * near + (config.index_topk * far if selects else 0))
        if role.mode in (Mode.FULL, Mode.REINDEX):
            total += sum(length // role.ratio for length in _lengths(requests)) * KEY_BYTES
    return total


def steps(
    rows: Sequence[Row], clock: Any, *, is_over: Callable[[], bool], progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Tokens a second and the share of each stage, for every step that was timed.

    Args:
        rows: of `cases`.
        clock: what timed them.
        is_over: whether no measurement may start any more.
        progress: called with a name before each measurement.

    Returns:
        A record a step: requests, rows, context, us, tokens_per_second, with_host_tokens_per_second and
        eager_over_step (None where not measured), and `stages`: us and share by name, `rest` last.
    """
    found = []
    for row in rows:
        if row.timing is None:
            continue
        count = int(row.variant.rsplit("x", 1)[1])
        us, stages = row.timing.us, {}
        calls_of = {} if is_over() else state(clock.device, row.size, count).calls()
        for stage in STAGES:
            progress(f"{row.op} {row.size} x{count}: {stage}")
            if is_over():
                break
            calls = calls_of[stage]
            # as many bytes as give the fewest sets of inputs: they are one and the same
            spent = clock.time(_build_of(calls), 1 << 40).us if calls else 0.0
            stages[stage] = {"us": spent, "share": spent / us}
        if len(stages) == len(STAGES):
            rest = us - sum(stage["us"] for stage in stages.values())
            stages["rest"] = {"us": rest, "share": rest / us}
        host, eager = (row.peers.get(name, {}) for name in ("with host", "eager"))
        found.append(
            {
                "requests": row.size,
                "rows": count,
                "context": sum(_lengths(row.size)) // row.size,
                "us": us,
                "tokens_per_second": row.size * count / us * 1e6,
                "with_host_tokens_per_second": row.size * count / host["us"] * 1e6 if "us" in host else None,
                "eager_over_step": eager.get("ratio"),
                "stages": stages,
            }
        )
    return found


def _build_of(calls: Sequence[Callable[[], object]]) -> Build:
    def build(device: torch.device, seed: int) -> Callable[[], object]:
        def run() -> None:
            with one_thread(device):  # as in a step
                for call in calls:
                    call()

        return run

    return build


def _needs_a_gpu(device: torch.device) -> None:
    if device.type == "cpu":
        raise NotImplementedError("a CPU runs the reference itself, and captures nothing")


def _lengths(requests: int) -> list[int]:
    """Tokens that each request holds, those of the step included."""
    return [CONTEXT - SPARE - 37 * r % 128 for r in range(requests)]


# --- a step that can be run again and again ---------------------------------------------------------------------------


class State:
    """A model, its caches filled with random rows, and a step of all requests that is loaded and can be repeated."""

    def __init__(self, device: torch.device, requests: int, rows: int) -> None:
        config, weights = load_checkpoint(device=device)
        self.requests, self.rows = requests, rows
        self.model = PagedModel(config, weights)
        self._plain = PagedModel(config, weights, exact=False, fused=False)
        self.cache = ModelCache(
            config,
            max_requests=requests,
            max_tokens=requests * CONTEXT,
            max_context=CONTEXT,
            chunk=CHUNK,
            draft_rows=rows,
            device=device,
        )
        _fill(self.cache)
        lengths = _lengths(requests)
        for request in [self.cache.open() for _ in range(requests)]:
            for at in range(0, lengths[request], CHUNK):
                self.cache.extend([(request, min(CHUNK, lengths[request] - at))])
        self.step = DecodeStep(self.model, self.cache, rows=rows, ladder=(requests,))
        self._eager = DecodeStep(self._plain, self.cache, rows=rows, ladder=(requests,), capture=False)
        self.entries = [(r, [(31 * r + 7 * i) % 256 for i in range(rows)]) for r in range(requests)]
        for step in (self.step, self._eager):  # the last rows once more
            step.load(requests, rows, self.entries, [length - rows for length in lengths])

    def body(self) -> None:
        """The step on the device."""
        self.step.body(self.requests, self.rows)

    def eager(self) -> None:
        """The step by the reference."""
        with reference_ops(self.model.device):
            self._eager.body(self.requests, self.rows)

    def call(self) -> None:
        """The step with its host's work, which moves every request on by one token."""
        self.step(self.entries)
        if self.rows > 1:
            for request, _ in self.entries:
                self.cache.keep(request, 1)

    def calls(self) -> dict[str, list[Callable[[], object]]]:
        """The calls of one step by stage, on the inputs that they had."""
        watch = _Watch()
        self.step.load(self.requests, self.rows, self.entries, [n - self.rows for n in _lengths(self.requests)])
        with watch:
            self.body()
        return watch.calls


class _Watch(TorchDispatchMode):
    """Keeps calls with their arguments, by stage."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[Callable[[], object]]] = {stage: [] for stage in STAGES}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        stage = _stage_of(func)
        if stage is not None:
            self.calls[stage].append(lambda: func(*args, **given))
        return func(*args, **given)


def _stage_of(func: Any) -> str | None:
    name = func.__name__.split(".")[0]
    if func.namespace == "aten":
        return "linear" if name in ("mm", "addmm", "bmm", "linear") else None
    if func.namespace == "latentkv":
        return "linear" if name == "linear_fp32" else OPS[name].stage
    return None


@lru_cache(maxsize=8)
def state(device: torch.device, requests: int, rows: int) -> State:
    """The step of a size, made once."""
    return State(device, requests, rows)


@contextmanager
def reference_ops(device: torch.device) -> Iterator[None]:
    """Every op of a step runs the reference, on a GPU too."""
    key = device.type.upper()
    library = torch.library.Library("latentkv", "IMPL")
    try:
        for name in STEP_OPS:
            reference = getattr(import_module(f"latentkv.reference.{OPS[name].stage}"), name)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # overriding is the point
                library.impl(name, reference, key, allow_override=True)
        yield
    finally:
        library._destroy()


def _fill(cache: ModelCache) -> None:
    """Random rows and keys on every page."""
    generator = torch.Generator(cache.device).manual_seed(0)
    pools = [(pool, cache.window_layout, 64) for pool in cache.window]
    pools += [(cache.rows[i], cache.row_layout, 128 // cache.config.ratios[i]) for i in cache.rows]
    for pool, layout, page_size in pools:
        for slots in _slots(pool.shape[0] * page_size, cache.device):
            rows = torch.randn(len(slots), LATENT_DIM, device=cache.device, generator=generator).bfloat16()
            lk.store_kv(rows, pool, slots, layout=layout, page_size=page_size)
    for keys in cache.keys.values():
        for slots in _slots(keys.payload.shape[0] * 64, cache.device):
            values = torch.randn(len(slots), INDEX_DIM, device=cache.device, generator=generator).bfloat16()
            lk.store_index_key_plain(values, keys, slots)


def _slots(count: int, device: torch.device) -> Sequence[torch.Tensor]:
    return torch.arange(count, device=device).split(FILL_ROWS)
