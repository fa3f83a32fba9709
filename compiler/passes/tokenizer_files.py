"""Copy what turns text into ids and back, checked against the model's vocabulary.

May import the standard library, tokenizers, transformers (only to convert a tokenizer that has no
tokenizer.json) and pdscope.{chat,codegen_templates,errors,compiler.passmanager}.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdscope.chat import CONFIG, FILE, find_template
from pdscope.codegen_templates import parse_chat
from pdscope.compiler.passmanager import Workspace, sha256_file
from pdscope.errors import InputError, ModelError

COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


@dataclass(frozen=True)
class TokenizerFiles:
    """Copies the tokenizer's files; a model without a tokenizer gives a plan that takes token ids
    alone."""

    model_dir: Path
    vocab: int

    name = "copy-tokenizer"
    reads = ()

    def inputs(self) -> Mapping[str, str]:
        hashes = {name: sha256_file(self.model_dir / name) for name in self._present()}
        return hashes | {"vocab": str(self.vocab)}

    def run(self, workspace: Workspace) -> Mapping[str, str | None]:
        """Raises ModelError for a file that is no JSON, or a tokenizer with ids that the model
        lacks."""
        self.check()
        return {
            workspace.write(name, (self.model_dir / name).read_bytes()): None
            for name in self._present()
        }

    def _present(self) -> list[str]:
        return [name for name in COPIED if (self.model_dir / name).is_file()]

    def check(self) -> None:
        """What `run` refuses, without a copy."""
        present = self._present()
        for name in present:
            if name.endswith(".json"):
                read_json(self.model_dir / name)
        if "tokenizer.json" in present:
            self._check_ids(self.model_dir / "tokenizer.json")

    def _check_ids(self, path: Path) -> None:
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as e:  # tokenizers raises bare Exception for a file that it cannot read
            raise ModelError(
                f"{path}: is no tokenizer that the tokenizers library reads: {e}"
            ) from e
        top = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        if top >= self.vocab:
            raise ModelError(
                f"{path}: has token ids up to {top}, but the model's vocab_size is {self.vocab}; "
                "tokenizer and weights belong to different models"
            )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ModelError names the file and the line otherwise."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise ModelError(f"{path}: is not valid JSON: {e}") from e
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object")
    return value


def generation_ids(model_dir: Path, config: Mapping[str, Any], vocab: int) -> dict[str, Any]:
    """bos, every eos and pad id: from generation_config.json, else from config.json, as
    transformers does. A pad of -1 is none. ModelError for an id that the model does not have."""
    path = model_dir / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}

    def pick(key: str) -> tuple[str, Any]:
        if generation.get(key) is not None:
            return f"{path}: {key}", generation[key]
        return f"{model_dir / 'config.json'}: {key}", config.get(key)

    def one(where: str, value: Any, wanted: str = "an integer") -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < vocab:
            raise ModelError(
                f"{where} is {value!r}, expected {wanted} from 0 to {vocab - 1} (vocab_size is "
                f"{vocab}); take the file from the model's original repository"
            )
        return value

    (bos_at, bos), (eos_at, eos), (pad_at, pad) = (
        pick(f"{name}_token_id") for name in ("bos", "eos", "pad")
    )
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    none = pad is None or (pad == -1 and isinstance(pad, int))
    return {
        "bos": None if bos is None else one(bos_at, bos),
        "eos": [one(eos_at, i, "an integer, or a list of them,") for i in ids],
        "pad": None if none else one(pad_at, pad),
    }


def chat_template(model_dir: Path) -> tuple[bool, str | None]:
    """Whether the model has a chat template that can be used, and what is wrong with one that
    cannot."""
    file, config = model_dir / FILE, model_dir / CONFIG
    try:
        jinja = file.read_text(encoding="utf-8") if file.is_file() else None
        found = find_template(model_dir, jinja, read_json(config) if config.is_file() else {})
        if found is not None:
            parse_chat(*found)
    except UnicodeDecodeError as e:
        return False, f"{file}: is not valid UTF-8 ({e}); --chat cannot be used: download it again"
    except InputError as e:
        return False, str(e)
    return found is not None, None
