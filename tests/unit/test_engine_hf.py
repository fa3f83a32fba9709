"""The transformers wrapper: generate() of transformers drives a plan.

Holds the issue's line "A GenerationMixin-compatible wrapper so that `model.generate(...)` of
transformers drives a plan".
"""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support import fake_plan
from support.assets import model_path, recorded_texts
from support.plans import PlanStore

from pdscope.errors import BudgetError, InputError
from pdscope.hf import PdscopeForCausalLM


@pytest.fixture(scope="module")
def fake(plans: PlanStore) -> Iterator[PdscopeForCausalLM]:
    model = PdscopeForCausalLM.from_plan(plans.once("fake", fake_plan.make_fake_plan))
    yield model
    model.close()


@pytest.fixture(scope="module")
def real(plans: PlanStore) -> Iterator[PdscopeForCausalLM]:
    model = PdscopeForCausalLM.from_plan(plans.compile(model_path("tiny-mixtral"), dtype="fp32"))
    yield model
    model.close()


@pytest.fixture(scope="module")
def reference() -> Iterator[torch.nn.Module]:
    from transformers import AutoModelForCausalLM

    kinds = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(
        model_path("tiny-mixtral"), dtype=torch.float32, **kinds
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model only loses by more
    yield model.eval()
    torch.set_num_threads(threads)


def ids(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows)


def same_logits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    bound = 2e-4 * theirs.abs().amax(-1, keepdim=True)
    assert ((ours - theirs).abs() <= bound).all()


def test_generation_config_of_the_plan(fake: PdscopeForCausalLM) -> None:
    config = fake.generation_config
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, [2], 0)
    assert fake.can_generate() and fake.device.type == "cpu" and fake.dtype == torch.float32


def test_greedy_batch_with_left_padding(fake: PdscopeForCausalLM) -> None:
    prompts, mask = ids([0, 0, 1, 5], [1, 7, 8, 9]), ids([0, 0, 1, 1], [1, 1, 1, 1])
    out = fake.generate(prompts, attention_mask=mask, max_new_tokens=3, do_sample=False)
    assert out.tolist() == [[0, 0, 1, 5, 6, 7, 8], [1, 7, 8, 9, 10, 11, 12]]


def test_eos_ends_a_row(fake: PdscopeForCausalLM) -> None:
    out = fake.generate(ids([5, 63], [5, 6]), attention_mask=ids([1, 1], [1, 1]), max_new_tokens=5)
    assert out.tolist() == [[5, 63, 0, 1, 2, 0, 0], [5, 6, 7, 8, 9, 10, 11]]


def test_only_new_tokens_are_run(fake: PdscopeForCausalLM) -> None:
    fake.generate(ids([5, 6]), max_new_tokens=1)
    assert fake._session is not None
    before = fake._session.stats().rows
    fake.generate(ids([9, 8, 7, 6]), max_new_tokens=10, do_sample=False)
    assert fake._session.stats().rows - before == 4 + 9


def test_forward_gives_all_logits(fake: PdscopeForCausalLM) -> None:
    rows = list(range(5, 25))
    logits = fake(ids(rows)).logits
    expected = fake.engine.prefill(rows, all_logits=True).copy()
    fake.engine.reset()
    assert np.array_equal(logits[0].numpy(), expected)
    kept = fake(ids(rows), logits_to_keep=3).logits
    assert np.array_equal(kept[0].numpy(), expected[-3:])
    padded = fake(ids([0, *rows, 0]), attention_mask=ids([0, *[1] * 20, 0])).logits
    assert np.array_equal(padded[0, 1:-1].numpy(), expected)
    assert not padded[0, 0].any() and not padded[0, -1].any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"labels": ids([1])}, "takes no labels"),
        ({"inputs_embeds": torch.zeros(1, 1, 8)}, "takes no inputs_embeds"),
        ({"past_key_values": object()}, "takes no past_key_values"),
        ({"cache": object()}, "takes no cache"),
        ({"attention_mask": ids([0])}, "a row has no token"),
        ({"attention_mask": ids([1, 1])}, "attention_mask has shape"),
    ],
)
def test_refusals(fake: PdscopeForCausalLM, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        fake(ids([1]), **arguments)


def test_beyond_the_context(fake: PdscopeForCausalLM) -> None:
    with pytest.raises((BudgetError, InputError), match="context"):
        fake(ids([5] * 97))
    assert fake.generate(ids([5]), max_new_tokens=1).tolist() == [[5, 6]]


def test_forward_is_the_reference(real: PdscopeForCausalLM, reference: torch.nn.Module) -> None:
    texts = recorded_texts("tiny-mixtral")[:2]
    width = max(map(len, texts))
    prompts = ids(*([0] * (width - len(t)) + t for t in texts))
    mask = ids(*([0] * (width - len(t)) + [1] * len(t) for t in texts))
    ours = real(prompts, attention_mask=mask).logits
    for row, text in enumerate(texts):
        with torch.no_grad():
            theirs = reference(ids(text)).logits[0]
        same_logits(ours[row, width - len(text) :], theirs)


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"num_beams": 3, "do_sample": False},
        {"num_beams": 4, "num_return_sequences": 2, "do_sample": False, "length_penalty": 0.5},
        {"do_sample": True, "top_k": 20, "temperature": 0.8, "num_return_sequences": 3},
        {"do_sample": False, "repetition_penalty": 1.3, "use_cache": True},
    ],
    ids=str,
)
def test_generate_is_the_reference(
    real: PdscopeForCausalLM, reference: torch.nn.Module, options: dict[str, object]
) -> None:
    """The same call on the reference model gives the same tokens, beams and samples included."""
    texts = [t[:20] for t in recorded_texts("tiny-mixtral")[:3]]
    texts[1] = texts[1][:13]
    prompts = ids(*([0] * (20 - len(t)) + t for t in texts))
    mask = ids(*([0] * (20 - len(t)) + [1] * len(t) for t in texts))
    found = []
    for model in (real, reference):
        torch.manual_seed(5)
        found.append(
            model.generate(prompts, attention_mask=mask, max_new_tokens=10, **options).tolist()  # type: ignore[operator]
        )
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("tokens", "options"),
    [
        (torch.tensor([[1.5, 2.0]]), {}),
        (torch.tensor([[True, False]]), {}),
        (torch.tensor([[2**40]]), {}),
        (torch.empty((0, 3), dtype=torch.long), {}),
        (torch.tensor([[1, 2]]), {"position_ids": torch.tensor([[4, 9]])}),
        (torch.tensor([[1, 2]]), {"logits_to_keep": -1}),
        (torch.tensor([[1, 2]]), {"logits_to_keep": torch.tensor([1])}),
        (torch.tensor([[1, 2]]), {"output_hidden_states": True}),
        (torch.tensor([[1, 2]]), {"output_attentions": True}),
    ],
)
def test_forward_refuses(
    fake: PdscopeForCausalLM, tokens: torch.Tensor, options: dict[str, object]
) -> None:
    with pytest.raises(InputError):
        fake(tokens, **options)


def test_forward_gives_a_tuple(fake: PdscopeForCausalLM) -> None:
    (logits,) = fake(ids([1, 2]), position_ids=ids([0, 1]), return_dict=False)
    assert logits.shape[:2] == (1, 2)
