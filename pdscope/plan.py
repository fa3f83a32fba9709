"""A plan directory as its readers see it: plan.json, checked, and the paths of its files.

May import pdscope.{errors,schema}, the hash of pdscope.ir.isa and the standard library; numpy, cffi
and jsonschema stay out, so that pdscope-inspect answers at once.
"""

import hashlib
import json
import os
import platform
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from pdscope.errors import PlanError, TargetError
from pdscope.ir.isa import ISA_HASH
from pdscope.plan_hash import plan_hash
from pdscope.schema import FORMAT_VERSION, check_full, check_light

PHASES = ("decode", "batch", "prefill")
# Images of a GPU's kernels: a cubin for an architecture, or PTX.
_KERNELS = re.compile(r"lib/kernels_(sm_([0-9]+)\.cubin|compute_([0-9]+)\.ptx)")
_MACHINES = {"amd64": "x86_64", "x86-64": "x86_64", "arm64": "aarch64"}


@dataclass(frozen=True)
class Plan:
    """A plan directory whose plan.json is sound and whose files have the sizes it names."""

    path: Path
    data: dict[str, Any]  # plan.json
    # What the directory was when plan.json was read; () where nobody asked.
    identity: tuple[int, ...] = field(default=(), compare=False, repr=False)
    # Content of files that a loaded engine reads later, when the path may show another plan.
    held: dict[str, bytes] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def open(cls, path: str | Path, verify: bool = False) -> Self:
        """Reads plan.json and checks it, and the size of every file, in milliseconds.

        With `verify` every file's SHA-256 is checked too (reads the whole plan).
        Raises PlanError naming the file, the field and the remedy. Which machine may run the plan
        is another question: `check_machine`.
        """
        identity = _identity(Path(path))
        plan = cls(Path(path), _read(Path(path)), identity)
        plan._check_instructions()
        plan._check_tokens()
        plan._check_sizes()
        plan._check_hash()
        if verify:
            check_full(plan.data)
            if problems := plan.hash_problems():
                raise PlanError(problems[0])
        return plan

    @property
    def model(self) -> dict[str, Any]:
        model: dict[str, Any] = self.data["model"]
        return model

    @property
    def plan_hash(self) -> str:
        return str(self.data["plan_hash"])

    @property
    def vocab(self) -> int:
        return int(self.model["vocab"])

    @property
    def max_context(self) -> int:
        """Positions that one sequence may hold."""
        return int(self.data["max_context"])

    @property
    def max_rows(self) -> int:
        """Rows of one step."""
        return int(self.data["max_rows"])

    @property
    def eos(self) -> tuple[int, ...]:
        """Every token id that ends a generation."""
        return tuple(self.data["generation"]["eos"])

    @property
    def files(self) -> dict[str, dict[str, Any]]:
        """Relative path -> {"bytes", "sha256"} of every file but plan.json."""
        files: dict[str, dict[str, Any]] = self.data["files"]
        return files

    @property
    def absent_weights(self) -> dict[str, int]:
        """Relative path -> bytes of weight files that were never made (--no-weights); {}: the plan
        has its weights."""
        absent: dict[str, int] = self.data.get("absent_weights", {})
        return absent

    @property
    def library(self) -> Path:
        return self.path / "lib" / "libpdscope.so"

    @property
    def kernels(self) -> tuple[str, ...]:
        """Relative paths of the GPU kernels' images, in the order in which a driver is offered
        them: cubins, of the newest architecture first, then PTX. One for sm_80 runs on sm_86 too,
        but the one for that is better."""

        def order(found: re.Match[str]) -> tuple[bool, int]:
            return found[2] is None, -int(found[2] or found[3])

        found = (_KERNELS.fullmatch(name) for name in self.files)
        return tuple(match[0] for match in sorted(filter(None, found), key=order))

    @cached_property
    def total_bytes(self) -> int:
        return sum(entry["bytes"] for entry in self.files.values())

    def bytes_under(self, folder: str) -> int:
        """Bytes of the files in `folder`, e.g. "weights"."""
        prefix = folder + "/"
        return sum(e["bytes"] for name, e in self.files.items() if name.startswith(prefix))

    def memory_table(self) -> dict[str, Any]:
        """memory.json: what the dry run says every part of the memory takes, in bytes."""
        return self._json("memory.json")

    def program_file(self, layer: int | str, phase: str) -> str:
        """Relative path of a program's text; `layer` is a number, "prologue" or "epilogue"."""
        if phase not in PHASES:
            raise PlanError(f"no phase {phase!r}: a plan has {', '.join(PHASES)}")
        stem = f"layer{layer:03d}" if isinstance(layer, int) else layer
        name = f"{self._programs}{stem}.{phase}.plan"
        if name not in self.files:
            last = self.model["layers"] - 1
            if not self.program_files(phase):
                rows = self.max_rows
                raise PlanError(f"{self.path}: no {phase} programs: a step has at most {rows} rows")
            raise PlanError(
                f"{self.path}: no program {name}: layers are 0 to {last}, prologue, epilogue"
            )
        return name

    def program_files(self, phase: str | None = None) -> list[str]:
        """Relative paths of all programs' texts, of one phase or of all, in execution order."""
        order = {"prologue": "0", "epilogue": "2"}

        def key(name: str) -> tuple[int, str, str]:
            stem, name_phase = name.removeprefix(self._programs).split(".")[:2]
            return PHASES.index(name_phase), order.get(stem, "1"), stem

        names = [n for n in self.files if n.rpartition("/")[0] + "/" == self._programs]
        return sorted((n for n in names if phase in (None, n.split(".")[1])), key=key)

    @property
    def gpu(self) -> dict[str, Any] | None:
        """What plan.json says of a GPU; None: the plan is for the CPU alone."""
        gpu: dict[str, Any] | None = self.data.get("gpu")
        return gpu

    @property
    def _programs(self) -> str:
        """The folder of the programs that the plan is compiled for. One with a GPU has others for
        the CPU alone, too, which come first when it is compiled."""
        gpu = "programs/gpu/"
        return gpu if any(name.startswith(gpu) for name in self.files) else "programs/"

    def read_text(self, name: str) -> str:
        """The text of one of the plan's files."""
        try:
            return self.read_bytes(name).decode("utf-8")
        except UnicodeDecodeError as error:
            raise PlanError(f"{self.path / name}: {error}: recompile the model") from None

    def read_bytes(self, name: str) -> bytes:
        """One of the plan's files, as it was at `hold` if it was held."""
        if name in self.held:
            return self.held[name]
        try:
            return (self.path / name).read_bytes()
        except OSError as error:
            raise PlanError(f"{self.path / name}: {error}: recompile the model") from None

    def hold(self) -> None:
        """Reads what belongs to the tokenizer now, so that a later plan at the same path cannot mix
        in.
        """
        names = (self.data["tokenizer"]["file"], "tokenizer_config.json", "chat_template.jinja")
        for name in (*names, "generation_config.json"):
            if name in self.files and name not in self.held:
                self.held[name] = self.read_bytes(name)

    def check_unchanged(self) -> None:
        """Raises PlanError when the path no longer shows the plan that was opened."""
        if self.identity and _identity(self.path) != self.identity:
            raise PlanError(
                f"{self.path}: the plan was replaced while it was being loaded: load it again"
            )

    def check_machine(self) -> None:
        """Raises TargetError when this machine's CPU cannot run the plan, naming what it lacks."""
        target = self.data["target"]
        machine = platform.machine().lower()
        machine = _MACHINES.get(machine, machine)
        if target["arch"] != machine:
            raise TargetError(
                f"{self.path}: compiled for {target['arch']}, but this machine is {machine}: "
                "compile the model on or for this machine"
            )
        have = cpu_features()
        # Without /proc/cpuinfo the runtime's own CPUID check decides, in pds_engine_create.
        if have and (missing := [f for f in target["features"] if _plain(f) not in have]):
            raise TargetError(
                f"{self.path}: compiled for CPUs with {', '.join(missing)}, which this CPU lacks: "
                "recompile here, or with --target naming only features that both have"
            )

    def hash_problems(self, progress: Callable[[int], None] | None = None) -> list[str]:
        """One line for each file whose SHA-256 differs from plan.json's; `progress` is told bytes
        read.
        """
        problems = []
        for name, entry in self.files.items():
            found = _sha256(self.path / name, progress)
            if found != entry["sha256"]:
                problems.append(
                    f"{self.path / name}: SHA-256 is {found[:12]}..., plan.json says "
                    f"{entry['sha256'][:12]}...: the file was edited or damaged; recompile the "
                    "model"
                )
        return problems

    def unlisted_files(self) -> list[str]:
        """Relative paths of files in the directory that plan.json does not name."""
        found = (p for p in sorted(self.path.rglob("*")) if p.is_file())
        names = (p.relative_to(self.path).as_posix() for p in found)
        return [n for n in names if n != "plan.json" and n not in self.files]

    def _json(self, name: str) -> dict[str, Any]:
        try:
            loaded: dict[str, Any] = json.loads(self.read_text(name))
        except ValueError as error:
            raise PlanError(f"{self.path / name}: not valid JSON ({error}): recompile") from None
        return loaded

    def _check_instructions(self) -> None:
        said, ours = self.data["programs"]["isa_hash"], f"{ISA_HASH:08x}"
        if said != ours:
            raise PlanError(
                f"{self.path / 'plan.json'}: programs: isa_hash is {said}, but the instruction set "
                f"of this PDScope is {ours}: recompile the model with pdscope-compile"
            )

    def _check_tokens(self) -> None:
        said = self.data["generation"]
        singles = {name: said.get(name) for name in ("bos", "pad")}
        named = [(name, token, 2**31) for name, token in singles.items() if token is not None]
        for name, token, end in (*named, *(("eos", token, self.vocab) for token in said["eos"])):
            if not 0 <= token < end:
                raise PlanError(
                    f"{self.path / 'plan.json'}: generation: {name} is {token}, outside the "
                    f"vocabulary of {self.vocab}: the plan was edited; recompile the model"
                )

    def _check_sizes(self) -> None:
        for name, entry in self.files.items():
            if ".." in name.split("/"):
                raise PlanError(
                    f"{self.path / 'plan.json'}: files: {name!r} leaves the plan directory"
                )
            file = self.path / name
            try:
                size = file.stat().st_size
            except OSError:
                raise PlanError(
                    f"{file}: missing: the plan was copied in part; copy it again or recompile "
                    "the model"
                ) from None
            if size != entry["bytes"]:
                raise PlanError(
                    f"{file}: {size} bytes, plan.json says {entry['bytes']}: the plan was cut "
                    "short or "
                    "edited; copy it again or recompile the model"
                )

    def _check_hash(self) -> None:
        """What plan.json says is part of the hash that the library carries too."""
        found = plan_hash(self.data)
        if found != self.plan_hash:
            raise PlanError(
                f"{self.path / 'plan.json'}: plan_hash: {self.plan_hash}, its fields give {found}: "
                "plan.json was edited, or made by another PDScope; recompile the model"
            )


def kernel_file(arch: str) -> str:
    """Relative path of the GPU kernels for an architecture: sm_* (a cubin) or compute_* (PTX)."""
    return f"lib/kernels_{arch}.{'cubin' if arch.startswith('sm_') else 'ptx'}"


def kernel_arch(name: str) -> str:
    """The architecture of such a file."""
    return Path(name).stem.removeprefix("kernels_")


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Feature names of this CPU as Linux gives them, without "_", "-" and "."; empty where
    unknown.
    """
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(map(_plain, value.split())) | _arm_aliases(value.split())
    return frozenset()


def _plain(feature: str) -> str:
    return feature.lower().replace("_", "").replace("-", "").replace(".", "")


def _arm_aliases(flags: Iterable[str]) -> frozenset[str]:
    # Linux calls Advanced SIMD "asimd"; compilers and archspec call it NEON.
    return frozenset({"neon"}) if "asimd" in flags else frozenset()


def _read(path: Path) -> dict[str, Any]:
    file = path / "plan.json"
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        what = "no such directory" if not path.exists() else "no plan.json in it"
        raise PlanError(
            f"{path}: {what}: give the directory that pdscope-compile MODEL -o DIR wrote"
        ) from None
    except NotADirectoryError:
        raise PlanError(f"{path}: not a directory: give the plan directory, not a file") from None
    except OSError as error:
        raise PlanError(f"{file}: {error.strerror}") from None
    except ValueError as error:  # covers JSON and UTF-8
        raise PlanError(
            f"{file}: not valid JSON ({error}): the plan was cut short or edited; recompile the "
            "model"
        ) from None
    version = data.get("format_version") if isinstance(data, dict) else None
    if version is not None and version != FORMAT_VERSION:
        raise PlanError(
            f"{file}: plan format version {version!r}, but this PDScope reads version "
            f"{FORMAT_VERSION}: "
            "recompile the model with pdscope-compile"
        )
    check_light(data)
    checked: dict[str, Any] = data
    return checked


def _identity(path: Path) -> tuple[int, ...]:
    try:
        folder, file = os.stat(path), os.stat(path / "plan.json")
    except OSError:
        return ()
    return (folder.st_dev, folder.st_ino, file.st_dev, file.st_ino)


def _sha256(file: Path, progress: Callable[[int], None] | None) -> str:
    digest = hashlib.sha256()
    try:
        with file.open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
                if progress:
                    progress(len(block))
    except OSError as error:
        raise PlanError(f"{file}: {error.strerror}: cannot be read") from None
    return digest.hexdigest()
