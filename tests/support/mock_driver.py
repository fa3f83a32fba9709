"""What the mock driver's own tests share: the driver, opened with plain settings, and short forms
of what they submit. May import support.cuda and pdscope.compiler.build.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from support.cuda import Driver, at

from pdscope.compiler.build import mock_driver

# 1 byte takes 1 ns, and nothing takes any time of its own.
PLAIN = "h2d=1GB/s; d2h=1GB/s; h2d_start=0; d2h_start=0; d2d=1GB/s"


@pytest.fixture(scope="module")
def library() -> Driver:
    return Driver(mock_driver())


@pytest.fixture
def gpu(library: Driver) -> Iterator[Driver]:
    """Opened, on a virtual clock at 0 where a byte takes a nanosecond."""
    library.configure(f"reset; {PLAIN}")
    library.open()
    yield library
    library.configure("reset")


def copy(gpu: Driver, stream: Any, nbytes: int, to_device: bool = True) -> Any:
    """Submits a copy of pinned memory, then a record of a new event, which it returns."""
    host, device = gpu.pinned(max(nbytes // 4, 1) + 1), gpu.alloc(max(nbytes // 4, 1) + 1)
    if to_device:
        gpu.ok.cuMemcpyHtoDAsync(device, at(host), nbytes, stream)
    else:
        gpu.ok.cuMemcpyDtoHAsync(at(host), device, nbytes, stream)
    return mark(gpu, stream)


def mark(gpu: Driver, stream: Any) -> Any:
    event = gpu.event()
    gpu.ok.cuEventRecord(event, stream)
    return event


def when(gpu: Driver, event: Any) -> int:
    return int(gpu.pds_mock_event_time(event))


def host_work(gpu: Driver, name: bytes, n: int, tokens: Any) -> None:
    """The host is busy, and lets that time pass."""
    gpu.pds_mock_advance(gpu.pds_mock_host_begin(name, n, tokens))
