"""The text form of a graph is exact in both directions (issue: "a text form")."""

import pytest
from support.tiny_configs import FAMILIES, random_tiny_config

from pdscope.compiler.trace import trace_config
from pdscope.errors import PlanError
from pdscope.ir.graph import AddAttrs, EmbedAttrs, Graph, LmHeadAttrs, Node, Op, ScaleAttrs, Weight
from pdscope.ir.graph_text import parse_graph, print_graph

SMALL = Graph(
    architecture="MixtralForCausalLM",
    hidden=4,
    vocab=8,
    layers=1,
    max_context=16,
    nodes=(
        Node("embed", Op.EMBED, (), EmbedAttrs(8, 4), {"weight": Weight("e", (8, 4), "float32")}),
        Node("scale", Op.SCALE, ("embed",), ScaleAttrs(0.1), {}, 0),
        Node("add", Op.ADD, ("embed", "scale"), AddAttrs(), {}, 0),
        Node("head", Op.LM_HEAD, ("add",), LmHeadAttrs(8, True)),
    ),
)
TEXT = print_graph(SMALL)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(6))
def test_round_trip_of_traced_graphs(family: str, seed: int) -> None:
    """Issue: Graph IR with typed attributes; a text form."""
    graph = trace_config(random_tiny_config(family, seed)).graph
    text = print_graph(graph)
    assert parse_graph(text) == graph
    assert print_graph(parse_graph(text)) == text


def test_small_graph_reads_as_documented() -> None:
    """The format is what the module's docstring shows."""
    assert parse_graph(TEXT) == SMALL
    assert "  %add = add(%embed, %scale) layer 0 {}\n" in TEXT
    assert "    weight = e [8, 4] float32\n" in TEXT


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("graph Mixtral", "grph Mixtral", "line 1"),
        ("hidden = 4, vocab = 8, layers", "hidden = 4, layers", "expected the fields"),
        ("= add(", "= plus(", "unknown operator plus"),
        ("(%embed, %scale)", "(%embed, %later)", "%later is not defined above"),
        ("%add = add", "%scale = add", "%scale is defined twice"),
        ("{factor = 0.1}", "{factor = 0.1, x = 1}", "ScaleAttrs"),
        ("{factor = 0.1}", "{factor = ?}", "'\\?' is not a value"),
        ("    weight = e", "    weight e", "expected a rope, an operator or a weight"),
    ],
)
def test_broken_text_is_refused_with_its_line(old: str, new: str, message: str) -> None:
    """A parse error names the line and what was expected."""
    assert old in TEXT
    with pytest.raises(PlanError, match=message) as caught:
        parse_graph(TEXT.replace(old, new, 1))
    assert "graph text, line" in str(caught.value)
