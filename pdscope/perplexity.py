"""Perplexity of a plan on texts: how much its weights' format costs.

May import numpy and pdscope.{documents,engine,errors}.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pdscope.documents import read_entries
from pdscope.errors import InputError

if TYPE_CHECKING:
    from pdscope.engine import Engine

WINDOW = 512  # tokens that one context holds at most


@dataclass(frozen=True)
class Perplexity:
    """exp of the mean negative log-likelihood, in nats, of the tokens that had one before them."""

    tokens: int
    windows: int
    loss: float  # mean, nats a token

    @property
    def value(self) -> float:
        return math.exp(self.loss)


def read_windows(engine: "Engine", file: Path, limit: int = 0) -> list[NDArray[np.int32]]:
    """Token ids of a file, cut into windows of at most 512 tokens or the plan's context.

    Each line of a *.jsonl file is a text of its own: {"text": "..."} or a chat, {"messages":
    [...]}, in the model's template; any other file is one text. limit: tokens in all; 0: no limit.
    Raises InputError naming the line that is neither, and for a file of less than two tokens.
    """
    size = min(WINDOW, engine.info.max_context)
    windows: list[NDArray[np.int32]] = []
    left = limit or np.iinfo(np.int64).max
    for ids in _texts(engine, file):
        for at in range(0, len(ids), size):
            window = ids[at : at + min(size, left)]
            if len(window) < 2:
                continue
            windows.append(window)
            left -= len(window)
        if left < 2:
            break
    if not windows:
        raise InputError(f"{file}: holds less than two tokens, so none can be predicted")
    return windows


def measure(engine: "Engine", windows: Iterable[NDArray[np.int32]]) -> Perplexity:
    """Each window is predicted from an empty context; sums are in float64."""
    session = engine.main
    step = min(engine.info.max_rows, engine.info.max_logits)
    total, tokens, count = 0.0, 0, 0
    for ids in windows:
        session.reset()
        for at in range(0, len(ids) - 1, step):
            rows = ids[at : min(at + step, len(ids) - 1)]
            logits = session.prefill(rows, all_logits=True).astype(np.float64)
            following = ids[at + 1 : at + 1 + len(rows)]
            top = logits.max(1, keepdims=True)
            log_sum = np.log(np.exp(logits - top).sum(1)) + top[:, 0]
            total += float((log_sum - logits[np.arange(len(rows)), following]).sum())
            tokens += len(rows)
        count += 1
    return Perplexity(tokens, count, total / tokens)


def _texts(engine: "Engine", file: Path) -> Iterator[NDArray[np.int32]]:
    tokenizer = engine.tokenizer
    if file.suffix != ".jsonl":
        yield tokenizer.encode(_text(file))
        return
    for number, entry in read_entries(file):
        if "messages" not in entry:
            yield tokenizer.encode(entry["text"])
            continue
        try:
            yield tokenizer.encode_chat(entry["messages"], add_generation_prompt=False)
        except InputError as error:
            raise InputError(f"{file}:{number}: {error}") from None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}: expected a text file in UTF-8") from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"{file}: is not valid UTF-8 (at byte {error.start}): convert it first, e.g. with "
            "iconv -t utf-8"
        ) from None
