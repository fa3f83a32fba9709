"""Kernel paths as a parameter: the ones this CPU lacks are skipped by name."""

import re
from functools import cache

import pytest
from support.assets import BUNDLED
from support.plans import PlanStore

from pdscope.runtime_c import ISA_PATHS


@cache
def runnable(store: PlanStore) -> tuple[str, ...]:
    from pdscope.native import Library

    library = Library(store.compile(BUNDLED / "tiny-mixtral", dtype="fp32") / "lib/libpdscope.so")
    return tuple(library.text(library.lib.pds_isa_runnable()).split(","))


@pytest.fixture(params=ISA_PATHS)
def isa(request: pytest.FixtureRequest, plans: PlanStore) -> str:
    """The name of each kernel path that can run here."""
    name: str = request.param
    if name not in runnable(plans):
        pytest.skip(f"kernel path {name} cannot run on this CPU")
    return name


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """CI prints the paths that were run."""
    ran = {
        path
        for report in terminalreporter.getreports("passed")
        for path in ISA_PATHS
        if re.search(rf"[\[-]{path}[\]-]", report.nodeid)
    }
    if ran:
        terminalreporter.write_line(f"kernel paths run: {', '.join(sorted(ran))}")
