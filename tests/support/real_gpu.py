"""A real GPU, for tests/device.

May import pdscope, pytest and support.cuda.
"""

import subprocess

import pytest
from support.cuda import Driver

from pdscope import config


@pytest.fixture
def real_gpu() -> None:
    """Skips where there is no GPU."""
    try:
        driver = Driver(config.cuda_driver() or "libcuda.so.1")
    except OSError as error:
        pytest.skip(f"no CUDA driver: {error}")
    if (result := driver.cuInit(0)) != "CUDA_SUCCESS":
        pytest.skip(f"no GPU: {result}")


def bytes_in_use() -> int:
    """Of the first GPU's memory, by all processes."""
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout.strip()) << 20
