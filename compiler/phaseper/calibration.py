"""What a model is calibrated on where no text is given: our own short prompts, and what the model
itself says to them.

May import numpy, the standard library, pdscope.{documents,sampling} and
pdscope.compiler.passmanager; pdscope.engine for its types alone.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pdscope.compiler.passmanager import writing
from pdscope.documents import Document
from pdscope.sampling import Sampler, Sampling

if TYPE_CHECKING:
    from pdscope.engine import Engine
    from pdscope.session import Session

SEED = 2610
LENGTH = 256  # tokens of an answer at most
TOGETHER = 16  # prompts that are answered side by side: one chunk
# As likely as the model finds it, but for its most unlikely tail, which would lead it astray.
SAMPLING = Sampling(temperature=1.0, top_p=0.95)

PROMPTS = (
    "Explain to a child why the sky is blue.",
    "What are the main causes of inflation, and how do central banks answer it?",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Give me a recipe for lentil soup for four people.",
    "How does a bill become a law?",
    "Write a Python function that returns the prime numbers below n, and explain it.",
    "What is the difference between a virus and a bacterium?",
    "Summarise how photosynthesis works in five sentences.",
    "Write a polite letter to a landlord about a broken heater.",
    "List ten places to visit in Europe, with one reason for each.",
    "A train leaves at 9:40 and arrives at 13:15. How long does it travel? Show the steps.",
    "Describe the life of a medieval farmer over one year.",
    "Which exercises strengthen the back without any equipment?",
    "Translate into French: the library opens at eight and closes at six.",
    "Compare solar and wind power: cost, reliability, and use of land.",
    "Write a dialogue between a doctor and a patient who cannot sleep.",
    "What should I think about before I adopt a dog?",
    "Explain recursion with an example that is not the factorial.",
    "Who were the most important composers of the Baroque, and what did they write?",
    "Write a poem about the first snow of winter.",
    "How do vaccines train the immune system?",
    "Draft an agenda for a one-hour meeting about a delayed project.",
    "What happens to a star when it runs out of hydrogen?",
    "Give three arguments for and three against a four-day working week.",
    "Write an SQL query that finds the ten customers with the most orders.",
    "How can a small bakery find more customers?",
    "Explain what an interest rate is, and compute 5 percent on 1200 over three years.",
    "Describe a chess opening for beginners, move by move.",
    "Why did the Roman Empire fall? Give several opinions of historians.",
    "Write a product description for a waterproof backpack.",
    "What is the water cycle?",
    "Plan a week of dinners for a family that eats no meat.",
    "Explain the difference between a list and a dictionary in Python.",
    "How does a refrigerator keep food cold?",
    "Write a short speech for the wedding of a close friend.",
    "What are the rights of a tenant when the rent is raised?",
    "Tell me about the geography and the climate of Chile.",
    "Classify these animals as mammals, birds or fish: whale, penguin, shark, bat, trout.",
    "How do I prepare for a job interview as an engineer?",
    "Describe how the heart pumps blood through the body.",
    "Write a news report about a village that saved its old bridge.",
    "What is machine learning, and what is it used for?",
    "Give step-by-step instructions for changing a bicycle tyre.",
    "Explain the plot of a famous tragedy without naming it.",
    "How do earthquakes arise, and how are they measured?",
    "Write a shell script that makes a backup of a folder every night.",
    "What did people eat before the potato came to Europe?",
    "Rewrite more formally: hey, can't make it tomorrow, let's do next week instead.",
    "What are the advantages of learning a second language?",
    "Describe an experiment that shows that plants need light.",
    "A shop sells pens at 3 for 2 euros. What do 21 pens cost?",
    "Write the beginning of a detective novel set in a harbour town.",
    "How does encryption protect a message on the internet?",
    "Name the planets of the solar system, and one fact about each.",
    "What is the role of the United Nations?",
    "Give advice to someone who wants to run a first marathon.",
    "Explain the terms supply and demand with the market for apples.",
    "Write a review of a restaurant that was good but slow.",
    "How is paper made from wood?",
    "Outline an essay about the effects of social media on teenagers.",
    "What is the theory of plate tectonics?",
    "Write JSON that describes a book with title, authors, year and three chapters.",
    "How do bees make honey?",
    "Tell a fable in which a patient animal wins over a quick one.",
)


def generated(
    engine: "Engine", folder: Path, key: str, advance: Callable[[int], None]
) -> Iterator[Document]:
    """The prompts with the model's answers, of at most LENGTH tokens each, drawn with a fixed seed.

    Answers serve as text of both phases, as there is little else. `folder` keeps each finished
    chunk, for a later call with the same `key`: a killed process loses one. advance: is told
    tokens, of `most_tokens()`.
    """
    info = engine.info
    together = min(TOGETHER, info.max_rows, info.max_logits)
    prompts = [_prompt(engine, text) for text in PROMPTS]
    longest = min(max(map(len, prompts)) + LENGTH, info.max_context)
    with engine.session(together, together * (longest + info.kv_block)) as session:
        for first in range(0, len(prompts), together):
            chunk = prompts[first : first + together]
            file = folder / f"{first:04d}.json"
            answers = _kept(file, key)
            if answers is None:
                answers = _answers(engine, session, chunk, first)
                with writing(file) as path:
                    path.write_text(json.dumps([key, answers]), encoding="utf-8")
            for prompt, answer in zip(chunk, answers, strict=True):
                ids = np.concatenate((prompt, np.array(answer, np.int32)))
                said = np.arange(len(ids)) >= len(prompt)
                yield Document(ids, np.ones(len(ids), np.bool_), said)
            advance(LENGTH * len(chunk))


def most_tokens() -> int:
    """Tokens that `generated` generates at most."""
    return LENGTH * len(PROMPTS)


def _kept(file: Path, key: str) -> list[list[int]] | None:
    """Answers of an earlier run, if there are some of this key."""
    try:
        found, answers = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return answers if found == key else None


def _prompt(engine: "Engine", text: str) -> NDArray[np.int32]:
    """Its ids, with the chat template if there is one; half the context is for the answer."""
    if engine.plan.data["tokenizer"]["chat_template"]:
        ids = engine.tokenizer.encode_chat([{"role": "user", "content": text}])
    else:
        ids = engine.tokenizer.encode(text)
    return ids[: max(1, engine.info.max_context // 2)]


def _answers(
    engine: "Engine", session: "Session", prompts: Sequence[NDArray[np.int32]], first: int
) -> list[list[int]]:
    """One answer a prompt, without the token that ends it; all are read in one step a token."""
    info, eos = engine.info, set(engine.plan.eos)
    answers: list[list[int]] = [[] for _ in prompts]
    samplers, tokens = [], {}
    session.reset()
    for seq, prompt in enumerate(prompts):
        capacity = len(prompt) + LENGTH
        library = engine.handle.library
        sampler = Sampler(library, info.vocab, SAMPLING, SEED + first + seq, capacity)
        sampler.extend(prompt)
        samplers.append(sampler)
        tokens[seq] = sampler.draw(session.prefill(prompt, seq))
    while True:
        for seq, token in list(tokens.items()):
            if token in eos:
                del tokens[seq]
                continue
            answers[seq].append(token)
            most = min(LENGTH, info.max_context - len(prompts[seq]))
            if len(answers[seq]) >= most:
                del tokens[seq]
        if not tokens:
            return answers
        seqs = list(tokens)
        logits = session.step(list(tokens.values()), None, seqs, np.ones(len(seqs), np.bool_))
        for seq, row in zip(seqs, logits, strict=True):
            tokens[seq] = samplers[seq].draw(row)
