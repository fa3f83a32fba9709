"""Which CPU a plan is built for: its architecture, kernel paths and the features that it then
requires.

May import archspec, pdscope.runtime_c (the table of kernel paths), pdscope.compiler.build and
pdscope.errors.
"""

from dataclasses import dataclass

from pdscope.compiler.build import machine
from pdscope.errors import TargetError
from pdscope.runtime_c import ISA_PATHS


@dataclass(frozen=True)
class Target:
    """`features` are required at load (Linux cpuinfo names); `isa` are the kernel paths built, best
    first."""

    arch: str
    name: str
    features: tuple[str, ...]
    isa: tuple[str, ...]


def resolve(name: str) -> Target:
    """`native`: this CPU. `any`: every path of this architecture, chosen at load, nothing required.
    Else an archspec name (x86_64_v3, zen4, sapphirerapids, ...) or a list of features
    (avx2,fma,f16c).

    Raises TargetError for an unknown name, or one of another architecture.
    """
    arch = host_arch()
    paths = {n: p for n, p in ISA_PATHS.items() if p.arch in (arch, "any")}
    if name == "any":
        return Target(arch, name, (), tuple(paths))
    features = _features(name, arch)
    built = [n for n, p in paths.items() if set(p.features) <= features]
    required = tuple(paths[built[0]].features)
    return Target(arch, name, required, tuple(built))


def host_arch() -> str:
    arch = machine()
    if arch not in ("x86_64", "aarch64"):
        raise TargetError(f"architecture '{arch}' is not supported: x86_64 and aarch64 are")
    return arch


def _features(name: str, arch: str) -> set[str]:
    import archspec.cpu
    import archspec.cpu.detect

    if name == "native":  # what the CPU says of itself: host() would give its nearest known model's
        return set(archspec.cpu.detect.detected_info().features)
    if name in archspec.cpu.TARGETS:
        target = archspec.cpu.TARGETS[name]
        family = target.family.name
        if family != arch:
            raise TargetError(f"--target {name}: is a {family} CPU, but this machine is {arch}")
        return set(target.features)
    features = set(name.split(","))
    known = {f for p in ISA_PATHS.values() for f in p.features}
    if unknown := sorted(features - known):
        raise TargetError(
            f"--target {name}: '{unknown[0]}' is neither a CPU that archspec knows nor a feature "
            f"that a kernel path uses; expected native, any, a name such as x86_64_v3, or some of: "
            + ",".join(sorted(known))
        )
    return features
