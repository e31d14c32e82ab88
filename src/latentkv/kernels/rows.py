"""Device functions on paged rows: write and read pairs of a row through its slot; a row's rotation angles.

Every stage that touches latent pages uses these. `data_stride` is the page stride in encoded pairs where PAGE_WORDS
says that pages hold aligned pairs, else in bytes; the layout's constexprs come from `launch.layout_constants`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from latentkv.kernels import device as dev
from latentkv.kernels import quantizers


@triton.jit
def angles(
    freqs, freqs_stride, max_positions, positions, positions_stride, row, live, BY_POSITION: tl.constexpr,
    FREQ_WORDS: tl.constexpr,
):  # fmt: skip
    """cos and sin [rows, 32] of each row; a position outside the table reads row 0."""
    if BY_POSITION:
        at = tl.load(positions + row * positions_stride, mask=live, other=0).to(tl.int64)
        at = tl.where((at >= 0) & (at < max_positions), at, 0)
    else:
        at = row
    table = dev.pair_pointer(freqs, FREQ_WORDS)
    step = (at * freqs_stride)[:, None]
    return dev.load_pairs(table, step, tl.arange(0, 32)[None, :], live[:, None], tl.float32, FREQ_WORDS)


@triton.jit
def write_pairs(
    re,
    im,
    first,
    LIMIT: tl.constexpr,
    cache,
    page_stride,
    data_stride,
    slot,
    written,
    ENCODING: tl.constexpr,
    PAGE_SHIFT: tl.constexpr,
    DATA_STEP: tl.constexpr,
    SCALE_BASE: tl.constexpr,
    SCALE_STEP: tl.constexpr,
    PAGE_WORDS: tl.constexpr,
    LATENT: tl.constexpr,
    NARROW: tl.constexpr,
    CAST: tl.constexpr,
):
    """Quantize pieces of rows, fp32 pairs `first` .. of each, and write data and scales of pairs below LIMIT.

    LATENT rows hold fp4 numerics also in the pages of fp8 layouts.
    """
    ROWS: tl.constexpr = re.shape[0]
    PAIRS: tl.constexpr = re.shape[1]
    FUSED: tl.constexpr = LATENT and ENCODING == "v41" and NARROW == 8 and CAST == dev.E4M3_CAST
    if LATENT and not FUSED and (ENCODING == "v41" or ENCODING == "v4"):
        re, im = tl.reshape(re, [ROWS, PAIRS // 8, 8]), tl.reshape(im, [ROWS, PAIRS // 8, 8])
        re, im = quantizers.fake_quant_latent(re, im, NARROW)
        re, im = tl.reshape(re, [ROWS, PAIRS]), tl.reshape(im, [ROWS, PAIRS])
    pair = first[:, None] + tl.arange(0, PAIRS)[None, :]
    mask = written[:, None] & (pair < LIMIT)
    slot = tl.where(written, slot, 0)
    page, offset = slot >> PAGE_SHIFT, slot & ((1 << PAGE_SHIFT) - 1)
    data = (page * data_stride)[:, None]
    step = (offset * DATA_STEP)[:, None]
    scales = cache + (page * page_stride + SCALE_BASE + offset * SCALE_STEP)[:, None]
    if ENCODING == "bf16":
        _store_bf16(cache, data, step, pair, re, im, mask, PAGE_WORDS)
    elif ENCODING == "v4":
        word, scale = quantizers.quantize_v4(
            tl.reshape(re, [ROWS, PAIRS // 32, 32]), tl.reshape(im, [ROWS, PAIRS // 32, 32]), NARROW, CAST
        )
        _store_e4m3(cache, data, step, pair, tl.reshape(word, [ROWS, PAIRS]), mask & (pair < 224), PAGE_WORDS)
        group = (first // 32)[:, None] + tl.arange(0, PAIRS // 32)[None, :]  # the eighth byte is padding, zero
        tl.store(scales + group, tl.where(group < 7, scale, 0).to(tl.uint8), mask=written[:, None])
        if LIMIT == 256:  # bf16 values behind 448 bytes of codes, in bytes: half of them stand at odd words
            at = cache + (page * page_stride + offset * DATA_STEP - 448)[:, None] + 4 * pair
            _store_bytes(at, dev.bf16_bits(re) | (dev.bf16_bits(im) << 16), mask & (pair >= 224), 4)
    else:
        SIZE: tl.constexpr = 8 if ENCODING == "v41_fp4" else 16  # pairs of a group
        SPLIT: tl.constexpr = 8 if FUSED else SIZE
        re = tl.reshape(re, [ROWS, PAIRS // SPLIT, SPLIT])
        im = tl.reshape(im, [ROWS, PAIRS // SPLIT, SPLIT])
        if ENCODING == "v41":
            if FUSED:
                word, scale = quantizers.quantize_latent_v41(re, im)
            else:
                word, scale = quantizers.quantize_v41(re, im, NARROW, CAST)
            _store_e4m3(cache, data, step, pair, tl.reshape(word, [ROWS, PAIRS]), mask, PAGE_WORDS)
        else:
            if ENCODING == "v41_fp4":
                byte, scale = quantizers.quantize_v41_fp4(re, im, NARROW, CAST)
            else:
                byte, scale = quantizers.quantize_v41_mxfp4(re, im, NARROW, CAST)
            tl.store(cache + data + step + pair, tl.reshape(byte, [ROWS, PAIRS]), mask=mask)
        group = (first // SIZE)[:, None] + tl.arange(0, PAIRS // SIZE)[None, :]
        tl.store(scales + group, scale.to(tl.uint8), mask=written[:, None] & (group < LIMIT // SIZE))


@triton.jit
def _store_e4m3(cache, page, step, pair, word, mask, PAGE_WORDS: tl.constexpr):
    if PAGE_WORDS:
        at = cache.to(tl.pointer_type(tl.int16)) + page + step // 2 + pair
        tl.store(at, word.to(tl.int16), mask=mask)
    else:
        _store_bytes(cache + page + step + 2 * pair, word, mask, 2)


@triton.jit
def _store_bf16(cache, page, step, pair, re, im, mask, PAGE_WORDS: tl.constexpr):
    word = dev.bf16_bits(re) | (dev.bf16_bits(im) << 16)
    if PAGE_WORDS:
        tl.store(cache.to(tl.pointer_type(tl.int32)) + page + step // 4 + pair, word, mask=mask)
    else:
        _store_bytes(cache + page + step + 4 * pair, word, mask, 4)


@triton.jit
def _store_bytes(at, word, mask, COUNT: tl.constexpr):
    for byte in tl.static_range(COUNT):
        tl.store(at + byte, ((word >> (8 * byte)) & 0xFF).to(tl.uint8), mask=mask)


@triton.jit
def read_pairs(
    cache,
    page_stride,
    data_stride,
    slot,
    live,
    ENCODING: tl.constexpr,
    PAGE_SHIFT: tl.constexpr,
    DATA_STEP: tl.constexpr,
    SCALE_BASE: tl.constexpr,
    SCALE_STEP: tl.constexpr,
    PAGE_WORDS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """fp32 pairs [ROWS, 256] of live rows, zeros elsewhere."""
    slot = tl.where(live, slot, 0)
    page, offset = slot >> PAGE_SHIFT, slot & ((1 << PAGE_SHIFT) - 1)
    data = (page * data_stride)[:, None]
    step = (offset * DATA_STEP)[:, None]
    scales = cache + (page * page_stride + SCALE_BASE + offset * SCALE_STEP)[:, None]
    mask = live[:, None]
    pair = tl.arange(0, 256)[None, :]
    if ENCODING == "bf16":
        re, im = dev.split_bf16(_load_bf16(cache, data, step, pair, mask, PAGE_WORDS))
    elif ENCODING == "v41" or ENCODING == "v4":
        GROUPS: tl.constexpr = 16 if ENCODING == "v41" else 8
        group = tl.arange(0, GROUPS)[None, :]
        coded = mask if ENCODING == "v41" else mask & (pair < 224)
        word = _load_e4m3(cache, data, step, pair, coded, PAGE_WORDS)
        scale = dev.ue8m0_decode(tl.load(scales + group, mask=mask, other=0).to(tl.int32))[:, :, None]
        re = tl.reshape(dev.e4m3_decode(word & 0xFF), [ROWS, GROUPS, 256 // GROUPS]) * scale
        im = tl.reshape(dev.e4m3_decode((word >> 8) & 0xFF), [ROWS, GROUPS, 256 // GROUPS]) * scale
        re, im = tl.reshape(re, [ROWS, 256]), tl.reshape(im, [ROWS, 256])
        if ENCODING == "v4":
            at = cache + (page * page_stride + offset * DATA_STEP - 448)[:, None] + 4 * pair
            if PAGE_WORDS:
                tail = tl.load(at.to(tl.pointer_type(tl.int32)), mask=mask & (pair >= 224), other=0)
            else:
                tail = _load_bytes(at, mask & (pair >= 224), 4)
            tail_re, tail_im = dev.split_bf16(tail)
            re, im = tl.where(pair >= 224, tail_re, re), tl.where(pair >= 224, tail_im, im)
    else:
        byte = tl.load(cache + data + step + pair, mask=mask, other=0).to(tl.int32)
        COUNT: tl.constexpr = 32 if ENCODING == "v41_fp4" else 16
        scale = tl.load(scales + tl.arange(0, COUNT)[None, :], mask=mask, other=0).to(tl.int32)
        if ENCODING == "v41_fp4":
            scale = dev.e4m3_decode(scale)[:, :, None]
        else:
            scale = dev.ue8m0_decode(scale)[:, :, None]
        re = tl.reshape(dev.e2m1_decode(byte & 0xF), [ROWS, COUNT, 256 // COUNT]) * scale
        im = tl.reshape(dev.e2m1_decode(byte >> 4), [ROWS, COUNT, 256 // COUNT]) * scale
        re, im = tl.reshape(re, [ROWS, 256]), tl.reshape(im, [ROWS, 256])
    return tl.where(mask, re, 0.0), tl.where(mask, im, 0.0)


@triton.jit
def _load_e4m3(cache, page, step, pair, mask, PAGE_WORDS: tl.constexpr):
    if PAGE_WORDS:
        return tl.load(cache.to(tl.pointer_type(tl.int16)) + page + step // 2 + pair, mask=mask, other=0).to(tl.int32)
    else:
        return _load_bytes(cache + page + step + 2 * pair, mask, 2)


@triton.jit
def _load_bf16(cache, page, step, pair, mask, PAGE_WORDS: tl.constexpr):
    if PAGE_WORDS:
        return tl.load(cache.to(tl.pointer_type(tl.int32)) + page + step // 4 + pair, mask=mask, other=0)
    else:
        return _load_bytes(cache + page + step + 4 * pair, mask, 4)


@triton.jit
def _load_bytes(at, mask, COUNT: tl.constexpr):
    word = tl.load(at, mask=mask, other=0).to(tl.int32)
    for byte in tl.static_range(1, COUNT):
        word = word | (tl.load(at + byte, mask=mask, other=0).to(tl.int32) << (8 * byte))
    return word
