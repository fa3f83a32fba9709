"""PDScope inside a program: one loaded plan, a stream of text, and several sequences in one step.

    python examples/embed.py PLAN

PLAN is a directory that pdscope-compile made, of a chat model with a tokenizer.
"""

import sys

import numpy as np

import pdscope

QUESTIONS = ("What is a good way to learn to cook?", "Name a city by the sea.", "Who are you?")


def stream_an_answer(engine: pdscope.Engine) -> None:
    """generate() with stream=True gives pieces of text as they come."""
    stream = engine.generate(QUESTIONS[0], chat=True, max_new_tokens=60, stream=True)
    for piece in stream:
        print(piece, end="", flush=True)
    print()


def answer_side_by_side(engine: pdscope.Engine, new_tokens: int = 20) -> list[str]:
    """Greedy answers to all questions at once: each step computes one token of every sequence."""
    tokenizer = engine.tokenizer
    prompts = [tokenizer.encode_chat([{"role": "user", "content": q}]) for q in QUESTIONS]
    room = sum(len(p) + new_tokens + 64 for p in prompts)  # KV comes in blocks of 64 tokens
    with engine.session(max_seqs=len(prompts), kv_tokens=room) as session:
        rows = [session.prefill(prompt, seq=s) for s, prompt in enumerate(prompts)]
        answers = [[int(np.argmax(row))] for row in map(np.array, rows)]
        eos = engine.plan.eos
        for _ in range(new_tokens - 1):
            going = [s for s, answer in enumerate(answers) if answer[-1] not in eos]
            if not going:
                break
            logits = session.step(
                [answers[s][-1] for s in going], seqs=going, want_logits=[True] * len(going)
            )
            for s, row in zip(going, logits, strict=True):
                answers[s].append(int(np.argmax(row)))
    return [tokenizer.decode(answer) for answer in answers]


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    with pdscope.load(sys.argv[1]) as engine:
        stream_an_answer(engine)
        for question, answer in zip(QUESTIONS, answer_side_by_side(engine), strict=True):
            print(f"\n{question}\n  {answer!r}")


if __name__ == "__main__":
    main()
