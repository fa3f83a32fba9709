"""The real CUDA driver, held to what the mock driver's suite asks of any.

Holds of the issue "The GPU runtime": "the mock driver's suite passes on the real one". The cases
are those of support/driver_cases.py; skipped where there is no driver or no GPU. The library is
that of PDSCOPE_CUDA_DRIVER, or libcuda.so.1.
"""

from collections.abc import Iterator

import pytest
from support import driver_cases
from support.cuda import Driver

from pdscope import config


@pytest.fixture(scope="module")
def library() -> Driver:
    path = config.cuda_driver() or "libcuda.so.1"
    try:
        driver = Driver(path)
    except OSError as error:
        pytest.skip(f"no CUDA driver: {error}")
    if (result := driver.cuInit(0)) != "CUDA_SUCCESS":
        pytest.skip(f"no GPU: {result}")
    return driver


@pytest.fixture
def gpu(library: Driver) -> Iterator[Driver]:
    library.open()
    yield library
    library.close()


@pytest.mark.parametrize("case", driver_cases.CASES, ids=lambda c: c.__name__)
def test_any_driver(gpu: Driver, case: driver_cases.Case) -> None:
    case(gpu)


def test_the_driver_is_new_enough(gpu: Driver) -> None:
    assert gpu.ok.cuDriverGetVersion() >= 12000
    assert gpu.ok.cuDeviceGetAttribute(75, 0) >= 8  # compute capability
