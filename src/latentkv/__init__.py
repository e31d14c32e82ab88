"""latentkv: the portable kernel library for DeepSeek-V4.1's latent key-value cache."""

from latentkv.layout import IndexKeyLayout, IndexQueryLayout, KVLayout
from latentkv.ops.attend import Rows, merge_partials, sparse_mla
from latentkv.ops.checks import checked
from latentkv.ops.compress import compress1, compress2, compress2_prefill, pool_pairs
from latentkv.ops.index import (
    IndexKeyCache,
    dequantize_index,
    load_index_key,
    new_index_key_cache,
    pack_index_query,
    pack_index_query_weights,
    store_index_key,
    store_index_key_plain,
)
from latentkv.ops.route import head_weights, linear_fp32, route_topk, router_logits, router_partials
from latentkv.ops.select import (
    decode_schedule,
    index_logits,
    pad_page_table,
    prefill_schedule,
    schedule_workers,
    select_blocks,
    select_topk,
    select_topk_in_blocks,
)
from latentkv.ops.store import (
    load_kv,
    load_kv_pages,
    new_kv_cache,
    norm_rope_store_kv,
    rope_fake_quant,
    store_kv,
)

__version__ = "0.1.0"

__all__ = [
    "IndexKeyCache",
    "IndexKeyLayout",
    "IndexQueryLayout",
    "KVLayout",
    "Rows",
    "checked",
    "compress1",
    "compress2",
    "compress2_prefill",
    "decode_schedule",
    "dequantize_index",
    "head_weights",
    "index_logits",
    "linear_fp32",
    "load_index_key",
    "load_kv",
    "load_kv_pages",
    "merge_partials",
    "new_index_key_cache",
    "new_kv_cache",
    "norm_rope_store_kv",
    "pack_index_query",
    "pack_index_query_weights",
    "pad_page_table",
    "pool_pairs",
    "prefill_schedule",
    "rope_fake_quant",
    "route_topk",
    "router_logits",
    "router_partials",
    "schedule_workers",
    "select_blocks",
    "select_topk",
    "select_topk_in_blocks",
    "sparse_mla",
    "store_index_key",
    "store_index_key_plain",
    "store_kv",
]
