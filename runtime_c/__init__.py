"""The C runtime as data: what a plan library is built from, and with which flags. Imports nothing.

The one place that lists the runtime's sources; `pdscope.compiler.build` and the C tests read it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parent

#: Directories for -I, relative to ROOT. "." lets a source say "kernels/kernels.h".
INCLUDE_DIRS: tuple[str, ...] = ("include", "src", ".")

#: What decides on loads, by itself: it needs no other source, and tests build it alone.
DECISION_SOURCES: tuple[str, ...] = (
    "src/decide.c",
    "src/policy_adaptsched.c",
    "src/policy_rivals.c",
    "src/policy_victim.c",
)

#: Sources without special instructions, relative to ROOT, in link order.
CORE_SOURCES: tuple[str, ...] = (
    "src/status.c",
    "src/crc.c",
    "src/cpu.c",
    "src/host.c",
    "src/map.c",
    "src/pool.c",
    "src/dummy.c",
    "src/weights.c",
    "src/dispatch.c",
    "src/program.c",
    "src/verify.c",
    "src/kv.c",
    "src/trace.c",
    "src/llc.c",
    "src/net.c",
    "src/nets.c",
    "src/learn.c",
    *DECISION_SOURCES,
    "src/residency.c",
    "src/spans.c",
    "src/gpu.c",
    "src/link.c",
    "src/placement.c",
    "src/gpu_step.c",
    "src/gpu_kernels.c",
    "src/gpu_graph.c",
    "src/twins.c",
    "src/schedule.c",
    "src/exec.c",
    "src/engine.c",
    "src/session.c",
    "src/measure.c",
    "src/measure_gpu.c",
    "src/sample.c",
    "src/generate.c",
    "src/ops_gemm.c",
    "src/ops_quantise.c",
    "src/ops_mlp.c",
    "src/ops_dense.c",
    "src/ops_attention.c",
    "src/ops_moe.c",
    "src/ops_net.c",
    "src/ops_predict.c",
    "cuda/driver.c",
    "cuda/launch_gemm.c",
    "cuda/launch_attention.c",
    "cuda/launch_rows.c",
)

#: Sources of the mock CUDA driver, a library of its own, relative to ROOT.
MOCK_SOURCES: tuple[str, ...] = (
    "mock/context.c",
    "mock/config.c",
    "mock/control.c",
    "mock/streams.c",
    "mock/events.c",
    "mock/memory.c",
    "mock/modules.c",
    "mock/work.c",
    "mock/virtual.c",
    "mock/wall.c",
    "mock/faults.c",
)

#: Sources of the GPU's kernels as a library for the mock driver, relative to ROOT; the second
#: includes every .cu file.
SIMT_SOURCES: tuple[str, ...] = ("mock/simt.c", "mock/simt_kernels.c")

#: Folder of the GPU kernels, relative to ROOT: each .cu of it, and headers.
GPU_KERNEL_DIR = "cuda/kernels"


@dataclass(frozen=True)
class IsaPath:
    """One kernel path.

    `arch`: a processor family, or "any". `features`: what it needs, as Linux and archspec name it;
    dispatch.c has the same table. `flags` compile its `sources`, and no other file.
    """

    arch: str
    features: tuple[str, ...]
    flags: tuple[str, ...]
    sources: tuple[str, ...]


_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
_AVX512BF16 = (*_AVX512, "avx512_vnni", "avx512_bf16")
_AMX = (*_AVX512BF16, "amx_tile", "amx_bf16", "amx_int8")


def _flags(features: tuple[str, ...]) -> tuple[str, ...]:
    names = (f.replace("_", "-" if f.startswith("amx") else "") for f in features)
    return tuple(f"-m{name}" for name in names)


#: Kernel paths, best first.
ISA_PATHS: Mapping[str, IsaPath] = MappingProxyType(
    {
        "amx": IsaPath("x86_64", _AMX, _flags(_AMX), ("kernels/amx.c",)),
        "avx512bf16": IsaPath(
            "x86_64", _AVX512BF16, _flags(_AVX512BF16), ("kernels/avx512bf16.c",)
        ),
        "avx512": IsaPath("x86_64", _AVX512, _flags(_AVX512), ("kernels/avx512.c",)),
        "avx2": IsaPath("x86_64", _AVX2, _flags(_AVX2), ("kernels/avx2.c",)),
        "scalar": IsaPath("any", (), (), ("kernels/scalar.c",)),
    }
)


def headers() -> tuple[str, ...]:
    """Every header, relative to ROOT, sorted: all of them are part of the object cache's keys."""
    return tuple(sorted(p.relative_to(ROOT).as_posix() for p in ROOT.rglob("*.h")))


def gpu_kernel_files() -> dict[str, str]:
    """Sources (*.cu) and headers of the GPU kernels: text by name, as they include each other."""
    folder = ROOT / GPU_KERNEL_DIR
    files = sorted((*folder.glob("*.cu"), *folder.glob("*.h")))
    return {path.name: path.read_text(encoding="utf-8") for path in files}


def sources(paths: Iterable[str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """(source, extra flags) of a library with the given kernel paths, in link order."""
    chosen = [name for name in ISA_PATHS if name in set(paths)]
    have = tuple(f"-DPDS_HAVE_{name.upper()}" for name in chosen if name != "scalar")
    core = tuple((s, have if s == "src/dispatch.c" else ()) for s in CORE_SOURCES)
    kernels = ((s, ISA_PATHS[name].flags) for name in chosen for s in ISA_PATHS[name].sources)
    return (*core, *kernels)
