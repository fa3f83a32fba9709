"""PhasePer's nets: shapes, and their forward pass over many nets at once.

A net of MoE layer l reads the gate's input a [hidden] and sparse features, and gives one logit for
each expert of the next MoE layer:

    u = in.weight a + in.bias + sum of rows of features.weight        [width + experts]
    h = silu(u[:width])
    h = h + sigmoid(gate.weight a + gate.bias) * silu(block.weight h + block.bias)     (deep nets)
    logits = u[width:] + out.weight h

Rows of features.weight [blocks * experts, width + experts]: block 0, the layer's own experts e_r,
each times its routing weight w_r; block 1, the experts of the same layer at the token before; block
2 (decode), those of the next layer at the token before. A token without one before has none of
these. Matrices are bf16 [outputs, inputs], biases fp32. May import numpy and torch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

ROUTED, PREVIOUS, PREVIOUS_NEXT = "routed", "previous", "previous_next"
# Prefill computes a layer for all rows of a step before the next layer: the next layer's experts of
# the token before are not known then.
BLOCKS = {"prefill": (ROUTED, PREVIOUS), "decode": (ROUTED, PREVIOUS, PREVIOUS_NEXT)}


@dataclass(frozen=True)
class NetShape:
    """`width` counts hidden units; `blocks` name the feature blocks."""

    hidden: int
    experts: int
    width: int
    deep: bool
    blocks: tuple[str, ...]

    @property
    def inputs(self) -> int:
        """Columns of the dense input: a, then the feature blocks."""
        return self.hidden + len(self.blocks) * self.experts

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes in the file."""
        first = self.width + self.experts
        shapes = {
            "in.weight": (first, self.hidden),
            "in.bias": (first,),
            "features.weight": (len(self.blocks) * self.experts, first),
            "out.weight": (self.experts, self.width),
        }
        if self.deep:
            shapes |= {
                "gate.weight": (self.width, self.hidden),
                "gate.bias": (self.width,),
                "block.weight": (self.width, self.width),
                "block.bias": (self.width,),
            }
        return shapes

    def bytes(self) -> int:
        """Of the tensors: bf16 matrices, fp32 vectors."""
        sizes = self.tensors().items()
        return sum(
            4 * shape[0] if len(shape) == 1 else 2 * shape[0] * shape[1] for _, shape in sizes
        )

    def forward_bytes(self, top_k: int) -> int:
        """That one token's forward pass reads: of the features only the rows that are set."""
        blocks = len(self.blocks)
        unread = blocks * (self.experts - top_k) * (self.width + self.experts)
        return self.bytes() - 2 * unread


Parameters = dict[str, Tensor]


def initial(
    shapes: NetShape, linear: Tensor, generator: torch.Generator, device: torch.device
) -> Parameters:
    """Stacked fp32 parameters, inputs first: `first` [nets, inputs, width + experts], `bias`
    [nets, 1, width + experts], `out` [nets, width, experts]; deep: `gate` [nets, hidden, width],
    `gate_bias`, `block` [nets, width, width], `block_bias`.

    linear: [nets, inputs + 1, experts], the map that the net begins as, bias last: the hidden units
    start with no say.
    """
    nets = len(linear)
    width, experts = shapes.width, shapes.experts

    def normal(inputs: int, outputs: int, scale: float) -> Tensor:
        # one net after the other, so that a net's start does not depend on how many there are
        return torch.stack([torch.randn(inputs, outputs, generator=generator) * scale] * nets).to(
            device
        )

    first = torch.cat([normal(shapes.inputs, width, shapes.inputs**-0.5), linear[:, :-1]], 2)
    bias = torch.cat([linear.new_zeros(nets, 1, width), linear[:, -1:]], 2)
    out = linear.new_zeros(nets, width, experts)
    made = {"first": first, "bias": bias, "out": out}
    if shapes.deep:
        made |= {
            "gate": normal(shapes.hidden, width, 0.01),
            "gate_bias": linear.new_zeros(nets, 1, width),
            "block": normal(width, width, width**-0.5),
            "block_bias": linear.new_zeros(nets, 1, width),
        }
    return {name: tensor.contiguous() for name, tensor in made.items()}


def forward(shape: NetShape, p: Parameters, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Logits [nets, rows, experts] in fp32 from dense inputs x [nets, rows, inputs] of type
    `dtype`, which products and hidden units are rounded to."""

    def product(a: Tensor, b: str, bias: str) -> Tensor:
        return torch.baddbmm(p[bias].to(dtype), a, p[b].to(dtype))

    u, linear = torch.split(product(x, "first", "bias"), [shape.width, shape.experts], -1)
    h = functional.silu(u)
    if shape.deep:
        gate = torch.sigmoid(product(x[..., : shape.hidden], "gate", "gate_bias"))
        h = torch.addcmul(h, gate, functional.silu(product(h, "block", "block_bias")))
    logits: Tensor = linear.float() + torch.bmm(h, p["out"].to(dtype)).float()
    return logits


def file_tensors(shape: NetShape, p: Parameters, net: int, scale: Tensor) -> dict[str, Tensor]:
    """One net's tensors as the file holds them. scale: [inputs], powers of two that its inputs
    were multiplied with in training, folded into the weights without rounding."""
    first = p["first"][net].detach().cpu().bfloat16() * scale.cpu().bfloat16()[:, None]
    hidden = shape.hidden
    made = {
        "in.weight": first[:hidden].T,
        "in.bias": p["bias"][net, 0].detach().cpu(),
        "features.weight": first[hidden:],
        "out.weight": p["out"][net].detach().cpu().bfloat16().T,
    }
    if shape.deep:
        gate = p["gate"][net].detach().cpu().bfloat16() * scale.cpu().bfloat16()[:hidden, None]
        made |= {
            "gate.weight": gate.T,
            "gate.bias": p["gate_bias"][net, 0].detach().cpu(),
            "block.weight": p["block"][net].detach().cpu().bfloat16().T,
            "block.bias": p["block_bias"][net, 0].detach().cpu(),
        }
    return {name: tensor.contiguous() for name, tensor in made.items()}
