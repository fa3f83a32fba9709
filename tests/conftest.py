"""What all tests share: which long and timed ones run, and one cache and store of plans per run."""

import os
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported: its idle threads would otherwise spin on the cores the runtime needs.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
from hypothesis import settings
from support.plans import PlanStore

# How long an example takes says nothing on a loaded machine.
settings.register_profile("pdscope", deadline=None)
settings.load_profile("pdscope")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--run-verify", action="store_true", help="run the tests marked `verify` too (an hour)"
    )
    parser.addoption(
        "--run-device",
        action="store_true",
        help="run the timed tests marked `device` too, on a machine that is otherwise idle",
    )
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite the golden files, then compare"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the `verify` tests out, unless --run-verify or a -m expression says what to run, and
    skips the `device` tests unless --run-device is given."""
    if not config.getoption("--run-device"):
        skip = pytest.mark.skip(reason="timed: give --run-device on a machine otherwise idle")
        for item in items:
            if item.get_closest_marker("device"):
                item.add_marker(skip)
    if config.getoption("--run-verify") or config.getoption("-m"):
        return
    long = [item for item in items if item.get_closest_marker("verify")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]


def _run_folder(factory: pytest.TempPathFactory) -> Path:
    """A folder of this test run; the same one in all worker processes of pytest-xdist."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "run"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session", autouse=True)
def _environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests read no cache but their own, and do not fight over cores."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDSCOPE_CACHE", str(_run_folder(tmp_path_factory) / "cache"))
        for name in ("PDSCOPE_ISA", "PDSCOPE_THREADS", "PDSCOPE_DUMP", "PDSCOPE_DEBUG"):
            patch.delenv(name, raising=False)
        if "PYTEST_XDIST_WORKER" in os.environ:
            patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="session")
def plans(tmp_path_factory: pytest.TempPathFactory) -> PlanStore:
    folder = _run_folder(tmp_path_factory) / "plans"
    folder.mkdir(exist_ok=True)
    return PlanStore(folder)
