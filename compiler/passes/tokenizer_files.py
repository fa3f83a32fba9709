"""Copy what turns text into ids and back, checked against the model's vocabulary.

May import the standard library, tokenizers, transformers (only to convert a tokenizer that has no
tokenizer.json) and pdscope.{errors,compiler.passmanager}.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdscope.compiler.passmanager import Workspace, sha256_file
from pdscope.errors import ModelError

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
        present = [self.model_dir / f for f in COPIED if (self.model_dir / f).is_file()]
        return {p.name: sha256_file(p) for p in present} | {"vocab": str(self.vocab)}

    def run(self, workspace: Workspace) -> Mapping[str, str | None]:
        """Raises ModelError for a file that is no JSON, or a tokenizer with ids that the model
        lacks."""
        written: dict[str, str | None] = {}
        for name in COPIED:
            source = self.model_dir / name
            if source.is_file():
                data = source.read_bytes()
                if name.endswith(".json"):
                    read_json(source)
                written[workspace.write(name, data)] = None
        if "tokenizer.json" in written:
            self._check(self.model_dir / "tokenizer.json")
        return written

    def _check(self, path: Path) -> None:
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
    except (ValueError, UnicodeDecodeError) as e:
        raise ModelError(f"{path}: is not valid JSON: {e}") from e
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object")
    return value


def generation_ids(model_dir: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """bos, every eos and pad id: from generation_config.json, else from config.json, as
    transformers does."""
    path = model_dir / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}

    def pick(key: str) -> Any:
        return generation[key] if generation.get(key) is not None else config.get(key)

    eos = pick("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ModelError(
            f"{path}: eos_token_id: expected an integer or a list of integers, got {eos!r}"
        )
    return {"bos": pick("bos_token_id"), "eos": ids, "pad": pick("pad_token_id")}
