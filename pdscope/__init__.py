"""PDScope: compiles a Mixture-of-Experts model to a plan and runs the plan.

`compile` and `load` are the two ways in. Names are resolved on first use (PEP 562), so that
importing this package, or running a plan, imports neither torch nor transformers. May import
pdscope.errors at once and anything of ours lazily.
"""

import importlib
from typing import TYPE_CHECKING, Any

from pdscope.errors import (
    BudgetError,
    Cancelled,
    InputError,
    ModelError,
    PdscopeError,
    PlanError,
    TargetError,
)

if TYPE_CHECKING:
    from pdscope.compiler.driver import compile_model as compile
    from pdscope.engine import Engine, load
    from pdscope.generation import Completion, Stream
    from pdscope.plan import Plan
    from pdscope.session import Session

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "Cancelled",
    "Completion",
    "Engine",
    "InputError",
    "ModelError",
    "PdscopeError",
    "Plan",
    "PlanError",
    "Session",
    "Stream",
    "TargetError",
    "__version__",
    "compile",
    "load",
]

_LAZY = {
    "compile": ("pdscope.compiler.driver", "compile_model"),
    "load": ("pdscope.engine", "load"),
    "Completion": ("pdscope.generation", "Completion"),
    "Engine": ("pdscope.engine", "Engine"),
    "Plan": ("pdscope.plan", "Plan"),
    "Session": ("pdscope.session", "Session"),
    "Stream": ("pdscope.generation", "Stream"),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'pdscope' has no attribute {name!r}")
    module, attribute = _LAZY[name]
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
