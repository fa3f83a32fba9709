"""Which experts stay on the GPU.

Holds: "Hot expert table ...: which experts are resident ..., by expected time saved rather than by
frequency alone".
"""

import numpy as np
import pytest

from pdscope.compiler.passes.hot_experts import LayerRouting, Routing, choose
from pdscope.costs import Costs, Curve

# 10 to start the CPU's job and 10 an expert; a link that never pays.
COSTS = Costs(
    io_start=0,
    io_expert=10**6,
    cpu_start=10,
    gpu_start=0,
    predict=0,
    context_row=0,
    cpu_expert=Curve((1,), (10,)),
    gpu_expert=Curve((1,), (1,)),
    attention=Curve(),
    shared=Curve(),
)


def routing(*layers: list[list[int]] | None, experts: int = 4) -> Routing:
    """Decoded tokens of each layer as lists of experts; prefill knows nothing."""
    made: list[LayerRouting | None] = []
    for tokens in layers:
        if tokens is None:
            made.append(None)
            continue
        chosen = np.zeros((len(tokens), experts), np.bool_)
        for row, token in zip(chosen, tokens, strict=True):
            row[token] = True
        made.append(LayerRouting(np.zeros(experts), chosen))
    return Routing("test", tuple(made))


def test_often_activated_ones_first() -> None:
    """A decoded token has two experts. One less of them saves 10, so the counts decide."""
    tokens = [[0, 1], [0, 2], [0, 3], [1, 2]]
    assert choose(routing(tokens), COSTS, (1, 0), 16, 2)[0] == ((0,),)
    assert choose(routing(tokens, None, [[2, 3]] * 4), COSTS, (2, 0), 16, 2)[0][1] == ()


def test_time_saved_rather_than_frequency() -> None:
    """Layer 0: tokens {0, 1}, {0, 1}, {0, 2}, {1, 2}; layer 1: {0, 1} twice, {0, 2}, {3, 1}.

    Worked by hand, times a token: 0 experts 0, 1 expert 10 + 10 = 20, 2 experts 10 + 20 = 30. The
    first expert of a pair saves 30 - 20 = 10, the second one 20, as the job is not started at all.
    By frequency the four most often activated are (each 3 of 4 tokens) 0 and 1 of both layers. Of
    layer 0 the first of them saves 3 x 10 / 4 = 7.5, and so of layer 1 (0 and 1: 3 tokens each).
    With expert 0 of layer 0 there, expert 1 saves 2 x 20 + 1 x 10 = 50 / 4 = 12.5: it comes before
    layer 1's first, which still saves 7.5.
    """
    layers = routing([[0, 1], [0, 1], [0, 2], [1, 2]], [[0, 1], [0, 1], [0, 2], [3, 1]])
    assert choose(layers, COSTS, (1, 0), 16, 2)[0] == ((0,), ())
    assert choose(layers, COSTS, (2, 0), 16, 2)[0] == ((0, 1), ())
    # Then layer 0's expert 2 saves 20 in two tokens each, 10 in the mean: more than layer 1's 7.5.
    assert choose(layers, COSTS, (3, 0), 16, 2)[0] == ((0, 1, 2), ())
    assert choose(layers, COSTS, (4, 0), 16, 2)[0] == ((0, 1, 2), (0,))


def test_prefill_counts_tokens() -> None:
    """Of 100 tokens 60, 30, 10 and 0 activate each expert; nothing is known of decode. Link and CPU
    share: an expert saves cpu x link / (cpu + link), the link's 100 for all."""
    costs = Costs(**{**vars(COSTS), "io_expert": 100, "cpu_expert": Curve((1, 100), (10, 1000))})
    share = np.array([0.1, 0.6, 0.0, 0.3])
    only = Routing("test", (LayerRouting(share, np.zeros((1, 4), np.bool_)),))
    order = [choose(only, costs, (n, 0), 100, 1)[0][0] for n in (1, 2, 3, 4)]
    assert order == [(1,), (1, 3), (0, 1, 3), (0, 1, 2, 3)]


@pytest.mark.parametrize("slots", [0, 3, 100])
def test_no_more_than_there_are(slots: int) -> None:
    chosen, _ = choose(routing([[0, 1]] * 3, None, [[1, 2]]), COSTS, (slots, 0), 16, 2)
    assert sum(map(len, chosen)) == min(slots, 8)
    assert all(list(c) == sorted(set(c)) for c in chosen)


def test_the_ring_begins_with_the_next_ones() -> None:
    """The example above: layer 0's experts 0 and 1, then its 2, then layer 1's 0."""
    layers = routing([[0, 1], [0, 1], [0, 2], [1, 2]], [[0, 1], [0, 1], [0, 2], [3, 1]])
    assert choose(layers, COSTS, (2, 2), 16, 2) == (((0, 1), ()), ((2,), (0,)))
    assert choose(layers, COSTS, (0, 3), 16, 2) == (((), ()), ((0, 1, 2), ()))
