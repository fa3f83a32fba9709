"""GPU engines for long and side by side, on the mock CUDA driver.

Holds of the issue "The GPU runtime": "1,000 generations in a row: no growth of host or device
memory"; "two engines in one process". tests/device asks the same of a real GPU.
"""

import pytest
from support.gpu import Mock, gpu_plan, mock
from support.gpu_endurance import growth, side_by_side
from support.plans import PlanStore

__all__ = ["mock"]


@pytest.mark.parametrize("n", [60, pytest.param(1000, marks=pytest.mark.verify)])
def test_generations_leave_nothing(plans: PlanStore, mock: Mock, n: int) -> None:
    plan = gpu_plan(plans, "tiny-mixtral", "bf16", "half")
    host, device = growth(plan, n, lambda: mock.counter("device_live"))
    assert device == 0
    assert host < 4 << 20  # what the allocator keeps


def test_two_engines_side_by_side(plans: PlanStore, mock: Mock) -> None:
    first = gpu_plan(plans, "tiny-mixtral", "bf16", "half")
    side_by_side((first, gpu_plan(plans, "tiny-qwen3-moe", "fp32", "few")), lambda: None)
