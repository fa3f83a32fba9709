"""Every environment variable that PDScope reads, once. May import pdscope.errors."""

import os
from pathlib import Path

from pdscope.errors import InputError


def cache_dir() -> Path:
    """PDSCOPE_CACHE: where compiled objects and pass results are kept. Default:
    $XDG_CACHE_HOME/pdscope."""
    if value := os.environ.get("PDSCOPE_CACHE"):
        return Path(value)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "pdscope"


def c_compiler() -> str | None:
    """PDSCOPE_CC, then CC: the C compiler command, split like a shell would."""
    return os.environ.get("PDSCOPE_CC") or os.environ.get("CC") or None


def forced_isa() -> str | None:
    """PDSCOPE_ISA: the kernel path to use (scalar, avx2, avx512, avx512bf16, amx); an unknown
    name is an error."""
    return os.environ.get("PDSCOPE_ISA") or None


def threads() -> int:
    """PDSCOPE_THREADS: workers of an engine; 0 or unset: one per usable physical core."""
    count = _count("PDSCOPE_THREADS")
    if count > 1024:
        raise InputError(f"PDSCOPE_THREADS: expected 0 to 1024, got '{count}'; correct or unset it")
    return count


def pin() -> str | None:
    """PDSCOPE_PIN: auto, on or off: whether each worker of an engine stays on one core."""
    return _choice("PDSCOPE_PIN", ("auto", "on", "off"))


def weights() -> str | None:
    """PDSCOPE_WEIGHTS: auto, mmap or copy: how an engine holds its weight files in memory."""
    return _choice("PDSCOPE_WEIGHTS", ("auto", "mmap", "copy"))


def cache_prefetch() -> str | None:
    """PDSCOPE_CACHE_PREFETCH: auto, on or off: whether idle workers prefetch predicted experts."""
    return _choice("PDSCOPE_CACHE_PREFETCH", ("auto", "on", "off"))


def cuda_driver() -> str | None:
    """PDSCOPE_CUDA_DRIVER: path of the CUDA driver's library; unset: libcuda.so.1, where the system
    finds it."""
    return os.environ.get("PDSCOPE_CUDA_DRIVER") or None


def nvrtc() -> str | None:
    """PDSCOPE_NVRTC: path of NVRTC's library, which compiles GPU kernels; unset: that of the
    nvidia-cuda-nvrtc wheel, else of a CUDA toolkit."""
    return os.environ.get("PDSCOPE_NVRTC") or None


def cuda_toolkits() -> tuple[Path, ...]:
    """CUDA_HOME, CUDA_PATH, then where a CUDA toolkit is by default: folders to look into for
    NVRTC."""
    named = (os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH"))
    return tuple(Path(name) for name in (*named, "/usr/local/cuda") if name)


def gpu_kernels() -> tuple[Path, ...]:
    """PDSCOPE_GPU_KERNELS: images of GPU kernels to load in place of the plan's, separated like
    PATH's folders; the first that the driver takes is used. Unset: ()."""
    given = os.environ.get("PDSCOPE_GPU_KERNELS") or ""
    return tuple(Path(name) for name in given.split(os.pathsep) if name)


def gpu_patience() -> int:
    """PDSCOPE_GPU_PATIENCE: seconds that a step waits for a GPU that makes no progress; 0 or unset:
    120."""
    seconds = _count("PDSCOPE_GPU_PATIENCE")
    if seconds > 10**6:
        raise InputError(
            f"PDSCOPE_GPU_PATIENCE: expected at most 1000000 s, got {seconds}; correct or unset it"
        )
    return seconds


def dump_dir() -> Path | None:
    """PDSCOPE_DUMP: directory that receives NNN_pass.plan after every compiler pass."""
    value = os.environ.get("PDSCOPE_DUMP")
    return Path(value) if value else None


def debug_level() -> int:
    """PDSCOPE_DEBUG: 1 summary, 2 timings, 3 decisions and costs, 4 generated C, 5 IR per pass, 6
    instruction trace."""
    return _count("PDSCOPE_DEBUG")


def _choice(name: str, known: tuple[str, ...]) -> str | None:
    value = os.environ.get(name) or None
    if value is not None and value not in known:
        raise InputError(f"{name}: expected {', '.join(known)}, got '{value}'; correct or unset it")
    return value


def _count(name: str) -> int:
    value = os.environ.get(name) or "0"
    if not value.isdecimal():
        raise InputError(f"{name}: expected a whole number, got '{value}'; correct or unset it")
    try:
        return int(value)
    except ValueError:  # Python refuses thousands of digits
        raise InputError(f"{name}: the number is too long; correct or unset it") from None
