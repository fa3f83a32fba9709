"""Run passes over a workspace, keep what they wrote, and skip a pass whose inputs have not changed.

A workspace holds `plan/`, which becomes the plan directory and which passes read and write,
`scratch/`, which goes when the plan is there, and `passes/NAME.json`, a record (key, files, sizes,
SHA-256) written after each pass; a killed compile therefore resumes with the first pass that has no
record. May import the standard library and pdscope.{errors,config}.
"""

import contextlib
import ctypes
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pdscope import config
from pdscope.errors import DiskError, PlanError, disk_fault


@dataclass(frozen=True)
class FileRecord:
    bytes: int
    sha256: str


@dataclass(frozen=True)
class PassResult:
    """What became of one pass: `cached` when its outputs were already there. `cpu_seconds`: of all
    threads of the process."""

    name: str
    cached: bool
    seconds: float
    files: Mapping[str, FileRecord]
    cpu_seconds: float = 0.0


class Pass(Protocol):
    """A step of the compiler: a frozen dataclass whose fields are its options, with a kebab-case
    name."""

    @property
    def name(self) -> str: ...

    def inputs(self) -> Mapping[str, str]:
        """Everything besides the files of `reads` that decides the result, as text."""

    @property
    def reads(self) -> Sequence[str]: ...

    def run(self, workspace: "Workspace") -> Mapping[str, str | None]:
        """Do the work; return the relative paths written, each with its SHA-256 where that is
        known."""


@dataclass
class Workspace:
    """Where one compile works. Files are written aside and renamed, so a present file is a whole
    file."""

    root: Path
    records: dict[str, PassResult] = field(default_factory=dict)

    @property
    def plan(self) -> Path:
        return self.root / "plan"

    def path(self, relative: str) -> Path:
        return self.plan / relative

    def scratch(self, name: str) -> Path:
        """A directory in which a pass leaves what later passes need and the plan does not hold."""
        return self.root / "scratch" / name

    def record_path(self, name: str) -> Path:
        return self.root / "passes" / f"{name}.json"

    def read_text(self, relative: str) -> str:
        return self.path(relative).read_text(encoding="utf-8")

    def write(self, relative: str, data: str | bytes) -> str:
        with writing(self.path(relative)) as path:
            path.write_bytes(data.encode() if isinstance(data, str) else data)
        return relative

    def sha256(self, relative: str) -> str:
        for result in self.records.values():
            if relative in result.files:
                return result.files[relative].sha256
        return sha256_file(self.path(relative))

    def files(self) -> dict[str, FileRecord]:
        """Every file that a pass wrote, by relative path, sorted."""
        found = {p: f for r in self.records.values() for p, f in r.files.items()}
        return dict(sorted(found.items()))


@dataclass
class PassManager:
    """Runs passes one by one. `code` identifies the compiler itself: another version's records are
    not used."""

    workspace: Workspace
    code: str
    after: Callable[[PassResult], None] = lambda _: None

    def run(self, step: Pass) -> PassResult:
        ws = self.workspace
        began, spent = time.perf_counter(), time.process_time()
        key = self._key(step)
        result = self._recorded(step, key)
        if result is None:
            # An older record would outlive what it is about, were this run killed halfway.
            ws.record_path(step.name).unlink(missing_ok=True)
            written = step.run(ws)
            files = {
                p: FileRecord(ws.path(p).stat().st_size, known or sha256_file(ws.path(p)))
                for p, known in written.items()
            }
            took, cpu = time.perf_counter() - began, time.process_time() - spent
            result = PassResult(step.name, False, took, files, cpu)
            record = {"key": key, "files": {p: vars(f) for p, f in files.items()}}
            with writing(ws.record_path(step.name)) as path:
                path.write_text(json.dumps(record, indent=1), encoding="utf-8")
        ws.records[step.name] = result
        self._dump(step)
        self.after(result)
        return result

    def _key(self, step: Pass) -> str:
        reads = {p: self.workspace.sha256(p) for p in step.reads}
        text = json.dumps([self.code, step.name, dict(step.inputs()), reads], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def _recorded(self, step: Pass, key: str) -> PassResult | None:
        """The record of an earlier run, if its key fits and its files are still whole."""
        path = self.workspace.record_path(step.name)
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if record["key"] != key:
                return None
            files = {p: FileRecord(**f) for p, f in record["files"].items()}
            if any(self.workspace.path(p).stat().st_size != f.bytes for p, f in files.items()):
                return None
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return PassResult(step.name, True, 0.0, files)

    def _dump(self, step: Pass) -> None:
        """PDSCOPE_DUMP: the text files of this pass as NNN_pass.plan; PDSCOPE_DEBUG=2: times."""
        result = self.workspace.records[step.name]
        if config.debug_level() >= 2:
            state = "cached" if result.cached else f"{result.seconds:.3f} s"
            print(f"pdscope: {step.name}: {state}", file=sys.stderr)
        wanted = [p for p in result.files if p.endswith((".plan", ".txt", ".json", ".c"))]
        if config.debug_level() >= 4:
            for p in wanted:
                if p.endswith(".c") or config.debug_level() >= 5:
                    print(f"--- {p}\n{self.workspace.read_text(p)}", file=sys.stderr)
        directory = config.dump_dir()
        if directory is None or not wanted:
            return
        directory.mkdir(parents=True, exist_ok=True)
        index = len(self.workspace.records)
        text = "".join(f"// {p}\n{self.workspace.read_text(p)}\n" for p in wanted)
        (directory / f"{index:03d}_{step.name}.plan").write_text(text, encoding="utf-8")


@contextlib.contextmanager
def writing(target: Path) -> Iterator[Path]:
    """Yields a path beside `target` to write to; on success it is renamed to `target`."""
    aside = target.with_name(target.name + ".part")
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        yield aside
        os.replace(aside, target)


def sha256_file(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


@contextlib.contextmanager
def disk_errors(target: Path) -> Iterator[None]:
    """DiskError, with the remedy, for a full disk and for a file-size limit."""
    try:
        yield
    except OSError as e:
        full = "the disk is full; free some space or choose another output"
        if reason := disk_fault(e, full):
            raise DiskError(f"{target}: cannot be written: {reason}") from e
        raise


def publish(workspace: Workspace, out: Path, replace: bool) -> None:
    """Make the finished workspace the plan: flush everything, then rename. `replace` swaps an old
    plan out, in one step where the system can."""
    _remove_others(workspace)
    for directory, _, names in os.walk(workspace.plan):
        for name in names:
            _fsync(Path(directory) / name)
        _fsync(Path(directory))
    old = None
    if out.exists():
        if not any(out.iterdir()):
            out.rmdir()
        elif not replace:
            raise PlanError(f"{out}: is not empty; choose another directory")
        else:
            check_replaceable(out)
            # From here on the workspace may hold the old plan, which no record is about.
            shutil.rmtree(workspace.root / "passes", ignore_errors=True)
            if _exchange(workspace.plan, out):
                _fsync(out.parent)
                shutil.rmtree(workspace.root, ignore_errors=True)
                return
            old = old_plan(out)
            shutil.rmtree(old, ignore_errors=True)
            os.rename(out, old)
    os.rename(workspace.plan, out)
    _fsync(out.parent)
    shutil.rmtree(workspace.root, ignore_errors=True)
    if old is not None:
        shutil.rmtree(old)


def old_plan(out: Path) -> Path:
    """Where a replaced plan is for a moment, if two directories cannot be exchanged."""
    return out.with_name(f".{out.name}.old")


def recover(out: Path) -> None:
    """Tidy up behind a compile that was killed while it replaced a plan: the old plan goes back if
    the new one did not come."""
    old = old_plan(out)
    try:
        check_replaceable(old)
    except (PlanError, OSError):
        return
    if out.exists():
        shutil.rmtree(old)
    else:
        os.rename(old, out)


def check_destination(out: Path, force: bool) -> None:
    """PlanError unless a plan may become `out`."""
    if not out.exists():
        return
    if not out.is_dir():
        raise PlanError(f"{out}: is a file; expected a directory to create")
    if not any(out.iterdir()):
        return
    if not (out / "plan.json").is_file():
        raise PlanError(f"{out}: is not empty and holds no plan; choose another directory")
    if force:
        check_replaceable(out)
    else:
        raise PlanError(f"{out}: already holds a plan; --force (force=True) replaces it")


def check_replaceable(out: Path) -> None:
    """PlanError unless the directory holds a plan and nothing besides: the rest may be precious."""
    try:
        manifest = json.loads((out / "plan.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        manifest = None
    known = isinstance(manifest, dict) and manifest.keys() >= {"format_version", "plan_hash"}
    if not known or not isinstance(manifest.get("files"), dict):
        raise PlanError(
            f"{out}: is not empty and holds no plan; choose another directory, or empty it"
        )
    for directory, folders, names in os.walk(out):
        links = [f for f in folders if (Path(directory) / f).is_symlink()]
        for name in sorted(names + links):
            path = (Path(directory) / name).relative_to(out).as_posix()
            if path != "plan.json" and path not in manifest["files"]:
                raise PlanError(
                    f"{out}: holds {path}, which does not belong to the plan and would be lost; "
                    "move it away, or choose another directory"
                )


def _remove_others(workspace: Workspace) -> None:
    """A workspace may hold files of an interrupted compile of another model."""
    wanted = {*workspace.files(), "plan.json"}
    for directory, _, names in os.walk(workspace.plan, topdown=False):
        for name in names:
            path = Path(directory) / name
            if path.relative_to(workspace.plan).as_posix() not in wanted:
                path.unlink()
        if Path(directory) != workspace.plan and not any(Path(directory).iterdir()):
            os.rmdir(directory)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two directories in one step; False where the system or the file system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    at_cwd, exchange = -100, 2
    done: int = renameat2(
        at_cwd, ctypes.c_char_p(os.fsencode(a)), at_cwd, ctypes.c_char_p(os.fsencode(b)), exchange
    )
    return done == 0


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
