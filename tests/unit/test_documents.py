"""Texts to calibrate and measure on: files as documents of token ids.

Holds the issue's line "`--calibration FILE` (jsonl with `text` or `messages`, or plain text)", and
that decode records are the assistant's positions.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.assets import BUNDLED

from pdscope.chat import ChatTemplate
from pdscope.documents import Document, read_documents
from pdscope.errors import InputError
from pdscope.plan import Plan
from pdscope.tokens import Tokenizer

MODEL = BUNDLED / "tiny-mixtral"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """That of a model directory, as a plan that holds its tokenizer's files and nothing else."""
    files: dict[str, Any] = {path.name: {} for path in MODEL.iterdir()}
    return Tokenizer(Plan(MODEL, {"tokenizer": {"file": "tokenizer.json"}, "files": files}))


def read(tokenizer: Tokenizer, path: Path, text: str | bytes) -> list[Document]:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return list(read_documents(tokenizer, path))


def lines(*entries: object) -> str:
    return "".join(json.dumps(entry) + "\n" for entry in entries)


def said(tokenizer: Tokenizer, document: Document) -> str:
    return tokenizer.decode(document.ids[document.decode].tolist(), skip_special=False)


def turns(*contents: str) -> dict[str, Any]:
    roles = ("user", "assistant") * len(contents)
    pairs = zip(roles, contents, strict=False)
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


def test_of_a_chat_the_assistant_wrote_its_contents(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Every position is of one phase, and the marks of the template are of the prompt."""
    (document,) = read(
        tokenizer, tmp_path / "a.jsonl", lines(turns("user", "A user asked.", "Why?", "Why not?"))
    )
    assert said(tokenizer, document) == "A user asked.Why not?"
    assert (document.prefill ^ document.decode).all()
    messages = turns("user", "A user asked.", "Why?", "Why not?")["messages"]
    whole = tokenizer.encode_chat(messages, add_generation_prompt=False)
    assert document.ids.tolist() == whole.tolist()


@pytest.mark.parametrize(
    "contents", [("a", "a"), ("end", "assistant"), ("<", " user \n"), ("x", "")]
)
def test_contents_that_the_template_holds_too(
    tokenizer: Tokenizer, tmp_path: Path, contents: tuple[str, str]
) -> None:
    (document,) = read(tokenizer, tmp_path / "a.jsonl", lines(turns(*contents)))
    assert said(tokenizer, document).strip() == contents[1].strip()
    prompt = tokenizer.encode_chat([{"role": "user", "content": contents[0]}])
    assert not document.decode[: len(prompt)].any()


def test_templates_that_change_what_was_said() -> None:
    """Contents are found where the template strips them or drops what the assistant thought; what
    is not there is no decode position."""
    template = ChatTemplate(
        "{% for m in messages %}[{{ m.role }}]{% if m.role == 'user' %}{{ m.content }}{% else %}"
        "{{ m.content.split('</think>')[-1] | trim }}{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]<think>{% endif %}",
        {},
    )
    messages = turns("one", "  two ", "three", "<think>x</think>four")["messages"]
    text, spans = template.render_marked(messages)
    assert [text[begin:end] for begin, end in spans] == ["two"]


def test_a_text_can_be_of_either_phase(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Of a plain text nobody knows what is prompt; its first token alone is never generated."""
    (document,) = read(tokenizer, tmp_path / "a.jsonl", lines({"text": "Once upon a time."}))
    assert document.ids.tolist() == tokenizer.encode("Once upon a time.").tolist()
    assert document.prefill.all()
    assert document.decode.tolist() == [False] + [True] * (len(document.ids) - 1)


def test_a_plain_text_is_cut_at_empty_lines(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Into documents, as a predictor is validated on whole ones; none of it is lost."""
    paragraph = "All work and no play makes a dull boy.\n" * 60 + "\n"
    documents = read(tokenizer, tmp_path / "a.txt", paragraph * 8)
    assert len(documents) == 4
    texts = [tokenizer.decode(d.ids.tolist()) for d in documents]
    assert "".join(texts).split() == (paragraph * 8).split()
    assert len(read(tokenizer, tmp_path / "b.txt", "word " * 30_000)) == 1


def test_jsonl_is_known_by_its_first_line_too(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (document,) = read(tokenizer, tmp_path / "chats.json", "\n" + lines(turns("Hi", "Hello")))
    assert said(tokenizer, document) == "Hello"
    text = '{"a": 1}\n'
    (document,) = read(tokenizer, tmp_path / "a.txt", text)
    assert tokenizer.decode(document.ids.tolist()).strip() == text.strip()


def test_separators_within_strings_and_blank_lines(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A line ends at a newline alone; blank lines and a byte-order mark are no fault."""
    text = "\ufeff" + json.dumps({"text": "a\u2028b\x85c"}, ensure_ascii=False) + "\r\n\n"
    (document,) = read(tokenizer, tmp_path / "a.jsonl", text)
    assert document.ids.tolist() == tokenizer.encode("a\u2028b\x85c").tolist()


GOOD = lines({"text": "fine"})


def but(line: int, problem: str) -> str:
    return (
        f':{line}: expected {{"text": "..."}} or {{"messages": [...]}}, one a line, but {problem}'
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (GOOD + '{"text": "cut', but(2, "the line is no JSON")),
        (GOOD + "[1, 2]\n", but(2, "the line is a JSON list: correct")),
        (lines({"txt": "x"}), but(1, "there is neither: correct or remove the line")),
        (lines({"text": 3}), but(1, "text is int, not a text: ")),
        (lines({"text": None}), but(1, "text is NoneType, not a text: ")),
        (lines({"messages": "hi"}), but(1, "messages is str, not a list: ")),
        (lines({"messages": []}), ":1: no messages: give at least one"),
        (lines({"messages": [{"content": "x"}]}), ":1: message 0 has no 'role'"),
        (lines({"messages": [{"role": "user"}]}), ":1: message 0: content is missing"),
        (lines({"messages": ["hi"]}), ":1: message 0 has no 'role'"),
        (lines(turns("a", "b") | {"text": 1}), but(1, "text is int, not a text: ")),
        ('{"text": "\\ud800"}\n', ":1: the prompt is not valid UTF-8"),
        (GOOD.encode() + b'{"text": "\xff"}', ":2: is not valid UTF-8 (at byte 10 of the line)"),
        ("[" * 100_000, but(1, "the line is no JSON")),
        ("", ": holds no text, expected at least one document"),
        ("\n \n", ": holds no text"),
    ],
)
def test_faults_name_file_line_and_remedy(
    tokenizer: Tokenizer, tmp_path: Path, text: str | bytes, says: str
) -> None:
    """Holds: "clear errors naming file, line, field, expected, remedy"."""
    file = tmp_path / "bad.jsonl"
    with pytest.raises(InputError) as caught:
        read(tokenizer, file, text)
    assert str(caught.value).startswith(f"{file}{says}")


def test_files_that_are_none(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for path in (tmp_path / "no", tmp_path):
        with pytest.raises(InputError, match="expected a text file in UTF-8: correct the path"):
            list(read_documents(tokenizer, path))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["text", "messages", "role", "content", "type", "x"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(value=VALUES, cut=st.none() | st.integers(0, 200))
def test_any_line_is_read_or_refused_in_words(
    tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory, value: object, cut: int | None
) -> None:
    """Whatever JSON there is, whole or cut: documents whose parts fit, or an InputError that names
    the file."""
    file = tmp_path_factory.getbasetemp() / "any.jsonl"
    line = json.dumps(value).encode()
    try:
        for document in read(tokenizer, file, line if cut is None else line[:cut]):
            assert document.ids.dtype == np.int32
            assert document.ids.shape == document.prefill.shape == document.decode.shape
    except InputError as error:
        assert str(error).startswith(str(file)) and "\n" not in str(error)
