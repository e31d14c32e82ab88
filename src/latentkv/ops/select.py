"""Stage `select`: page-table padding, schedules, index logits over pages, top-k, candidate blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from latentkv._text import error_line
from latentkv.layout import INDEX_PAYLOAD_BYTES, IndexQueryLayout
from latentkv.ops import checks
from latentkv.ops._library import define
from latentkv.ops.index import HEAD_TILE, MAX_INDEX_HEADS, IndexKeyCache, check_cache
from latentkv.reference import select as reference
from latentkv.reference.index import FLYDSL_SCALE_SHAPE

MAX_TOPK = 2048
MAX_LENGTH = 2**31 - 1  # of a schedule's fields
MAX_WIDTH = 2**30  # of a row: its positions and those of a tile past its end are int32
CHUNK_PAGES = 4  # pages of a 256-key chunk; a reader may fetch table entries one chunk ahead
CPU_WORKERS = 1024
WORKERS_PER_MULTIPROCESSOR = 8


def pad_page_table(
    table: Tensor, *, bucket: int = 64, columns: int | None = None, page_size: int = 64
) -> tuple[Tensor, int]:
    """Widen a page table to a bucketed number of pages, so that few widths occur and a reader may run ahead.

    Args:
        table: int32 or int64 `[rows, width]`, any strides.
        bucket: the padded width is the next multiple of this, or 4 where that is more.
        columns: least columns of the result, None for no demand; they do not widen the logits.
        page_size: keys a page.

    Returns:
        The table int32 `[rows, padded width + 4 or columns]`, zero past `width`, and the keys that the padded width
        holds: the width of the logits. A page that int32 does not hold becomes -1, which no cache has.

    Raises:
        ValueError, TypeError: a bad table, a bucket or page size below 1.

    Semantics: sglang's `pad_page_table`.
    """
    table = checks.tensor("table", table, ("rows", "width"), checks.INTS, inner=False)
    bucket, page_size = checks.integer("bucket", bucket, 1), checks.integer("page_size", page_size, 1, MAX_LENGTH)
    columns = 0 if columns is None else checks.integer("columns", columns, 0)
    padded = max(CHUNK_PAGES, -(-table.shape[1] // bucket) * bucket)
    wide = torch.ops.latentkv.pad_page_table(table, max(padded + CHUNK_PAGES, columns))
    return wide, padded * page_size


def schedule_workers(rows: int, max_len: int, *, device: torch.device | str | None = None, next_n: int = 1) -> int:
    """Work units of a schedule that fill the device.

    Args:
        rows: rows of logits, or batch entries if `next_n` is given.
        max_len: keys of the longest row.
        device: the device; a GPU is asked for its multiprocessors.
        next_n: rows that share a batch entry's chunks.

    Returns:
        At least `rows * next_n` and a multiple of `next_n`: one unit for each 256 keys of each row, but no more than 8
        for each multiprocessor or 4 for each row, whichever is more. On the CPU 1024 stands for the former.

    Raises:
        ValueError, TypeError: a negative count, `next_n` below 1, a device that is not there.

    The number is this library's choice; the schedules that it sizes are aiter's and sglang's.
    """
    next_n, max_len = checks.integer("next_n", next_n, 1), checks.integer("max_len", max_len, 0)
    total = checks.integer("rows", rows, 0) * next_n
    fill = CPU_WORKERS
    if device is not None and (device := _device(device)).type == "cuda":
        fill = WORKERS_PER_MULTIPROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
    workers = min(total * max(1, -(-max_len // 256)), max(fill, 4 * total))
    return workers // next_n * next_n


def decode_schedule(
    lengths: Tensor, *, workers: int, max_len: int, block: int = 256, next_n: int = 1, out: Tensor | None = None
) -> Tensor:
    """Share the key chunks of decode rows among work units.

    Args:
        lengths: int32 or int64 `[B]`, keys a row sees, clamped to 0 ..= 2^31 - 1.
        workers: work units, a multiple of `next_n` and at least `B * next_n`; `schedule_workers` gives a good number.
        max_len: keys that a row may have.
        block: keys a chunk.
        next_n: consecutive rows that share a batch entry's chunks.
        out: int32 `[workers, 4]`, contiguous, written in place; allocated if None.

    Returns:
        int32 `[workers, 4]`: batch * next_n + n, first chunk, chunks, length. Units follow the rows, and within a row
        its chunks; a row of length 0 has none. The rest is `[0, 0, 1, 0]`.

    Raises:
        ValueError, TypeError: too few workers, not a multiple of `next_n`, bad shapes or dtypes.

    Every row is split into shares of equally many chunks, the fewest with which all shares find a worker; where even
    shares of `max_len` do not, every row is one share.

    Semantics: the variable-length schedule of aiter and sglang's `build_decode_schedule`, bit by bit.
    """
    lengths = checks.tensor("lengths", lengths, ("B",), checks.INTS, inner=False)
    next_n = checks.integer("next_n", next_n, 1)
    workers = checks.integer("workers", workers, 0)
    if workers % next_n:
        raise ValueError(f"workers: {workers} given, a multiple of next_n = {next_n} needed")
    workers, block, max_len = _check_schedule(workers, lengths.shape[0] * next_n, block, max_len)
    out = _schedule_output(out, workers, 4, lengths.device, lengths=lengths)
    torch.ops.latentkv.decode_schedule(lengths, max_len, block, next_n, out)
    return out


def prefill_schedule(
    lengths: Tensor,
    *,
    workers: int,
    max_len: int,
    block: int = 256,
    row_to_batch: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Share the key chunks of prefill rows among work units.

    Args:
        lengths: int32 or int64 `[T]`, keys a row sees, clamped to 0 ..= 2^31 - 1.
        workers: work units, at least T; `schedule_workers` gives a good number.
        max_len: keys that a row may have.
        block: keys a chunk.
        row_to_batch: int32 or int64 `[T]`, the page-table row of each row, -1 where int32 does not hold it; None: its
            own number.
        out: int32 `[workers, 6]`, contiguous, written in place; allocated if None.

    Returns:
        int32 `[workers, 6]`: row, batch, first chunk, chunks, first key (0), length; the rest is `[0, 0, 0, 1, 0, 0]`.

    Raises:
        ValueError, TypeError: too few workers, bad shapes or dtypes.

    Semantics: sglang's `build_prefill_schedule`; shares as in `decode_schedule`.
    """
    lengths = checks.tensor("lengths", lengths, ("T",), checks.INTS, inner=False)
    if row_to_batch is not None:
        shape = (lengths.shape[0],)
        row_to_batch = checks.tensor("row_to_batch", row_to_batch, shape, checks.INTS, lengths.device, inner=False)
    workers, block, max_len = _check_schedule(workers, lengths.shape[0], block, max_len)
    out = _schedule_output(out, workers, 6, lengths.device, lengths=lengths, row_to_batch=row_to_batch)
    torch.ops.latentkv.prefill_schedule(lengths, row_to_batch, max_len, block, out)
    return out


def index_logits(
    query: tuple[Tensor, Tensor],
    weights: Tensor,
    cache: IndexKeyCache,
    page_table: Tensor,
    lengths: Tensor,
    *,
    schedule: Tensor | None = None,
    max_len: int | None = None,
    fill: bool = True,
    row_to_batch: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Score every visible key of each row: the sum over heads of `relu(query . key) * weight`.

    Args:
        query: payload and scale as `pack_index_query` returns them, in either layout.
        weights: bf16 or fp32 `[T, H]`, head weights with every factor in them; last stride 1.
        cache: the keys.
        page_table: int32 `[B, W]`, last stride 1: pages of each sequence. Entries that no length reaches are never
            looked at; a page outside the cache reads as zero keys.
        lengths: int32 or int64 `[T]`, keys a row sees, clamped to 0 ..= min(max_len, W * page_size).
        schedule: what `decode_schedule` or `prefill_schedule` returned for these lengths. It never changes a logit, and
            this version's kernels share out their work without it.
        max_len: columns; `W * page_size` if None.
        fill: whether columns past a row's length become -inf; otherwise they are left as they are.
        row_to_batch: int32 or int64 `[T]`, the page-table row of each row; a row outside the table sees no key. None:
            T is a multiple of B, and row t has page-table row `t // (T / B)`.
        out: fp32 `[T, max_len]`, last stride 1, written in place; allocated if None.

    Returns:
        fp32 `[T, max_len]`. A key with a NaN or Inf group has NaN logits, and so has every logit of such a query.

    Raises:
        ValueError, TypeError: bad shapes, strides or dtypes.

    Bit contract, for every path: a group's dot product of 32 values is exact (a multiple of 1/4 below 1153 in units of
    its two scales), the four are added as ((g0 + g1) + g2) + g3, then relu, then the product with the weight. The
    heads, padded with zeros to a power of two, are summed by adding the upper half to the lower until one is left, then
    +0. Each of these is one fp32 rounding, nothing is contracted. It holds while no group's dot leaves fp32's normal
    range, nor a weight times a scale of its query's head (the largest, over 2^6): always for what this library's
    writers store below 2^60 and weights that are 0 or of 2^-100 .. 2^60.

    Semantics: the FP4 paged index logits of DeepGEMM and aiter, DeepSeek-V4.1.
    """
    weights = checks.tensor("weights", weights, ("T", "H"), (torch.bfloat16, torch.float32))
    device, (rows, heads) = weights.device, weights.shape
    payload, scale, layout = _check_packed_query(query, rows, heads, device)
    cache = check_cache(cache, device)
    page_table = checks.tensor("page_table", page_table, ("B", "W"), (torch.int32,), device)
    lengths = checks.tensor("lengths", lengths, (rows,), checks.INTS, device, inner=False)
    row_to_batch = _check_batches(row_to_batch, rows, page_table)
    if schedule is not None:
        fields = 6 if isinstance(schedule, Tensor) and schedule.shape[-1:] == (6,) else 4
        schedule = checks.tensor("schedule", schedule, ("workers", fields), (torch.int32,), device, contiguous=True)
    out = _logits_output(out, rows, page_table.shape[1] * cache.page_size if max_len is None else max_len, device)
    checks.apart(
        "out", out, query=payload, query_scale=scale, weights=weights, cache=cache.payload, cache_scale=cache.scale,
        page_table=page_table, lengths=lengths, row_to_batch=row_to_batch,
    )  # fmt: skip
    fill = checks.flag("fill", fill)
    _check_pages_in_use(page_table, lengths, out.shape[1], row_to_batch, cache)
    torch.ops.latentkv.index_logits(
        payload, scale, weights, cache.payload, cache.scale, page_table, lengths, row_to_batch, schedule, fill,
        layout.value, cache.layout.value, cache.page_size, out,
    )  # fmt: skip
    return out


def select_topk(
    logits: Tensor,
    lengths: Tensor,
    k: int,
    *,
    page_table: Tensor | None = None,
    page_size: int = 64,
    row_to_batch: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Select the k largest logits of each row, exactly.

    Args:
        logits: fp32 `[T, width]`, last stride 1, any row stride; at most 2^30 wide.
        lengths: int32 or int64 `[T]`, entries of each row, clamped to 0 ..= width; columns past it are never read.
        k: 1 to 2048.
        page_table: int32 `[B, W]`, last stride 1, to translate positions to slots; None: slots are positions.
        page_size: keys a page.
        row_to_batch: int32 or int64 `[T]`, the page-table row of each row. None: T is a multiple of B, and row t has
            page-table row `t // (T / B)`.

    Returns:
        positions int32 `[T, k]` and slots int32 `[T, k]`, ascending by position, -1 behind the last. A slot is also -1
        where the page table has no such row or column or a negative page, or where int32 does not hold the slot.

    Raises:
        ValueError, TypeError: bad shapes, strides or dtypes, k out of range.

    Among equal logits (+0 equals -0) the lower position wins. A row of at most k entries selects all of them, whatever
    they hold. NaN counts as -inf: in a longer row such entries are taken only after all others, so that the positions
    are distinct members of the row, whatever the logits are.

    Semantics: DeepSeek-V4.1's index selection; upstream leaves order and ties open, this library does not.
    """
    logits, lengths = _check_logits(logits, lengths)
    k, page_size = checks.integer("k", k, 1, MAX_TOPK), checks.integer("page_size", page_size, 1, MAX_LENGTH)
    row_to_batch = _check_table(page_table, row_to_batch, logits.shape[0], logits.device)
    return torch.ops.latentkv.select_topk(logits, lengths, k, page_table, row_to_batch, page_size)


def select_blocks(logits: Tensor, lengths: Tensor, *, blocks: int, block_size: int = 8) -> Tensor:
    """Select the candidate blocks of each row by their largest logit.

    Args:
        logits: fp32 `[T, width]`, last stride 1, any row stride; at most 2^30 wide.
        lengths: int32 or int64 `[T]`, entries of each row, clamped to 0 ..= width; columns past it are never read.
        blocks: blocks to keep, 1 to 2048.
        block_size: consecutive positions a block, a power of two.

    Returns:
        int32 `[T, blocks]`: ids ascending, -1 behind the last.

    Raises:
        ValueError, TypeError: bad shapes, strides or dtypes, counts out of range.

    The newest block, which holds position length - 1, is always kept. Of the others those with the largest maxima over
    visible positions are, NaN ignored, the lower id among equals. A row of at most `blocks` blocks keeps all of them.

    Semantics: the first level of DeepSeek-V4.1's candidate selection.
    """
    logits, lengths = _check_logits(logits, lengths)
    blocks, block_size = checks.integer("blocks", blocks, 1, MAX_TOPK), checks.power_of_two("block_size", block_size)
    return torch.ops.latentkv.select_blocks(logits, lengths, blocks, block_size)


def select_topk_in_blocks(
    logits: Tensor,
    lengths: Tensor,
    block_ids: Tensor,
    k: int,
    *,
    block_size: int = 8,
    page_table: Tensor | None = None,
    page_size: int = 64,
    row_to_batch: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Select the k largest logits of each row among the positions of kept blocks, exactly.

    Args:
        logits: fp32 `[T, width]` by position, last stride 1, any row stride; at most 2^30 wide.
        lengths: int32 or int64 `[T]`, entries of each row, clamped to 0 ..= width.
        block_ids: int32 `[T, blocks]`, last stride 1, in any order. One outside the row is skipped and one that occurs
            twice counts once.
        k: 1 to 2048.
        block_size: consecutive positions a block, a power of two.
        page_table: int32 `[B, W]`, last stride 1, to translate positions to slots; None: slots are positions.
        page_size: keys a page.
        row_to_batch: as in `select_topk`.

    Returns:
        positions int32 `[T, k]` and slots int32 `[T, k]` as `select_topk` returns them. A row with at most k positions
        in kept blocks selects all of them.

    Raises:
        ValueError, TypeError: bad shapes, strides or dtypes, counts out of range.

    Semantics: the second level of DeepSeek-V4.1's candidate selection.
    """
    logits, lengths = _check_logits(logits, lengths)
    k, page_size = checks.integer("k", k, 1, MAX_TOPK), checks.integer("page_size", page_size, 1, MAX_LENGTH)
    block_size = checks.power_of_two("block_size", block_size)
    block_ids = checks.tensor("block_ids", block_ids, (logits.shape[0], "blocks"), (torch.int32,), logits.device)
    row_to_batch = _check_table(page_table, row_to_batch, logits.shape[0], logits.device)
    return torch.ops.latentkv.select_topk_in_blocks(
        logits, lengths, block_ids, k, block_size, page_table, row_to_batch, page_size
    )


# --- checks -----------------------------------------------------------------------------------------------------------


def _device(device: torch.device | str) -> torch.device:
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device: {device!r} given ({error_line(error)})") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device: {device} given, PyTorch sees {torch.cuda.device_count()} such devices here")
    return device


def _check_schedule(workers: int, rows: int, block: int, max_len: int) -> tuple[int, int, int]:
    workers = checks.integer("workers", workers, 0)
    if workers < rows:
        raise ValueError(f"workers: {workers} given, at least one for each of {rows} rows needed")
    block = checks.integer("block", block, 1, MAX_LENGTH)
    return workers, block, min(checks.integer("max_len", max_len, 0), MAX_LENGTH)


def _schedule_output(
    out: Tensor | None, workers: int, fields: int, device: torch.device, **read: Tensor | None
) -> Tensor:
    if out is None:
        return torch.empty(workers, fields, dtype=torch.int32, device=device)
    out = checks.tensor("out", out, (workers, fields), (torch.int32,), device, contiguous=True)
    checks.apart("out", out, **read)
    return out


def _check_packed_query(
    query: tuple[Tensor, Tensor], rows: int, heads: int, device: torch.device
) -> tuple[Tensor, Tensor, IndexQueryLayout]:
    if not isinstance(query, tuple | list) or len(query) != 2 or not isinstance(query[1], Tensor):
        raise TypeError("query: a pair (payload, scale) needed, as pack_index_query returns it")
    payload, scale = query
    checks.tensor("query scale", scale, tuple(scale.shape), (torch.int32, torch.uint8), inner=False)
    unit = HEAD_TILE if scale.dtype == torch.uint8 else 1
    if not 0 < heads <= MAX_INDEX_HEADS or heads % unit:
        raise ValueError(f"weights: {heads} heads given, a multiple of {unit} up to {MAX_INDEX_HEADS} accepted")
    if scale.dtype == torch.int32:
        layout = IndexQueryLayout.PACKED
        scale_shape: tuple[int, ...] = (rows * heads,)
        payload_shape: tuple[int, ...] = (rows * heads, INDEX_PAYLOAD_BYTES)
        if isinstance(payload, Tensor) and tuple(payload.shape) == (rows, heads, INDEX_PAYLOAD_BYTES):
            payload = payload.flatten(0, 1)
        scale = scale.flatten() if tuple(scale.shape) == (rows, heads) else scale
    else:
        layout = IndexQueryLayout.FLYDSL
        scale_shape = (rows, *FLYDSL_SCALE_SHAPE)
        payload_shape = (rows, heads, INDEX_PAYLOAD_BYTES)
    payload = checks.tensor("query payload", payload, payload_shape, (torch.int8,), device, contiguous=True)
    dtypes = (torch.int32,) if layout is IndexQueryLayout.PACKED else (torch.uint8,)
    return payload, checks.tensor("query scale", scale, scale_shape, dtypes, device, contiguous=True), layout


def _check_batches(row_to_batch: Tensor | None, rows: int, page_table: Tensor) -> Tensor | None:
    if row_to_batch is not None:
        return checks.tensor("row_to_batch", row_to_batch, (rows,), checks.INTS, page_table.device, inner=False)
    batches = page_table.shape[0]
    if rows and (batches == 0 or rows % batches):
        raise ValueError(
            f"page_table: {batches} rows given for {rows} rows; without row_to_batch they must divide them"
        )
    return None


def _check_pages_in_use(
    page_table: Tensor, lengths: Tensor, max_len: int, row_to_batch: Tensor | None, cache: IndexKeyCache
) -> None:
    """In checked mode, every page that a length reaches must be in the cache."""
    if not checks.is_checked() or page_table.numel() == 0:
        return
    batches, width = page_table.shape
    if row_to_batch is None:
        row_to_batch = torch.arange(batches, device=lengths.device).repeat_interleave(lengths.shape[0] // batches)
    reached = torch.arange(width, device=lengths.device) * cache.page_size < lengths.clamp(max=max_len).unsqueeze(1)
    known = (row_to_batch >= 0) & (row_to_batch < batches)
    pages = page_table[row_to_batch[known].long()][reached[known]]
    foreign = pages[(pages < 0) | (pages >= cache.num_pages)]
    if foreign.numel():
        raise ValueError(f"page_table: {int(foreign[0])} is outside the cache's pages 0..{cache.num_pages - 1}")


def _logits_output(out: Tensor | None, rows: int, max_len: int, device: torch.device) -> Tensor:
    max_len = checks.integer("max_len", max_len, 0, MAX_LENGTH)
    if out is None:
        return torch.empty(rows, max_len, dtype=torch.float32, device=device)
    return checks.output("out", out, (rows, max_len), torch.float32, device)


def _check_logits(logits: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    logits = checks.tensor("logits", logits, ("T", "width"), (torch.float32,))
    if logits.shape[1] > MAX_WIDTH:
        raise ValueError(f"logits: a width of {logits.shape[1]} given, at most {MAX_WIDTH} accepted")
    return logits, checks.tensor("lengths", lengths, (logits.shape[0],), checks.INTS, logits.device, inner=False)


def _check_table(
    page_table: Tensor | None, row_to_batch: Tensor | None, rows: int, device: torch.device
) -> Tensor | None:
    if page_table is None:
        if row_to_batch is not None:
            raise ValueError("row_to_batch: given without a page_table")
        return None
    page_table = checks.tensor("page_table", page_table, ("B", "W"), (torch.int32,), device)
    return _check_batches(row_to_batch, rows, page_table)


# --- registration -----------------------------------------------------------------------------------------------------


def _fake_pair(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], k)
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape, dtype=torch.int32)


define(
    "select",
    "pad_page_table(Tensor table, int columns) -> Tensor",
    reference.pad_page_table,
    lambda table, columns: table.new_empty((table.shape[0], columns), dtype=torch.int32),
)
define(
    "select",
    "decode_schedule(Tensor lengths, int max_len, int block, int next_n, Tensor(a!) out) -> ()",
    reference.decode_schedule,
    lambda *args: None,
    kernel="decode_schedule",
)
define(
    "select",
    "prefill_schedule(Tensor lengths, Tensor? row_to_batch, int max_len, int block, Tensor(a!) out) -> ()",
    reference.prefill_schedule,
    lambda *args: None,
    kernel="prefill_schedule",
)
define(
    "select",
    "index_logits(Tensor query, Tensor query_scale, Tensor weights, Tensor payload, Tensor? scale, Tensor page_table, "
    "Tensor lengths, Tensor? row_to_batch, Tensor? schedule, bool fill, str query_layout, str layout, int page_size, "
    "Tensor(a!) out) -> ()",
    reference.index_logits,
    lambda *args: None,
    kernel="index_logits",
)
define(
    "select",
    "select_topk(Tensor logits, Tensor lengths, int k, Tensor? page_table, Tensor? row_to_batch, int page_size) "
    "-> (Tensor, Tensor)",
    reference.select_topk,
    lambda logits, lengths, k, *args: _fake_pair(logits, k),
    kernel="select_topk",
)
define(
    "select",
    "select_blocks(Tensor logits, Tensor lengths, int blocks, int block_size) -> Tensor",
    reference.select_blocks,
    lambda logits, lengths, blocks, block_size: logits.new_empty((logits.shape[0], blocks), dtype=torch.int32),
    kernel="select_blocks",
)
define(
    "select",
    "select_topk_in_blocks(Tensor logits, Tensor lengths, Tensor block_ids, int k, int block_size, Tensor? page_table, "
    "Tensor? row_to_batch, int page_size) -> (Tensor, Tensor)",
    reference.select_topk_in_blocks,
    lambda logits, lengths, block_ids, k, *args: _fake_pair(logits, k),
    kernel="select_topk_in_blocks",
)
