"""latentkv: the portable kernel library for DeepSeek-V4.1's latent key-value cache."""

from latentkv.layout import IndexKeyLayout, IndexQueryLayout, KVLayout
from latentkv.ops.checks import checked
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
    "IndexKeyLayout",
    "IndexQueryLayout",
    "KVLayout",
    "checked",
    "load_kv",
    "load_kv_pages",
    "new_kv_cache",
    "norm_rope_store_kv",
    "rope_fake_quant",
    "store_kv",
]
