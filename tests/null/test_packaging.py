"""The wheel holds every package and data file, and the repository names no machine.

Holds the issue's lines on set-up (the wheel compiles away from the checkout) and on test assets
(one mention). Needs no compiler.
"""

import importlib
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = CONFIG["tool"]["setuptools"]


def tracked_files() -> list[Path]:
    """What git knows of the repository, links left out."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    out = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True)
    files = [ROOT / name for name in out.stdout.decode().split("\0") if name]
    return [f for f in files if f.is_file() and not f.is_symlink()]


def inside_link(path: Path, base: Path) -> bool:
    return any(p.is_symlink() for p in path.parents if p != base and base in p.parents)


def test_package_list_is_complete() -> None:
    """A Python package that pyproject.toml does not list would be missing from the wheel."""
    on_disk = set()
    for name, folder in SETUPTOOLS["package-dir"].items():
        base = ROOT / folder
        for init in base.rglob("__init__.py"):
            if not inside_link(init, base):
                on_disk.add(".".join((name, *init.parent.relative_to(base).parts)))
    assert on_disk == set(SETUPTOOLS["packages"])


def test_console_scripts_exist() -> None:
    scripts = CONFIG["project"]["scripts"]
    assert len(scripts) == 5
    for name, target in scripts.items():
        module, function = target.split(":")
        assert callable(getattr(importlib.import_module(module), function)), name


def test_rooms_are_linked() -> None:
    """Each top-level room is reachable as a sub-package, so that tools see one package."""
    for name, folder in SETUPTOOLS["package-dir"].items():
        if name != "pdscope":
            link = ROOT / "pdscope" / name.removeprefix("pdscope.")
            assert link.is_symlink() and link.resolve() == ROOT / folder, name


def test_data_files_are_in_the_wheel() -> None:
    """Every tracked file of a packaged room that is not Python matches a package-data pattern."""
    folders = SETUPTOOLS["package-dir"]
    for package, folder in folders.items():
        patterns = SETUPTOOLS["package-data"].get(package, [])
        listed = {f for pattern in patterns for f in (ROOT / folder).glob(pattern)}
        for file in tracked_files():
            if ROOT / folder in file.parents and file.suffix not in {".py", ".pyc", ".md"}:
                assert file in listed, f"{file.relative_to(ROOT)} would be missing from the wheel"


def test_licence_and_requirements() -> None:
    """Apache-2.0; running a plan needs no package that the project does not declare."""
    assert CONFIG["project"]["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    assert any(re.fullmatch(r"torch==[\d.]+", p) for p in pins)


def test_no_machine_is_named() -> None:
    """No absolute path of one machine, no private address; .ci/run alone names the test assets."""
    slash = "/"  # so that this file does not match its own patterns
    folders = "|".join(("work", "root", "home", "mnt", "Users", "opt"))
    machine_path = re.compile(rf"(?<![\w.$}}*{slash}-]){slash}(?:{folders}){slash}\w")
    address = re.compile(r"(?<![\d.])(?:10|192\.168|172\.(?:1[6-9]|2\d|3[01]))(?:\.\d{1,3}){2,3}\b")
    assets = re.compile(r"\.\." + slash + "shared")
    found = []
    for file in tracked_files():
        name = file.relative_to(ROOT).as_posix()
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if file.name == "tokenizer.json":
            continue
        for pattern in (machine_path, address, assets):
            if pattern is assets and name == ".ci/run":
                continue
            found += [f"{name}: {m.group()}" for m in pattern.finditer(text)]
    assert found == []
