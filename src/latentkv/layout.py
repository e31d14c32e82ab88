"""Byte layouts of cache pages: sizes, groups and addressing. No tensors.

This is the only place that knows where a byte is. The key-value layouts are those of FlashMLA's V4 / V4.1 sparse
kernels, the index layouts those of DeepGEMM (`FUSED`) and aiter's FlyDSL kernels (`SPLIT64`, `SPLIT8`, `FLYDSL`);
docs/formats.md describes them with worked addresses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar

LATENT_DIM = 512
ROPE_DIM = 64
NOPE_DIM = LATENT_DIM - ROPE_DIM
INDEX_DIM = 128
INDEX_GROUP = 32
INDEX_PAYLOAD_BYTES = INDEX_DIM // 2
INDEX_SCALE_BYTES = INDEX_DIM // INDEX_GROUP
INDEX_ROW_BYTES = INDEX_PAYLOAD_BYTES + INDEX_SCALE_BYTES


class Element(Enum):
    """The stored form of one value; `bits` is its width."""

    E2M1 = "e2m1"
    E4M3 = "e4m3"
    BF16 = "bf16"

    @property
    def bits(self) -> int:
        """Bits of one value."""
        return {"e2m1": 4, "e4m3": 8, "bf16": 16}[self.value]


class Scale(Enum):
    """The stored form of a group's scale: one byte, or nothing."""

    UE8M0 = "ue8m0"
    E4M3 = "e4m3"
    NONE = "none"


@dataclass(frozen=True)
class KVLayout:
    """How a latent row of 512 values lies in a page.

    Members are `KVLayout.V4`, `.V41`, `.V41_FP4`, `.V41_MXFP4` and `.BF16`; `V41` and `V41_FP4` also have an
    `.interleaved` form in which a row's scales follow its data.
    """

    name: str
    element: Element
    scale: Scale
    group_size: int  # values sharing a scale
    tail_values: int  # last values of a row, kept as bf16 behind the quantized ones
    scale_pad: int  # zero bytes closing a row's scales
    page_unit_bytes: int  # a split page is padded to a multiple of this
    is_interleaved: bool = False

    V4: ClassVar[KVLayout]
    V41: ClassVar[KVLayout]
    V41_FP4: ClassVar[KVLayout]
    V41_MXFP4: ClassVar[KVLayout]
    BF16: ClassVar[KVLayout]

    @property
    def quantized_values(self) -> int:
        """Leading values of a row that are stored through `element`."""
        return LATENT_DIM - self.tail_values

    @property
    def groups(self) -> int:
        """Scales of a row."""
        return 0 if self.scale is Scale.NONE else self.quantized_values // self.group_size

    @property
    def pair_bytes(self) -> int:
        """Bytes of two quantized values."""
        return 2 * self.element.bits // 8

    @property
    def payload_bytes(self) -> int:
        """Bytes of a row's quantized values, before a bf16 tail."""
        return self.quantized_values * self.element.bits // 8

    @property
    def data_bytes(self) -> int:
        """Bytes of a row's values."""
        return self.payload_bytes + self.tail_values * 2

    @property
    def scale_bytes(self) -> int:
        """Bytes of a row's scales, padding included."""
        return self.groups + self.scale_pad

    @property
    def row_bytes(self) -> int:
        """Bytes of a row: values and scales."""
        return self.data_bytes + self.scale_bytes

    @property
    def interleaved(self) -> KVLayout:
        """The same encoding with each row's scales directly behind its data (V41 and V41_FP4 only)."""
        if self.is_interleaved:
            return self
        if self.name not in _INTERLEAVABLE:
            raise NotImplementedError(f"{self.name} has no interleaved form; {', '.join(sorted(_INTERLEAVABLE))} have")
        return replace(self, name=self.name + "_interleaved", is_interleaved=True)

    @property
    def split(self) -> KVLayout:
        """The same encoding with a page's scales behind all of its data."""
        return replace(self, name=self.name.removesuffix("_interleaved"), is_interleaved=False)

    def page_bytes(self, page_size: int) -> int:
        """Bytes of a page of `page_size` rows, padding included."""
        _check_page_size(page_size)
        used = page_size * self.row_bytes
        return used if self.is_interleaved else -(-used // self.page_unit_bytes) * self.page_unit_bytes

    def data_in_page(self, offset: int, page_size: int) -> int:
        """Byte of row `offset`'s first value, counted from its page's start."""
        return offset * (self.row_bytes if self.is_interleaved else self.data_bytes)

    def scale_in_page(self, offset: int, page_size: int) -> int:
        """Byte of row `offset`'s first scale, counted from its page's start."""
        if self.is_interleaved:
            return offset * self.row_bytes + self.data_bytes
        return page_size * self.data_bytes + offset * self.scale_bytes

    def data_offset(self, slot: int, page_size: int, page_stride: int | None = None) -> int:
        """Byte of a slot's first value, counted from the cache's start; `page_stride` defaults to `page_bytes`."""
        page, offset = self._locate(slot, page_size)
        return page * self._stride(page_size, page_stride) + self.data_in_page(offset, page_size)

    def scale_offset(self, slot: int, page_size: int, page_stride: int | None = None) -> int:
        """Byte of a slot's first scale, counted from the cache's start; `page_stride` defaults to `page_bytes`."""
        page, offset = self._locate(slot, page_size)
        return page * self._stride(page_size, page_stride) + self.scale_in_page(offset, page_size)

    @classmethod
    def members(cls) -> tuple[KVLayout, ...]:
        """Every layout, interleaved forms included."""
        return _MEMBERS

    @classmethod
    def parse(cls, name: str | KVLayout) -> KVLayout:
        """The layout of a name such as "v41_fp4" or "V41 interleaved"; a layout is returned as it is.

        Raises:
            ValueError: no layout has this name.
        """
        if isinstance(name, KVLayout):
            return name
        key = str(name).strip().lower().replace("-", "_").replace(" ", "_").replace(".", "_")
        for member in _MEMBERS:
            if member.name == key:
                return member
        raise ValueError(f"layout: {name!r} is none of {', '.join(m.name for m in _MEMBERS)}")

    def pairs_with(self, extra: KVLayout) -> bool:
        """Whether a reader takes window rows of this layout together with selected rows of `extra`."""
        same_kind = {self.split.name, extra.split.name} == {"v41", "v41_fp4"}
        return self == extra or (same_kind and self.is_interleaved == extra.is_interleaved)

    def __str__(self) -> str:
        return self.name

    def _locate(self, slot: int, page_size: int) -> tuple[int, int]:
        _check_page_size(page_size)
        if slot < 0:
            raise ValueError(f"slot: {slot} is negative")
        return divmod(slot, page_size)

    def _stride(self, page_size: int, page_stride: int | None) -> int:
        need = self.page_bytes(page_size)
        if page_stride is None:
            return need
        if page_stride < need:
            raise ValueError(
                f"page_stride: {page_stride} is below the {need} bytes of a page of {page_size} {self} rows"
            )
        return page_stride


def _check_page_size(page_size: int) -> None:
    if page_size < 1 or page_size & (page_size - 1):
        raise ValueError(f"page_size: {page_size} is not a power of two")


KVLayout.V4 = KVLayout("v4", Element.E4M3, Scale.UE8M0, 64, ROPE_DIM, 1, 576)
KVLayout.V41 = KVLayout("v41", Element.E4M3, Scale.UE8M0, 32, 0, 0, 512)
KVLayout.V41_FP4 = KVLayout("v41_fp4", Element.E2M1, Scale.E4M3, 16, 0, 0, 256)
KVLayout.V41_MXFP4 = KVLayout("v41_mxfp4", Element.E2M1, Scale.UE8M0, 32, 0, 0, 256)
KVLayout.BF16 = KVLayout("bf16", Element.BF16, Scale.NONE, LATENT_DIM, 0, 0, 1024)
_INTERLEAVABLE = {"v41", "v41_fp4"}
_MEMBERS = (
    KVLayout.V4,
    KVLayout.V41,
    KVLayout.V41_FP4,
    KVLayout.V41_MXFP4,
    KVLayout.BF16,
    KVLayout.V41.interleaved,
    KVLayout.V41_FP4.interleaved,
)


class IndexKeyLayout(Enum):
    """How a page of FP4 index keys lies in memory.

    `FUSED`: uint8 `[pages, P * 68]`, all payload rows, then all scale words (DeepGEMM), P 64 or 128. `SPLIT64`: payload
    `[pages, 1, 4, 64, 16]` and scale `[pages, 1, 4, 64]` (aiter's FlyDSL), P 64. `SPLIT8`: the same tensors, filled as
    eight consecutive pages of 8 slots.
    """

    FUSED = "fused"
    SPLIT64 = "split64"
    SPLIT8 = "split8"

    @property
    def page_sizes(self) -> tuple[int, ...]:
        """Page sizes that this layout has."""
        return (64, 128) if self is IndexKeyLayout.FUSED else (64,)

    def page_bytes(self, page_size: int = 64) -> int:
        """Bytes of a page: of the one tensor, or of payload and scale together."""
        self._check(page_size)
        return page_size * INDEX_ROW_BYTES

    def payload_in_page(self, offset: int, dim: int, page_size: int = 64) -> int:
        """Byte of value `dim` of row `offset` in its payload page; an even `dim` is the low nibble."""
        self._check(page_size)
        group, byte = dim // INDEX_GROUP, (dim % INDEX_GROUP) // 2
        if self is IndexKeyLayout.FUSED:
            return offset * INDEX_PAYLOAD_BYTES + dim // 2
        if self is IndexKeyLayout.SPLIT64:
            return group * 1024 + offset * 16 + byte
        page8, row = divmod(offset, 8)
        return page8 * 512 + ((row % 4) * 4 + group) * 32 + (row // 4) * 16 + byte

    def scale_in_page(self, offset: int, group: int, page_size: int = 64) -> int:
        """Byte of the scale of `group` (0..3) of row `offset`, in the fused page or in the scale page."""
        self._check(page_size)
        if self is IndexKeyLayout.FUSED:
            return page_size * INDEX_PAYLOAD_BYTES + offset * INDEX_SCALE_BYTES + group
        if self is IndexKeyLayout.SPLIT64:
            return group * 64 + (offset % 16) * 4 + offset // 16
        page8, row = divmod(offset, 8)
        return page8 * 32 + group * 8 + row

    @classmethod
    def parse(cls, name: str | IndexKeyLayout) -> IndexKeyLayout:
        """The layout of a name such as "split64".

        Raises:
            ValueError: no layout has this name.
        """
        return _parse_enum(cls, name)

    def _check(self, page_size: int) -> None:
        if page_size not in self.page_sizes:
            raise ValueError(f"page_size: {page_size} is none of {self.page_sizes} of {self.value}")


class IndexQueryLayout(Enum):
    """How packed FP4 index queries lie in memory.

    `PACKED`: payload int8 `[T * H, 64]`, scale int32 `[T * H]`, byte c the exponent of group c (DeepGEMM). `FLYDSL`:
    payload int8 `[T, H, 64]`, scale uint8 `[T, 1, 4, 16, 4]` indexed by group, head % 16 and head // 16; absent head
    tiles are zero.
    """

    PACKED = "packed"
    FLYDSL = "flydsl"

    def scale_in_token(self, head: int, group: int) -> int:
        """Byte of a head's scale counted from the token's first scale byte."""
        if self is IndexQueryLayout.PACKED:
            return head * INDEX_SCALE_BYTES + group
        return group * 64 + (head % 16) * 4 + head // 16

    @classmethod
    def parse(cls, name: str | IndexQueryLayout) -> IndexQueryLayout:
        """The layout of a name such as "flydsl".

        Raises:
            ValueError: no layout has this name.
        """
        return _parse_enum(cls, name)


def _parse_enum(kind: type, name: object):  # type: ignore[no-untyped-def]
    if isinstance(name, kind):
        return name
    named = _INDEX_NAMES[kind.__name__]
    member = named.get(str(name).strip().lower())
    if member is None:
        raise ValueError(f"layout: {name!r} is none of {', '.join(named)}")
    return member


# torch.compile cannot iterate an enum in every release
_INDEX_NAMES: dict[str, dict[str, Enum]] = {
    kind.__name__: {member.value: member for member in kind} for kind in (IndexKeyLayout, IndexQueryLayout)
}
