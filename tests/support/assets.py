"""Where tests find trained models and texts: bundled ones, and more under PDSCOPE_TEST_ASSETS."""

import json
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUNDLED = ROOT / "examples" / "models"
REFERENCES = ROOT / "tests" / "golden" / "references"
TRAINED = ("tiny-mixtral", "tiny-qwen3-moe", "tiny-deepseek-v2")


def asset(relative: str) -> Path:
    """A file or folder of the test assets; the calling test skips, naming it, without it."""
    folder = os.environ.get("PDSCOPE_TEST_ASSETS")
    if not folder:
        pytest.skip(f"needs {relative} of the test assets: set PDSCOPE_TEST_ASSETS to their folder")
    path = Path(folder) / relative
    if not path.exists():
        pytest.skip(f"needs {relative}, which PDSCOPE_TEST_ASSETS={folder} does not have")
    return path


def model_path(name: str) -> Path:
    """The directory of a trained test model, bundled or among the assets."""
    bundled = BUNDLED / name
    return bundled if bundled.is_dir() else asset(f"models/{name}")


def recorded_texts(name: str) -> list[list[int]]:
    """Token ids of the greedy references of a model: each prompt and its recorded continuation."""
    reference = json.loads((REFERENCES / f"{name}.json").read_text(encoding="utf-8"))
    return [p["ids"] + p["output"] for p in reference["prompts"]]


def held_out_texts(name: str, tokens: int, longest: int = 512) -> list[list[int]]:
    """Held-out chats in the model's template, cut to `longest` ids each: `tokens` ids in all."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path(name))
    texts: list[list[int]] = []
    left = tokens
    with asset("data/heldout_chat.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            text = tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"][: min(longest, left)]
            texts.append(list(ids))
            left -= len(ids)
            if left <= 0:
                return texts
    raise AssertionError(f"heldout_chat.jsonl has fewer than {tokens} tokens")
