"""--gpu-arch: which GPUs a plan's kernels are compiled for, and what compiles them.

May import pdscope.compiler.nvrtc, pdscope.config and pdscope.errors. The driver is asked for the
GPUs of this machine alone, without a context, and need not be there.
"""

import ctypes
import re
from dataclasses import dataclass
from typing import Self

from pdscope import config
from pdscope.compiler.nvrtc import PTX_ARCH, Nvrtc, Version, find_nvrtc
from pdscope.errors import InputError, TargetError

#: Compute capability times ten: what the kernels need at least.
OLDEST = 80

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


@dataclass(frozen=True)
class GpuArch:
    """What was asked for: `names` of architectures, sm_*; or else those of this machine's GPUs, or
    no kernels at all."""

    names: tuple[str, ...] = ()
    none: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """auto, none, or architectures with commas between. Raises InputError."""
        if text in ("auto", "none"):
            return cls(none=text == "none")
        names = tuple(dict.fromkeys(text.split(",")))
        for name in names:
            number = re.fullmatch(r"sm_([1-9][0-9]{1,2})", name)
            if number is None:
                raise InputError(
                    f"gpu_arch: {name!r}: expected auto, none, or architectures such as "
                    "sm_90 or sm_80,sm_90"
                )
            if int(number[1]) < OLDEST:
                raise InputError(f"gpu_arch: {name}: GPU kernels need sm_{OLDEST} or newer")
        return cls(tuple(sorted(names, key=_number)))


@dataclass(frozen=True)
class Kernels:
    """Architectures, PTX's among them, and what compiles for them."""

    architectures: tuple[str, ...]
    nvrtc: Nvrtc


@dataclass(frozen=True)
class Present:
    """GPUs of this machine: their architectures, oldest first, the driver's CUDA version, and the
    name of the first GPU."""

    architectures: tuple[str, ...] = ()
    cuda: Version = (0, 0)
    name: str = ""


def resolve(asked: GpuArch, notes: list[str]) -> Kernels | None:
    """What to compile; None: no kernels. PTX is always part of it.

    Without an NVRTC, and for a GPU that it does not know, architectures of this machine become a
    note, and named ones a TargetError.
    """
    if asked.none:
        return None
    try:
        nvrtc = find_nvrtc()
    except TargetError as error:
        if asked.names:
            raise TargetError(f"--gpu-arch {','.join(asked.names)}: {error}") from None
        notes.append(f"the plan has no kernels, so no GPU can run it: {error}")
        return None
    if asked.names:
        if unknown := [n for n in asked.names if n not in nvrtc.architectures]:
            raise TargetError(
                f"--gpu-arch {unknown[0]}: NVRTC {nvrtc.release} knows "
                f"{', '.join(_usable(nvrtc.architectures))}"
            )
        return Kernels((*asked.names, PTX_ARCH), nvrtc)
    gpus = present()
    known = [n for n in _usable(gpus.architectures) if n in nvrtc.architectures]
    if others := [n for n in gpus.architectures if n not in known]:
        why = f"GPU kernels need sm_{OLDEST} or newer"
        if _number(others[0]) >= OLDEST:
            why = f"NVRTC {nvrtc.release} does not know it: its driver compiles the kernels at load"
        notes.append(f"a GPU here is {others[0]}: {why}")
    if known and gpus.cuda < nvrtc.cuda:
        notes.append(
            f"the driver here is of CUDA {_dotted(gpus.cuda)} and may refuse kernels of NVRTC "
            f"{nvrtc.release}: install a newer driver, or name an NVRTC as old as the driver with "
            "PDSCOPE_NVRTC"
        )
    return Kernels((*known, PTX_ARCH), nvrtc)


def present() -> Present:
    """The GPUs that the driver shows; none without a driver."""
    try:
        driver = ctypes.CDLL(config.cuda_driver() or "libcuda.so.1")
        if driver.cuInit(0):
            return Present()
        ask = driver.cuDeviceGetAttribute
        version, count = _read(driver.cuDriverGetVersion), _read(driver.cuDeviceGetCount)
        devices = [_read(driver.cuDeviceGet, ordinal) for ordinal in range(count)]
        text = ctypes.create_string_buffer(64)
        if devices:
            driver.cuDeviceGetName(text, len(text), devices[0])
    except (OSError, AttributeError):  # no driver, or another library
        return Present()
    found = {10 * _read(ask, _MAJOR, device) + _read(ask, _MINOR, device) for device in devices}
    names = tuple(f"sm_{number}" for number in sorted(found) if number)
    cuda = (version // 1000, version % 1000 // 10)
    return Present(names, cuda, text.value.decode(errors="replace"))


def _read(function: "ctypes._NamedFuncPointer", *arguments: int) -> int:
    """What a function of the driver puts where its first argument points to; 0 if it fails."""
    out = ctypes.c_int()
    return 0 if function(ctypes.byref(out), *arguments) else out.value


def _usable(names: tuple[str, ...]) -> list[str]:
    return [name for name in names if _number(name) >= OLDEST]


def _number(name: str) -> int:
    return int(name.removeprefix("sm_"))


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))
