"""Descriptions of machines, one JSON file each: link, memory and rates, every figure with its
source. compiler/hardware.py makes a model's costs of one; docs/costs-format.md describes the files.
Imports nothing of ours.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent


def names() -> list[str]:
    """Of the descriptions that are shipped, sorted."""
    return sorted(path.stem for path in ROOT.glob("*.json"))


def file(name: str) -> Path:
    """Of one of `names`."""
    return ROOT / f"{name}.json"
