"""Records the greedy references of tests/golden/references/: transformers, fp32, EOS ignored.

Run by hand, and only when a prompt or a model changes:

    python tests/record_references.py MODEL_DIR [MODEL_DIR ...]

tests/differential/test_generation.py compares plans with what this wrote, and recomputes one
prompt a model.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent))

from support.hf_reference import greedy_reference, load_reference
from support.prompts import CHATS, CONTINUATIONS

NEW_TOKENS = 64
FOLDER = Path(__file__).resolve().parent / "golden" / "references"


def weights_sha256(model_dir: Path) -> str:
    """One hash over the model's safetensors files, in the order of their names."""
    digest = hashlib.sha256()
    for file in sorted(model_dir.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def record(model_dir: Path) -> dict[str, Any]:
    model = load_reference(model_dir)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    prompts: list[dict[str, Any]] = []
    for messages in CHATS:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        prompts.append({"kind": "chat", "messages": messages, "ids": ids})
    for text in CONTINUATIONS:
        prompts.append({"kind": "text", "text": text, "ids": tokenizer(text)["input_ids"]})
    for prompt in prompts:
        prompt["output"], gaps = greedy_reference(model, prompt["ids"], NEW_TOKENS)
        prompt["least_logit_gap"] = round(min(gaps), 6)
        print(model_dir.name, prompt["kind"], len(prompt["ids"]), prompt["least_logit_gap"])
        print("   ", repr(tokenizer.decode(prompt["output"]))[:150])
    return {
        "model": model_dir.name,
        "weights_sha256": weights_sha256(model_dir),
        "torch": torch.__version__.split("+")[0],
        "transformers": transformers.__version__,
        "new_tokens": NEW_TOKENS,
        "prompts": prompts,
    }


def dump(reference: dict[str, Any]) -> str:
    """JSON with one line a prompt, so that a diff shows which changed."""
    prompts = reference["prompts"]
    head = json.dumps({k: v for k, v in reference.items() if k != "prompts"}, indent=1)
    lines = ",\n".join("  " + json.dumps(p, ensure_ascii=False) for p in prompts)
    return head.removesuffix("\n}") + ',\n "prompts": [\n' + lines + "\n ]\n}\n"


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[1:]:
        model_dir = Path(name)
        (FOLDER / f"{model_dir.name}.json").write_text(dump(record(model_dir)), encoding="utf-8")


if __name__ == "__main__":
    main()
