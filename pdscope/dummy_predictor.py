"""A predictor of a chosen accuracy, for models of dummy weights, whose routing nothing can learn.

It needs to know what the gates will choose: a run of the same tokens beforehand is recorded, and
its choices, spoilt as far as the accuracy says, are set as predictions of the run that counts. So
it shows what a scheduler makes of such predictions, and says nothing of any predictor. May import
numpy and pdscope.{errors,ir,plan,predictors}; pdscope.session for its types alone.
"""

import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from pdscope.errors import InputError, PlanError
from pdscope.ir.isa import Opcode
from pdscope.plan import Plan
from pdscope.predictors import FORMAT, JSON

if TYPE_CHECKING:
    from pdscope.observe import TapEvent
    from pdscope.session import Session

KEY = "dummy"  # in phaseper.json
_FORM = re.compile(r"accuracy:([0-9.eE+-]+)(?:,seed:([0-9]{1,9}))?")


@dataclass(frozen=True)
class DummyPredictor:
    """accuracy: the chance of each of the next layer's experts to be predicted."""

    accuracy: float
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `accuracy:P` or `accuracy:P,seed:N`. Raises InputError."""
        match = _FORM.fullmatch(text)
        try:
            accuracy = float(match[1]) if match else math.nan
        except ValueError:
            accuracy = math.nan
        if match is None or not 0 <= accuracy <= 1:
            raise InputError(
                f"dummy_predictor: {text!r} is not accuracy:P with P from 0 to 1, or "
                "accuracy:P,seed:N"
            )
        return cls(accuracy, int(match[2] or 0))

    @classmethod
    def of(cls, plan: Plan) -> Self | None:
        """What the plan was compiled with. Raises PlanError for a damaged phaseper.json."""
        if JSON not in plan.files:
            return None
        file = plan.path / JSON
        try:
            data = json.loads(plan.read_text(JSON)).get(KEY)
            return None if data is None else cls.parse(cls(**data).text)
        except (ValueError, TypeError, AttributeError, InputError) as error:
            raise PlanError(f"{file}: {KEY}: {error}: compile the plan again") from None

    @property
    def text(self) -> str:
        return f"accuracy:{self.accuracy:g},seed:{self.seed}"

    def describe(self) -> str:
        """For people."""
        return (
            f"a dummy that names each of the next layer's experts with probability "
            f"{self.accuracy:g} (seed {self.seed}), from a recorded run: nothing was predicted"
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def file(self, hidden: int, experts: int, top_k: int) -> dict[str, Any]:
        """phaseper.json of a plan with this predictor."""
        sizes = {"hidden": hidden, "experts": experts, "top_k": top_k}
        return {"format_version": FORMAT, **sizes, KEY: self.as_dict(), "layers": []}

    def predictions(self, chosen: NDArray[np.int32], experts: int) -> NDArray[np.int32]:
        """What Session.set_predictions takes [tokens, layers, top_k].

        chosen: what each layer's gate chose, -1 in layers without one. Where a layer has no next
        one, it predicts expert 0. An expert that is not named gives its rank to a random one that
        the token did not choose, while there is one. The same arguments give the same result.
        """
        out = np.zeros_like(chosen)
        moe = [n for n in range(chosen.shape[1]) if (chosen[:, n] >= 0).all()]
        for layer, target in zip(moe, moe[1:], strict=False):
            random = np.random.Generator(np.random.PCG64([self.seed, layer]))
            truth = chosen[:, target]
            kept = random.random(truth.shape) < self.accuracy
            # In the order in which they step in: strangers, then what was left out, no twin.
            order = random.random((len(truth), experts))
            np.put_along_axis(order, truth.astype(np.int64), np.where(kept, 3.0, 2.0), 1)
            stranger = np.argsort(order, axis=1, kind="stable")
            place = np.maximum(np.cumsum(~kept, axis=1) - 1, 0)
            others = np.take_along_axis(stranger, place, 1)
            out[:, layer] = np.where(kept, truth, others)
        return out


def record(session: "Session", run: Callable[[], None]) -> NDArray[np.int32]:
    """What the gates choose while `run` gives the session tokens from its first position on, one
    sequence alone: [tokens, layers, top_k], -1 in layers without a gate."""
    model = session.engine.plan.model
    parts: dict[int, list[NDArray[np.int32]]] = {}

    def tap(event: "TapEvent") -> None:
        if event.opcode == Opcode.GATE and event.ids is not None:
            parts.setdefault(event.layer, []).append(event.ids.copy())

    with session.tap(tap):
        run()
    tokens = sum(map(len, next(iter(parts.values())))) if parts else 0
    out = np.full((tokens, model["layers"], model["top_k"]), -1, np.int32)
    for layer, pieces in parts.items():
        out[:, layer] = np.concatenate(pieces)
    return out


def check_plan(plan: Plan) -> None:
    """Raises InputError for a plan that a dummy predictor is not for."""
    if plan.model["load_format"] != "dummy":
        raise InputError(
            f"dummy_predictor: {plan.path} has real weights: train predictors on a text, with "
            "pdscope-compile --calibration FILE"
        )
    if plan.data["predictor"] == "none":
        raise InputError(
            f"dummy_predictor: the programs of {plan.path} predict nothing: compile it with "
            "--cache-prefetch on"
        )
