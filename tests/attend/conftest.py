"""On a Hopper GPU every test of `attend` runs twice: with the portable kernel and with the one scheduled for Hopper."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

IS_HOPPER = torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability() == (9, 0)
FORMS = {"portable": 129, "hopper": 1} if IS_HOPPER else {"as installed": None}  # heads from which Hopper's is taken


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kernel_form" in metafunc.fixturenames:
        metafunc.parametrize("kernel_form", FORMS, indirect=True, scope="module")


@pytest.fixture(autouse=True, scope="module")
def kernel_form(request: pytest.FixtureRequest) -> Iterator[str]:
    if FORMS[request.param] is None:
        yield request.param
        return
    from latentkv.kernels import attend

    installed, attend.FEWEST_HOPPER_HEADS = attend.FEWEST_HOPPER_HEADS, FORMS[request.param]
    yield request.param
    attend.FEWEST_HOPPER_HEADS = installed
