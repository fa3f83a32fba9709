"""A plan directory with a stand-in library (fake_runtime.c): for tests of the Python side in
milliseconds.

The model says the last token + 1; the tokenizer maps ids to the pieces of a text, so a test scripts
the output by the order of PIECES. Needs gcc or another C compiler, not the real runtime.
"""

import hashlib
import json
import shutil
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pdscope import runtime_c
from pdscope.ir.isa import ISA_HASH
from pdscope.plan_hash import plan_hash

VOCAB, MAX_CONTEXT, MAX_ROWS, MAX_LOGITS, LAYERS = 64, 96, 16, 8, 3

# Bytes of each piece. Ids: 0 pad, 1 bos, 2 eos, 3 user, 4 assistant; then the text. One emoji and
# one CJK character are split over tokens, and one lone continuation byte is invalid by itself.
SPECIAL = ["<pad>", "<bos>", "<eos>", "<user>", "<assistant>"]
PIECES = [
    *(b"Hello", b" wor", b"ld", b"!", b" ", "\U0001f600".encode()[:2], "\U0001f600".encode()[2:]),
    *("\u4e2d".encode()[:1], "\u4e2d".encode()[1:2], "\u4e2d".encode()[2:]),
    *(b" STOP", b" here", b" now", b".", b"\n", b"\x98", b"A", b"B", b"C"),
]
FIRST = len(SPECIAL)
CHAT = (
    "{{ bos_token }}{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def piece_id(index: int) -> int:
    """Token id of PIECES[index]."""
    return FIRST + index


def text_of(ids: Iterable[int]) -> str:
    """What the ids say, all at once."""
    data = b"".join(PIECES[i - FIRST] for i in ids if FIRST <= i < FIRST + len(PIECES))
    return data.decode("utf-8", "replace")


def _byte_letters() -> dict[int, str]:
    """Byte-level BPE's printable stand-in of each byte (GPT-2's table)."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (b for b in range(256) if b not in kept)
    return {b: chr(b) for b in kept} | {b: chr(256 + n) for n, b in enumerate(others)}


def tokenizer_json() -> dict[str, Any]:
    """Tokens are matched whole (no merges): each piece is an added token, unless its bytes are no
    text.
    """
    letters = _byte_letters()
    vocab = {name: i for i, name in enumerate(SPECIAL)}
    for index, piece in enumerate(PIECES):
        vocab["".join(letters[b] for b in piece)] = piece_id(index)
    for i in range(len(vocab), VOCAB):
        vocab[f"<unused{i}>"] = i
    added = [
        {"id": i, "content": name, "special": True, "single_word": False, "lstrip": False}
        | {"rstrip": False, "normalized": False}
        for i, name in enumerate(SPECIAL)
    ]
    bos = {"SpecialToken": {"id": "<bos>", "type_id": 0}}
    return {
        "version": "1.0",
        "truncation": {
            "direction": "Right",
            "max_length": 7,
            "strategy": "LongestFirst",
            "stride": 0,
        },
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": r"Hello| wor|ld| STOP| here| now|[\s\S]"}}
                | {"behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
                | {"use_regex": False},
            ],
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": [1], "tokens": ["<bos>"]}},
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        | {"use_regex": False},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<pad>"},
    }


@cache
def _compiler() -> str:
    for name in ("gcc", "cc", "clang"):
        if path := shutil.which(name):
            return path
    pytest.skip("needs a C compiler for the stand-in library")


def build_library(target: Path, *options: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    sizes = {
        **{"VOCAB": VOCAB, "MAX_CONTEXT": MAX_CONTEXT, "MAX_ROWS": MAX_ROWS},
        **{"MAX_LOGITS": MAX_LOGITS, "LAYERS": LAYERS},
    }
    command = [_compiler(), "-O1", "-shared", "-fPIC", "-std=gnu11", "-Wall", "-Werror"]
    command += [f"-D{name}={value}" for name, value in sizes.items()]
    command += ["-I", str(runtime_c.ROOT / "include"), *options]
    command += [str(Path(__file__).with_name("fake_runtime.c")), "-o", str(target)]
    subprocess.run(command, check=True)


def manifest(folder: Path) -> dict[str, Any]:
    """plan.json for the files in `folder`."""
    import platform

    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "plan.json"):
        data = path.read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        files[path.relative_to(folder).as_posix()] = {"bytes": len(data), "sha256": digest}
    machine = platform.machine().replace("arm64", "aarch64").replace("AMD64", "x86_64")
    return {
        "format_version": 1,
        "generator": "pdscope 0.1.0",
        "model": {
            **{"architecture": "FakeForCausalLM", "source_name": "fake", "layers": LAYERS},
            **{"config_sha256": "c" * 64, "weights_sha256": "d" * 64, "moe_layers": LAYERS},
            **{"hidden": 8, "vocab": VOCAB, "experts": 4, "top_k": 2, "parameters": 12345678},
            "load_format": "dummy",
        },
        **{"dtype": "fp32", "max_context": MAX_CONTEXT, "max_rows": MAX_ROWS},
        **{"max_logits": MAX_LOGITS, "kv_block": 64, "predictor": "none"},
        "target": {"arch": machine, "name": "any", "features": [], "isa": ["scalar"]},
        "placement": {"device": "cpu", "experts": {"cpu": 4 * LAYERS, "gpu": 0}},
        "programs": {
            **{"count": 15, "instructions": 3 * (LAYERS + 1)},
            "isa_hash": f"{ISA_HASH:08x}",
        },
        "memory": {
            **{"weights": 1000, "engine_1_thread": 2000, "engine_per_thread": 100},
            **{"session": 3000, "kv_per_token": 4},
        },
        "generation": {"bos": 1, "eos": [2], "pad": 0},
        "tokenizer": {"file": "tokenizer.json", "chat_template": True},
        "files": files,
    }


def write_manifest(folder: Path, **changes: Any) -> None:
    """Writes plan.json for what is in `folder`; `changes` replace its top-level fields."""
    data = {**manifest(folder), **changes}
    text = json.dumps({"plan_hash": plan_hash(data), **data}, indent=2)
    (folder / "plan.json").write_text(text, encoding="utf-8")


def make_fake_plan(folder: Path) -> None:
    """Fills `folder` with a plan that loads and runs."""
    folder.mkdir(parents=True)
    build_library(folder / "lib" / "libpdscope.so")
    tokenizer = json.dumps(tokenizer_json(), ensure_ascii=False)
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    config = {"bos_token": "<bos>", "eos_token": {"content": "<eos>"}, "chat_template": CHAT}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "memory.json").write_text('{"session": {"total_bytes": 3000}}', encoding="utf-8")
    (folder / "graph.txt").write_text("graph\n", encoding="utf-8")
    (folder / "weights").mkdir()
    (folder / "weights" / "embed.bin").write_bytes(b"\x01" * 1000)
    write_manifest(folder)
