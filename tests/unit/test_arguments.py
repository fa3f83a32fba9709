"""Options of the Python API that have a wrong type are named in one line.

Holds the issue's "every error of input is one line naming the field, what was expected and the
remedy", for compile(), load(), generate() and copies of an engine.
"""

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import fake_plan
from support.assets import BUNDLED
from support.plans import PlanStore

import pdscope
from pdscope.arguments import byte_count
from pdscope.compiler.source import Options
from pdscope.errors import BudgetError, InputError, PdscopeError

MODEL = BUNDLED / "tiny-mixtral"


@pytest.fixture(scope="module")
def plan(plans: PlanStore) -> Path:
    return plans.once("fake", fake_plan.make_fake_plan)


@pytest.fixture
def engine(plan: Path) -> Iterator[pdscope.Engine]:
    with pdscope.load(plan) as loaded:
        yield loaded


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_context": 100.5}, "max_context is 100.5, expected an integer"),
        ({"max_context": "5"}, "max_context is '5', expected an integer"),
        ({"max_context": True}, "max_context is True, expected an integer"),
        ({"max_rows": 2.0}, "max_rows is 2.0, expected an integer"),
        ({"target": 5}, "target is 5, expected a text"),
        ({"target": None}, "target is None, expected a text"),
        ({"check_weights": "no"}, "check_weights is 'no', expected True or False"),
        ({"dtype": 16}, "dtype: '16' is unknown; expected one of auto"),
        ({"force": "no"}, "force is 'no', expected True or False"),
        ({"dry_run": None}, "dry_run is None, expected True or False"),
        ({"model": None}, "model is None, expected a path"),
        ({"model": ""}, "model is '', expected a path that is not empty"),
        ({"model": b"x"}, "model is b'x', expected a path"),
        ({"out": None}, "an output directory is needed"),
        ({"out": 5}, "out is 5, expected a path"),
        ({"out": "a\0b"}, r"out is 'a\\x00b', expected a path without a NUL"),
        ({"foo": 1}, "compile: got an unexpected keyword argument 'foo'"),
    ],
)
def test_compile(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    given = {"model": MODEL, "out": tmp_path / "plan", **arguments}
    with pytest.raises(InputError, match=message) as caught:
        pdscope.compile(**given)
    assert "\n" not in str(caught.value)
    assert not any(tmp_path.iterdir())


def test_numbers_of_numpy_are_numbers() -> None:
    options = Options(max_context=np.int64(7), max_rows=np.int32(3))  # type: ignore[arg-type]
    assert type(options.max_context) is int and type(options.max_rows) is int


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"plan": None}, "plan is None, expected a path"),
        ({"plan": 5}, "plan is 5, expected a path"),
        ({"plan": ""}, "plan is '', expected a path that is not empty"),
        ({"plan": "a\0b"}, r"plan is 'a\\x00b', expected a path without a NUL"),
        ({"threads": 1.5}, "threads is 1.5, expected an integer"),
        ({"threads": "2"}, "threads is '2', expected an integer"),
        ({"isa": 5}, "isa is 5, expected a text"),
        ({"isa": "fake\0"}, r"isa is 'fake\\x00', expected a kernel path"),
        ({"isa": "\udcff"}, "isa is not valid UTF-8"),
        ({"pin": 5}, "pin is 5, expected auto, on, off"),
        ({"weights": ["mmap"]}, r"weights is \['mmap'\], expected auto, mmap, copy"),
        ({"verify": 1}, "verify is 1, expected True or False"),
    ],
)
def test_load(plan: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        pdscope.load(**{"plan": plan, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"foo": 1}, "generate: got an unexpected keyword argument 'foo'"),
        ({"session": 1}, "generate: got an unexpected keyword argument 'session'"),
        ({"chat_options": 5}, "chat_options is 5, expected a dict"),
    ],
)
def test_generate(engine: pdscope.Engine, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        engine.generate("Hello", **arguments)


def test_engines_and_sessions_are_not_copied(engine: pdscope.Engine) -> None:
    for made in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(PdscopeError, match=r"engine cannot be copied .*pdscope\.load\(\)"):
            made(engine)  # type: ignore[operator]
        with pytest.raises(PdscopeError, match=r"session cannot be copied .*engine\.session\(\)"):
            made(engine.main)  # type: ignore[operator]


def test_options_are_named_as_python_has_them(engine: pdscope.Engine) -> None:
    tokens = [1] * (engine.info.max_context + 1)
    for call in (engine.generate, engine.prefill):
        with pytest.raises(BudgetError, match=r"--max-context \(max_context=\)"):
            call(tokens)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("value", "size"),
    [
        *((4200000, 4200000), ("4200000", 4200000), ("4.2MB", 4200000), (" 4.2 mb ", 4200000)),
        *(("4MiB", 4 << 20), ("1.5kib", 1536), ("2GB", 2 * 10**9), ("7B", 7), ("0.1kB", 100)),
    ],
)
def test_byte_count(value: object, size: int) -> None:
    assert byte_count("budget", value) == size


@pytest.mark.parametrize("value", ["", "MB", "4.2.1", "-1", "4 TB", "1e6", 1.5, True, None])
def test_no_byte_count(value: object) -> None:
    with pytest.raises(InputError, match=r"^budget is .*, expected"):
        byte_count("budget", value)
