"""PhasePer: traces of routing, and what predicts the next MoE layer's experts from them."""
