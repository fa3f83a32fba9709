"""Greedy generation against transformers, token by token.

Holds: "Greedy generation of 64 tokens (EOS ignored; 10 chat prompts and 10 continuations) is
token-identical to transformers (eager, fp32) for tiny-mixtral, tiny-qwen3-moe and tiny-deepseek-v2
... References are recorded by a script; one prompt a model is recomputed live."
"""

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.assets import REFERENCES, TRAINED, model_path
from support.hf_reference import greedy_reference, load_reference
from support.plans import PlanStore

import pdscope


@cache
def reference(name: str) -> dict[str, Any]:
    return dict(json.loads((REFERENCES / f"{name}.json").read_text(encoding="utf-8")))


def weights_sha256(model: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(model.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


@pytest.mark.parametrize("name", TRAINED)
def test_greedy_is_token_identical(plans: PlanStore, name: str) -> None:
    """All twenty prompts, by prefill and decode, and by generate()."""
    model = model_path(name)
    recorded = reference(name)
    assert recorded["weights_sha256"] == weights_sha256(model), "record the references again"
    assert len(recorded["prompts"]) == 20
    wrong = []
    with pdscope.load(plans.compile(model, dtype="fp32")) as engine:
        for index, prompt in enumerate(recorded["prompts"]):
            engine.reset()
            logits = engine.prefill(prompt["ids"])
            ours: list[int] = []
            for _ in range(recorded["new_tokens"]):
                ours.append(int(logits.argmax()))
                logits = engine.decode(ours[-1])
            if ours != prompt["output"]:
                at = next(i for i, token in enumerate(ours) if token != prompt["output"][i])
                wrong.append(
                    f"prompt {index}: token {at} is {ours[at]}, not {prompt['output'][at]}"
                )
            if index % 5 == 0:
                done = engine.generate(
                    prompt["ids"], max_new_tokens=recorded["new_tokens"], ignore_eos=True
                )
                assert list(done.tokens) == ours, (
                    f"prompt {index}: generate() differs from decode()"
                )
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", TRAINED)
def test_prompts_become_the_same_ids(plans: PlanStore, name: str) -> None:
    """The plan's tokenizer and chat template give the ids that transformers gave."""
    with pdscope.load(plans.compile(model_path(name), dtype="fp32")) as engine:
        for prompt in reference(name)["prompts"]:
            if prompt["kind"] == "chat":
                ids = engine.tokenizer.encode_chat(prompt["messages"])
            else:
                ids = engine.tokenizer.encode(prompt["text"])
            assert list(ids) == prompt["ids"]


@pytest.mark.parametrize("name", TRAINED)
def test_reference_recomputed_live(name: str) -> None:
    """The recorded references are what transformers computes here and now."""
    prompt = reference(name)["prompts"][1]
    new, _ = greedy_reference(load_reference(model_path(name)), prompt["ids"], 64)
    assert new == prompt["output"]
