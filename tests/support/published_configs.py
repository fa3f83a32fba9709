"""The published configurations of examples/configs/, whole or cut down."""

import json
from typing import Any

from support.assets import ROOT

Config = dict[str, Any]

FOLDER = ROOT / "examples" / "configs"
PUBLISHED: dict[str, Config] = {
    file.parent.name: json.loads(file.read_text(encoding="utf-8"))
    for file in sorted(FOLDER.glob("*/config.json"))
}


def cut_down(name: str, small: bool = False) -> Config:
    """One MoE layer, behind one dense layer where the model has any; `small`: narrow as well."""
    config = PUBLISHED[name]
    config = config | {"num_hidden_layers": 1 + config.get("first_k_dense_replace", 0)}
    if not small:
        return config
    width = {"hidden_size": 256, "vocab_size": 1000, "intermediate_size": 320}
    narrow = {"moe_intermediate_size": 64, "kv_lora_rank": 64}
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    return config | width | {k: v for k, v in narrow.items() if k in config} | ids
