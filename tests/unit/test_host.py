"""What the runtime makes of a machine: cores, siblings, NUMA nodes, quotas and memory limits.

Holds: "pinning, physical cores before siblings, NUMA-aware first touch", on fake machines under a
directory, as the real one that tests run on has but one topology.
"""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pdscope.runtime_c import ROOT as RUNTIME

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="sysfs")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import os

    out = tmp_path_factory.mktemp("host") / "print_host"
    source = Path(__file__).resolve().parents[1] / "support" / "print_host.c"
    compiler = shlex.split(os.environ.get("CC", "cc"))
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{RUNTIME / 'src'}"]
    command = [*compiler, *flags, str(source), str(RUNTIME / "src" / "host.c"), "-o", str(out)]
    subprocess.run(command, check=True)
    return out


def write(root: Path, path: str, text: str) -> None:
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n")


def machine(
    root: Path, cores: list[list[int]], nodes: dict[int, str], online: str, older: bool = False
) -> Path:
    """A sysfs with these cores (their logical CPUs) and nodes (their CPU lists)."""
    name = "thread_siblings_list" if older else "core_cpus_list"
    for core in cores:
        for cpu in core:
            folder = f"sys/devices/system/cpu/cpu{cpu}/topology"
            write(root, f"{folder}/{name}", ",".join(map(str, core)))
    write(root, "sys/devices/system/cpu/online", online)
    for node, cpus in nodes.items():
        write(root, f"sys/devices/system/node/node{node}/cpulist", cpus)
    write(root, "sys/devices/system/node/online", ",".join(map(str, nodes)))
    return root


def read(program: Path, root: Path, affinity: range | list[int]) -> dict[str, Any]:
    command = [str(program), str(root), *map(str, affinity)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def test_this_machine(program: Path) -> None:
    done = subprocess.run([str(program), ""], capture_output=True, text=True, check=True)
    host = json.loads(done.stdout)
    assert 1 <= host["threads"] <= host["cores"] <= host["cpus"]
    assert host["nodes"] >= 1
    assert len(set(host["first"])) == host["cores"]


@pytest.mark.parametrize("older", [False, True])
def test_siblings_count_once(program: Path, tmp_path: Path, older: bool) -> None:
    """CPUs n and n + 4 are one core, as Linux numbers them on x86-64."""
    root = machine(tmp_path, [[n, n + 4] for n in range(4)], {0: "0-7"}, "0-7", older)
    host = read(program, root, range(8))
    assert (host["cpus"], host["cores"], host["threads"]) == (8, 4, 4)
    assert host["first"] == [0, 1, 2, 3]
    assert host["sets"] == [[0, 4], [1, 5], [2, 6], [3, 7], [0, 4]]
    assert host["whole"]


def test_neighbouring_siblings(program: Path, tmp_path: Path) -> None:
    root = machine(tmp_path, [[2 * n, 2 * n + 1] for n in range(3)], {0: "0-5"}, "0-5")
    assert read(program, root, range(6))["first"] == [0, 2, 4]


def test_four_nodes_take_turns(program: Path, tmp_path: Path) -> None:
    """Four nodes of two cores with two siblings, and a fifth of memory alone."""
    nodes = {n: f"{2 * n}-{2 * n + 1},{8 + 2 * n}-{9 + 2 * n}" for n in range(4)} | {4: ""}
    root = machine(tmp_path, [[n, n + 8] for n in range(8)], nodes, "0-15")
    host = read(program, root, range(16))
    assert (host["cores"], host["nodes"], host["node_mask"]) == (8, 4, 0b1111)
    assert host["first"] == [0, 2, 4, 6, 1, 3, 5, 7]


def test_uneven_nodes(program: Path, tmp_path: Path) -> None:
    root = machine(tmp_path, [[n] for n in range(5)], {0: "0", 1: "1-4"}, "0-4")
    assert read(program, root, range(5))["first"] == [0, 1, 2, 3, 4]


def test_affinity_leaves_cores_out(program: Path, tmp_path: Path) -> None:
    """Of core 1 only the sibling is left; node 1 is out of it altogether."""
    root = machine(tmp_path, [[n, n + 4] for n in range(4)], {0: "0-1,4-5", 1: "2-3,6-7"}, "0-7")
    host = read(program, root, [0, 4, 5])
    assert (host["cpus"], host["cores"], host["nodes"], host["node_mask"]) == (3, 2, 1, 1)
    assert host["sets"] == [[0, 4], [5], [0, 4]]
    assert not host["whole"]


def test_offline_cpus(program: Path, tmp_path: Path) -> None:
    root = machine(tmp_path, [[0, 4], [2], [3, 7]], {0: "0,2-4,7"}, "0,2-4,7")
    host = read(program, root, range(8))
    assert (host["cpus"], host["cores"]) == (5, 3)
    assert host["first"] == [0, 2, 3]
    assert host["whole"]


def test_no_sysfs(program: Path, tmp_path: Path) -> None:
    host = read(program, tmp_path, range(6))
    assert (host["cores"], host["nodes"], host["quota"], host["threads"]) == (6, 1, 0, 6)
    assert host["memory"] == 2**64 - 1


@pytest.mark.parametrize(
    ("groups", "threads"),
    [
        ({"/a/b": "max 100000"}, 8),
        ({"/a/b": "150000 100000"}, 2),
        ({"/a/b": "max 100000", "/a": "300000 100000"}, 3),
        ({"/a/b": "50000 100000", "": "400000 100000"}, 1),
        ({"/a/b": "1600000 100000"}, 8),
        ({"/a/b": "rubbish"}, 8),
    ],
)
def test_cgroup_quota(program: Path, tmp_path: Path, groups: dict[str, str], threads: int) -> None:
    """The tightest quota from the process's group up to the root holds."""
    root = machine(tmp_path, [[n] for n in range(8)], {0: "0-7"}, "0-7")
    write(root, "proc/self/cgroup", "0::/a/b")
    for group, text in groups.items():
        write(root, f"sys/fs/cgroup{group}/cpu.max", text)
    assert read(program, root, range(8))["threads"] == threads


@pytest.mark.parametrize(("quota", "threads"), [(-1, 8), (250000, 3)])
def test_cgroup_version_1(program: Path, tmp_path: Path, quota: int, threads: int) -> None:
    root = machine(tmp_path, [[n] for n in range(8)], {0: "0-7"}, "0-7")
    write(root, "proc/self/cgroup", "5:cpuacct,cpu:/box\n4:cpuset:/\n3:memory:/box\n0::/")
    write(root, "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us", str(quota))
    write(root, "sys/fs/cgroup/cpu/box/cpu.cfs_period_us", "100000")
    write(root, "proc/meminfo", "MemTotal: 9000000 kB\nMemAvailable: 8000000 kB")
    write(root, "sys/fs/cgroup/memory/box/memory.limit_in_bytes", "1000000")
    write(root, "sys/fs/cgroup/memory/box/memory.usage_in_bytes", "700000")
    write(root, "sys/fs/cgroup/memory/box/memory.stat", "rss 1\ntotal_inactive_file 200000\nx 1")
    host = read(program, root, range(8))
    assert host["threads"] == threads
    assert host["memory"] == 500000  # of the limit, page cache counted as free


@pytest.mark.parametrize(
    ("limit", "memory"), [("max", 8_192_000_000), ("6000000", 5500000), ("400000", 1)]
)
def test_memory(program: Path, tmp_path: Path, limit: str, memory: int) -> None:
    write(tmp_path, "proc/meminfo", "MemTotal:   9000000 kB\nMemAvailable:  8000000 kB")
    write(tmp_path, "proc/self/cgroup", "0::/box/inner")
    write(tmp_path, "sys/fs/cgroup/box/memory.max", limit)
    write(tmp_path, "sys/fs/cgroup/box/memory.current", "1000000")
    write(
        tmp_path,
        "sys/fs/cgroup/box/memory.stat",
        "anon 500000\nactive_file 300000\ninactive_file 200000",
    )
    assert read(program, tmp_path, range(2))["memory"] == memory
