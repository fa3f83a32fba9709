"""Dimensions of published models, as cost tables know them."""

from pdscope.costs import AttentionKey, ModelKey


def _gqa(heads: int, kv_heads: int, dim: int) -> AttentionKey:
    return AttentionKey("gqa", heads, kv_heads, dim, dim, 0, 0, 0, 0)


QWEN3 = ModelKey(2048, 768, 0, 128, 8, "bf16", 0, _gqa(32, 4, 128))
DEEPSEEK = ModelKey(
    2048, 1408, 2816, 64, 6, "bf16", 0, AttentionKey("mla", 16, 16, 192, 128, 128, 0, 512, 0)
)
MIXTRAL = ModelKey(4096, 14336, 0, 8, 2, "bf16", 0, _gqa(32, 8, 128))
