"""Reading what the compilers say, and judging it."""

from dataclasses import replace

import pytest

from latentkv.targets import (
    TARGETS,
    Build,
    Usage,
    amd_usage,
    find_targets,
    nvidia_usage,
    nvidia_usage_with_spills,
)

AMDGCN = """
	.amdhsa_next_free_vgpr 40
amdhsa.kernels:
  - .agpr_count:     0
    .args:
    .group_segment_fixed_size: 512
    .private_segment_fixed_size: 24
    .sgpr_count:     33
    .sgpr_spill_count: 2
    .vgpr_count:     170
    .vgpr_spill_count: 6
    .wavefront_size: 64
"""
RESOURCES = """
Resource usage:
 Common:
  GLOBAL:11 CONSTANT[4]:8
 Function kernel:
  REG:{registers} STACK:{stack} SHARED:1024 LOCAL:{local} CONSTANT[0]:688 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
PTXAS = """ptxas info    : 11 bytes gmem
ptxas info    : Function properties for kernel
    40 bytes stack frame, 44 bytes spill stores, 60 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 40 bytes cumulative stack size
"""


def test_amd_metadata_is_read():
    usage = amd_usage(AMDGCN, shared_bytes=2048)
    assert usage == Usage(
        registers=170, scalar_registers=33, spills=6, scalar_spills=2, scratch_bytes=24, shared_bytes=2048
    )


def test_amd_static_shared_memory_counts_when_it_is_more():
    assert amd_usage(AMDGCN, shared_bytes=0).shared_bytes == 512


def test_amd_assembly_without_metadata_is_an_error():
    with pytest.raises(ValueError, match="vgpr_count"):
        amd_usage("s_endpgm", 0)


def test_nvidia_stack_and_local_memory_are_scratch():
    usage = nvidia_usage(RESOURCES.format(registers=255, stack=40, local=8), shared_bytes=512)
    assert usage == Usage(
        registers=255, scalar_registers=0, spills=0, scalar_spills=0, scratch_bytes=48, shared_bytes=512
    )


def test_nvidia_spill_stores_are_counted_in_words():
    usage = nvidia_usage(RESOURCES.format(registers=255, stack=40, local=0), shared_bytes=0)
    assert nvidia_usage_with_spills(usage, PTXAS).spills == 11
    assert nvidia_usage_with_spills(usage, "nothing of it").spills == 0


def test_nvidia_output_without_resources_is_an_error():
    with pytest.raises(ValueError, match="no resource usage"):
        nvidia_usage("cuobjdump fatal", 0)


def _build(target: str = "gfx942", error: str | None = None, **changes: int) -> Build:
    fields = dict.fromkeys(
        ("registers", "scalar_registers", "spills", "scalar_spills", "scratch_bytes", "shared_bytes"), 0
    )
    usage = None if error else Usage(**(fields | changes))
    return Build("store", "kernel", "label", target, 0.1, usage, error)


def test_known_spills_pass_and_one_more_does_not():
    known = replace(_build(spills=3, scratch_bytes=16), spills_allowed=3)
    assert known.problems == ()
    assert replace(known, spills_allowed=2).problems == ("spills 3", "scratch 16 B")
    assert replace(_build(scratch_bytes=8), spills_allowed=3).problems == ("scratch 8 B",)


@pytest.mark.parametrize(
    ("build", "problems"),
    [
        (_build(registers=512, scalar_registers=100), ()),
        (_build(scalar_spills=5), ()),  # they stay in registers, of another kind
        (_build(spills=3), ("spills 3",)),
        (_build(scratch_bytes=8), ("scratch 8 B",)),
        (_build(shared_bytes=65536), ()),
        (_build(shared_bytes=65537), ("shared 65537 B of 65536",)),
        (_build(target="sm90", shared_bytes=65537), ()),
        (_build(target="sm120", shared_bytes=99 * 1024 + 1), ("shared 101377 B of 101376",)),
        (_build(error="it broke"), ("it broke",)),
    ],
)
def test_problems_of_a_build(build, problems):
    assert build.problems == problems
    assert build.to_dict()["problems"] == list(problems)


def test_all_seven_targets_by_default_and_one_by_name():
    assert [t.name for t in find_targets()] == ["gfx950", "gfx942", "gfx1201", "sm80", "sm90", "sm100", "sm120"]
    assert find_targets(["gfx1201"]) == [TARGETS["gfx1201"]]
    assert TARGETS["gfx1201"].warp_size == 32
    assert TARGETS["gfx950"].warp_size == 64


def test_unknown_target_is_named():
    with pytest.raises(ValueError, match="target: 'sm75' is none of gfx950"):
        find_targets(["gfx950", "sm75"])
