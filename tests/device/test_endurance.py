"""GPU engines for long, side by side, beside torch, and interrupted, on a GPU.

Holds of the issue "The GPU runtime": "1,000 generations in a row: no growth of host or device
memory; Ctrl-C at any time frees the GPU; two engines in one process and torch using the same GPU
beside them work". Skipped where there is no GPU.
"""

import gc
import signal
import subprocess
import sys
import time

import pytest
from support.gpu import gpu_plan
from support.gpu_endurance import growth, side_by_side
from support.plans import PlanStore
from support.real_gpu import bytes_in_use, real_gpu

__all__ = ["real_gpu"]


def test_generations_leave_nothing(plans: PlanStore, real_gpu: None) -> None:
    plan = gpu_plan(plans, "tiny-mixtral", "bf16", "half")
    host, device = growth(plan, 1000, bytes_in_use)
    assert device <= 0
    assert host < 4 << 20


def test_engines_and_torch_side_by_side(plans: PlanStore, real_gpu: None) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    a = torch.randn(2048, 2048, device="cuda")
    expected = a @ a

    def products() -> None:
        for _ in range(50):
            assert torch.equal(a @ a, expected)

    first = gpu_plan(plans, "tiny-mixtral", "bf16", "half")
    side_by_side((first, gpu_plan(plans, "tiny-qwen3-moe", "fp32", "few")), products)


@pytest.mark.parametrize("seconds", [0.3, 0.6, 1.0, 1.5, 2.5, 4.0])
def test_an_interrupt_frees_the_gpu(plans: PlanStore, real_gpu: None, seconds: float) -> None:
    """While it starts, loads, or generates."""
    plan = gpu_plan(plans, "tiny-mixtral", "bf16", "half")
    gc.collect()
    before = bytes_in_use()
    command = [sys.executable, "-m", "pdscope.cli.bench", str(plan), "--device", "gpu"]
    with subprocess.Popen(
        [*command, "-p", "256", "-n", "64", "-r", "10000"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stderr is not None
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert b"Traceback" not in process.stderr.read()
    time.sleep(1)  # nvidia-smi is told a little later
    assert bytes_in_use() <= before
