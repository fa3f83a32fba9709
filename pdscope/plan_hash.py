"""The plan hash: the identity of what a plan computes, which its library carries too.

May import the standard library alone: the compiler writes the hash, every load computes it again.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

#: How the plan was built, not what it computes; the library and its source carry the hash, and what
#: is learned of its routing, or measured of its parts, decides where experts run and no more.
#: memory.json follows from the rest, and counts predictors too.
_LEFT_OUT = {"generator", "plan_hash", "target", "files"}
_BUILT = (
    *("src/", "lib/", "phaseper/", "phaseper.json", "memory.json", "report.html"),
    *("costs.json", "hot_experts.json", "program.gpu.bin", "programs/gpu/"),
)

#: weights_sha256 of dummy weights, of which there is one version.
DUMMY_WEIGHTS = hashlib.sha256(b"dummy weights 1").hexdigest()


def plan_hash(manifest: Mapping[str, Any]) -> str:
    """SHA-256 in hexadecimal over plan.json's fields and the hashes of the files it lists; without
    the target, what the code was built into, predictors, costs, and the model's name."""
    content = {name: value for name, value in manifest.items() if name not in _LEFT_OUT}
    content["model"] = {k: v for k, v in manifest["model"].items() if k != "source_name"}
    content["files"] = {
        name: entry for name, entry in manifest["files"].items() if not name.startswith(_BUILT)
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
