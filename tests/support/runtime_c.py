"""Builds and runs the runtime's C test program (tests/runtime) in several ways."""

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support import cc

from pdscope import config, runtime_c
from pdscope.compiler.build import (
    COMMON_FLAGS,
    Compiler,
    _digest_headers,
    _object,
    _Unit,
    available_isa_paths,
    machine,
)
from pdscope.compiler.passes.gpu_programs import ExpertSlots, gpu_programs
from pdscope.ir.encode import encode
from pdscope.ir.isa import PHASE_ROWS, HoleKind, Kind, NormSite, Opcode, Queue
from pdscope.ir.program import Hole, HoleRef, Instr, Out, Program, worst_case_experts

TESTS = Path(__file__).resolve().parents[1] / "runtime"

# Those of tests/runtime/fake_plan.h.
MAX_ROWS, EXPERTS, TOP_K, WEIGHT_BYTES = 40, 4, 2, 131072

# Of debug information the lines alone, which sanitizers name: all of it takes twice the time.
WARNINGS = ("-Werror", "-UNDEBUG", "-g1")
# -O1: half the time to compile, and half the time to run.
ASAN = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
TSAN = ("-O1", "-fsanitize=thread")


def fake_programs() -> list[Program]:
    """Prologue, a dense and a MoE layer, epilogue, in all three phases."""
    programs = []
    cpu, host = Queue.CPU, Queue.HOST
    for phase, (first, last) in PHASE_ROWS.items():
        last = min(last, MAX_ROWS)
        hid = ("hid",)

        def program(
            kind: Kind,
            instrs: tuple[Instr, ...],
            out: tuple[str, int],
            layer: int = -1,
            *,
            phase=phase,
            first=first,
            last=last,
            hid=hid,
            **fields,
        ) -> Program:
            ins = () if kind is Kind.PROLOGUE else hid
            return Program(
                kind, phase, first, last, instrs, layer, ins=ins, outs=(Out(*out),), **fields
            )

        head = (
            Instr(Opcode.NORM, cpu, hid, site=NormSite.ATTN),
            Instr(Opcode.ATTENTION, cpu, (0,)),
            Instr(Opcode.NORM, cpu, (1,), site=NormSite.MLP),
        )
        moe = (
            *head,
            Instr(Opcode.GATE, cpu, (2,)),
            Instr(
                Opcode.RECOMPILE,
                host,
                (3,),
                binds=(Hole(HoleKind.C, worst_case_experts(EXPERTS, TOP_K, last)),),
            ),
            Instr(Opcode.SHARED_EXPERT, cpu, (2,)),
            Instr(Opcode.EXPERT, cpu, (4,), hole=HoleRef(HoleKind.C)),
            Instr(Opcode.COMBINE, cpu, (5, 6)),
        )
        end = (
            Instr(Opcode.NORM, cpu, hid, site=NormSite.FINAL),
            Instr(Opcode.LM_HEAD, cpu, (0,)),
        )
        programs += [
            program(Kind.PROLOGUE, (Instr(Opcode.EMBED, cpu),), ("hid", 0)),
            program(Kind.DENSE, (*head, Instr(Opcode.MLP, cpu, (2,))), ("hid", 3), 0),
            program(Kind.MOE, moe, ("hid", 7), 1, experts=EXPERTS, top_k=TOP_K, shared=True),
            program(Kind.EPILOGUE, end, ("logits", 1)),
        ]
    return programs


def fake_gpu_programs() -> list[Program]:
    """The same with a GPU: expert 1 stays there, and two slots are for the others."""
    gate = SimpleNamespace(attrs=SimpleNamespace(experts=EXPERTS, top_k=TOP_K))
    dense = SimpleNamespace(gate=None)
    moe = SimpleNamespace(gate=gate, shared=True, predictor=None)
    model: Any = SimpleNamespace(layers=(dense, moe))  # all that is looked at
    return gpu_programs(model, ExpertSlots(((), (1,)), 2), MAX_ROWS)


@dataclass(frozen=True)
class TestProgram:
    """A built test program and the directory that it runs on."""

    binary: Path
    data: Path

    __test__ = False

    def run(
        self, *cases: str, wrapper: Sequence[str] = (), env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        command = [*wrapper, str(self.binary), str(self.data), *cases]
        return subprocess.run(
            command, capture_output=True, text=True, env=os.environ | (env or {}), timeout=1200
        )


def check(done: subprocess.CompletedProcess[str]) -> None:
    """Fails with what the program printed, unless it passed."""
    text = done.stdout[-4000:] + done.stderr[-4000:]
    assert done.returncode == 0, f"exit status {done.returncode}\n{text}"
    assert "FAILED" not in done.stdout, text


def gcc() -> Compiler | None:
    """The system's gcc or clang, which have the sanitizers; None if there is neither."""
    for name in ("gcc", "clang"):
        if shutil.which(name):
            return Compiler((name,), name, zig=False)
    return None


def build(
    folder: Path,
    compiler: Compiler,
    flags: Sequence[str] = (),
    *,
    features: str = "",
    arch: str | None = None,
    static: bool = False,
    isa_paths: Sequence[str] | None = None,
) -> TestProgram:
    """Compiles the runtime with fake operators and the hand-made plan into `folder`, and beside it
    the mock CUDA driver, unless `static`.

    `isa_paths`: the kernel paths to build in; by default all of the architecture's.
    """
    data = folder / "data"
    data.mkdir(parents=True)
    program = encode(fake_programs())
    (data / "program.gpu.bin").write_bytes(encode(fake_gpu_programs()))
    (data / "program.bin").write_bytes(program)
    with (data / "w.bin").open("wb") as file:
        file.truncate(WEIGHT_BYTES)
    defines = (f"-DTEST_PROGRAM_BYTES={len(program)}", f'-DTEST_FEATURES="{features}"')
    root = runtime_c.ROOT
    includes = [f"-I{root / d}" for d in runtime_c.INCLUDE_DIRS] + [f"-I{TESTS}"]
    paths = tuple(isa_paths or available_isa_paths(arch or machine()))
    units = [
        (root / source, extra)
        for source, extra in runtime_c.sources(paths)
        if not source.startswith("src/ops_")
    ]
    have = tuple(f"-DPDS_HAVE_{p.upper()}" for p in paths if p != "scalar")
    for source in sorted(TESTS.glob("*.c")):
        units.append((source, (*(defines if source.stem == "fake_plan" else ()), *have)))
    zig = ("-fno-sanitize=all",) if compiler.zig else ()
    store = config.cache_dir() / "objects"
    own = config.cache_dir() / "test-objects"
    for place in (store, own):
        place.mkdir(parents=True, exist_ok=True)
    headers = _digest_headers()

    ours = cc.digest_of(*TESTS.glob("*.h"))

    def one(source: Path, extra: tuple[str, ...]) -> str:
        if source.parent.name == "kernels" and not (flags or static or arch):
            # They take long to compile, and hold no assertion: those of the plans do.
            unit = _Unit(root, source.relative_to(root).as_posix(), extra, source.read_bytes())
            return str(_object(unit, compiler, headers, store)[0])
        command = [*compiler.command, *COMMON_FLAGS, *WARNINGS, *zig, *extra, *flags, *includes]
        return str(cc.object_file(command, source, headers + ours, own))

    mock = [(root / source, ()) for source in runtime_c.MOCK_SOURCES if not static]
    with ThreadPoolExecutor(max_workers=2) as pool:
        jobs = [pool.submit(one, *unit) for unit in [*units, *mock]]
        objects = [job.result() for job in jobs]
    binary = folder / "runtime-tests"
    link = [*compiler.command, *flags, "-pthread"]
    if mock:
        library = str(data / "libcuda-mock.so")
        nodelete = "-Wl,-z,nodelete"
        _run([*link, "-shared", nodelete, *objects[len(units) :], "-ldl", "-o", library])
    link += ("-static",) if static else ()
    _run([*link, *objects[: len(units)], "-lm", "-ldl", "-o", str(binary)])
    return TestProgram(binary, data)


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[-4000:]}"


def emulator(arch: str) -> str | None:
    """qemu's user-mode emulator for an architecture, if it is installed."""
    return shutil.which(f"qemu-{arch}") or shutil.which(f"qemu-{arch}-static")


def on_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")
