"""On a Hopper GPU every test of `attend` runs with the portable kernel, and with both that are scheduled for Hopper."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

IS_HOPPER = torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability() == (9, 0)
# heads from which Hopper's kernels are taken, and up to which the one for few heads
FORMS = {"portable": (129, 0), "hopper": (1, 0), "narrow": (1, 128)} if IS_HOPPER else {"as installed": None}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kernel_form" in metafunc.fixturenames:
        metafunc.parametrize("kernel_form", FORMS, indirect=True, scope="module")


@pytest.fixture(autouse=True, scope="module")
def kernel_form(request: pytest.FixtureRequest) -> Iterator[str]:
    form = FORMS[request.param]
    if form is None:
        yield request.param
        return
    from latentkv.kernels import attend

    installed = attend.FEWEST_HOPPER_HEADS, attend.NARROW_HEADS
    attend.FEWEST_HOPPER_HEADS, attend.NARROW_HEADS = form
    yield request.param
    attend.FEWEST_HOPPER_HEADS, attend.NARROW_HEADS = installed
