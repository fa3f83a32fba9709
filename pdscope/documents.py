"""Texts that a model is measured or calibrated on: a file's documents as token ids.

May import numpy and pdscope.{errors,tokens}.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdscope.errors import InputError
from pdscope.tokens import Tokenizer

# A plain text is cut at the first empty line behind so many characters, or, without one, at the
# end of a line behind so many: a predictor is validated on whole documents, so there must be some.
PIECE, MOST = 4096, 65536

_WANTED = '{"text": "..."} or {"messages": [...]}, one a line'


@dataclass(frozen=True)
class Document:
    """A text that the model reads from an empty context.

    prefill, decode: which positions are of a prompt, and which are read one at a time, while the
    model writes. In a chat each position is of one kind; of a plain text either can be either.
    """

    ids: NDArray[np.int32]  # [n]
    prefill: NDArray[np.bool_]  # [n]
    decode: NDArray[np.bool_]  # [n]

    @classmethod
    def of_text(cls, ids: NDArray[np.int32]) -> "Document":
        both = np.ones(len(ids), np.bool_)
        decode = both.copy()
        decode[:1] = False  # something comes before what is written
        return cls(ids, both, decode)

    @classmethod
    def of_chat(cls, ids: NDArray[np.int32], assistant: NDArray[np.bool_]) -> "Document":
        """assistant: [n], the tokens that the model wrote."""
        return cls(ids, ~assistant, assistant)


def read_documents(tokenizer: Tokenizer, file: Path) -> Iterator[Document]:
    """Documents of a file, one after another: of jsonl each line, {"text"} or {"messages"} in the
    model's chat template; of a plain text pieces of some thousand characters.

    Raises InputError naming file and line, what was expected and the remedy; also for a file that
    holds no token.
    """
    found = False
    for document in _chats(tokenizer, file) if is_jsonl(file) else _pieces(tokenizer, file):
        if len(document.ids):
            found = True
            yield document
    if not found:
        raise InputError(f"{file}: holds no text, expected at least one document: add some")


def read_entries(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Lines of a jsonl file that are not blank: number, from 1, and an object that has a text
    `text` or a list `messages`. InputError for any other line."""
    for number, line in _lines(file):
        if not line.strip():
            continue
        if problem := _problem(entry := _parsed(line)):
            raise InputError(
                f"{file}:{number}: expected {_WANTED}, but {problem}: correct or remove the line"
            )
        assert isinstance(entry, dict)
        yield number, entry


def is_jsonl(file: Path) -> bool:
    """By its name, or because its first line looks so: JSON is not a text to learn from."""
    if file.suffix in (".jsonl", ".ndjson"):
        return True
    first = next((line for _, line in _lines(file) if line.strip()), "")
    entry = _parsed(first)
    return isinstance(entry, dict) and bool(entry.keys() & {"messages", "text"})


def _parsed(line: str) -> object:
    """The value of a line; the error that it gives instead of one."""
    try:
        value: object = json.loads(line)
    except (ValueError, RecursionError) as error:
        return error
    return value


def _problem(entry: object) -> str | None:
    """Why a line's value is no document."""
    if isinstance(entry, Exception):
        return f"the line is no JSON ({entry})"
    if not isinstance(entry, dict):
        return f"the line is a JSON {type(entry).__name__}"
    for name, kind, wanted in (("messages", list, "a list"), ("text", str, "a text")):
        if name in entry and not isinstance(entry[name], kind):
            return f"{name} is {type(entry[name]).__name__}, not {wanted}"
    return None if entry.keys() & {"messages", "text"} else "there is neither"


def _chats(tokenizer: Tokenizer, file: Path) -> Iterator[Document]:
    for number, entry in read_entries(file):
        try:
            if "messages" in entry:
                yield Document.of_chat(*tokenizer.encode_marked(entry["messages"]))
            else:
                yield Document.of_text(tokenizer.encode(entry["text"]))
        except InputError as error:
            raise InputError(f"{file}:{number}: {error}") from None


def _pieces(tokenizer: Tokenizer, file: Path) -> Iterator[Document]:
    piece: list[str] = []
    size = 0
    for _, line in _lines(file):
        piece.append(line)
        size += len(line)
        if size >= (MOST if line.strip() else PIECE):
            yield Document.of_text(tokenizer.encode("".join(piece)))
            piece, size = [], 0
    if "".join(piece).strip():
        yield Document.of_text(tokenizer.encode("".join(piece)))


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """Lines with their ends, which are newlines alone: JSON strings may hold other separators."""
    try:
        with file.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                try:
                    yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise InputError(
                        f"{file}:{number}: is not valid UTF-8 (at byte {error.start} of the line): "
                        "convert the file first, e.g. with iconv -t utf-8"
                    ) from None
    except OSError as error:
        raise InputError(
            f"{file}: {error.strerror}, expected a text file in UTF-8: correct the path"
        ) from None
