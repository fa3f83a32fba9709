"""Programs that tests start from, as text: the CPU's, and whole GPU programs with every kind of
instruction."""

import re

from pdscope.ir.program import Program
from pdscope.ir.text import parse_programs

PROLOGUE = """\
program @prologue.decode {phase = decode, rows = 1}
  @0 = compute embed  q=cpu
  out  @hid = @0
"""

DENSE = """\
program @l0.decode {layer = 0, phase = decode, rows = 1}
  in   @hid
  @0 = compute norm attn  q=cpu  wait(@hid)
  @1 = compute attention  q=cpu  wait(@0)
  @2 = compute norm mlp   q=cpu  wait(@1)
  @3 = compute mlp        q=cpu  wait(@2)
  out  @hid = @3
"""

MOE = """\
program @l1.decode {layer = 1, phase = decode, experts = 8, top_k = 2, rows = 1}
  in   @hid
  @0 = compute norm attn     q=cpu   wait(@hid)
  @1 = compute attention     q=cpu   wait(@0)
  @2 = compute norm mlp      q=cpu   wait(@1)
  @3 = compute gate          q=cpu   wait(@2)
  @4 = recompile -> ?c[2]    q=host  wait(@3)
  @5 = compute expert ?c[*]  q=cpu   wait(@4)
  @6 = compute combine       q=cpu   wait(@5)
  out  @hid = @6
"""

SHARED = """\
program @l2.decode {layer = 2, phase = decode, experts = 8, top_k = 2, rows = 1, shared = yes}
  in   @hid
  @0 = compute norm attn      q=cpu   wait(@hid)
  @1 = compute attention      q=cpu   wait(@0)
  @2 = compute norm mlp       q=cpu   wait(@1)
  @3 = compute gate           q=cpu   wait(@2)
  @4 = recompile -> ?c[2]     q=host  wait(@3)
  @5 = compute shared_expert  q=cpu   wait(@2)
  @6 = compute expert ?c[*]   q=cpu   wait(@4)
  @7 = compute combine        q=cpu   wait(@5, @6)
  out  @hid = @7
"""

# Predicts the next layer's experts and prefetches them into the CPU's cache.
AHEAD = """\
program @l2.decode {layer = 2, phase = decode, experts = 8, top_k = 2, rows = 1, shared = yes}
  in   @hid
  @0 = compute norm attn         q=cpu   wait(@hid)
  @1 = compute attention         q=cpu   wait(@0)
  @2 = compute norm mlp          q=cpu   wait(@1)
  @3 = compute gate, predict     q=cpu   wait(@2)
  @4 = recompile -> ?c[2] ?p[2]  q=host  wait(@3)
  @5 = compute shared_expert     q=cpu   wait(@2)
  @6 = compute expert ?c[*]      q=cpu   wait(@4)
  @7 = prefetch ?p[*] -> llc     q=aux   wait(@6)
  @8 = compute combine           q=cpu   wait(@5, @6)
  out  @hid = @8
"""

EPILOGUE = """\
program @epilogue.decode {phase = decode, rows = 1}
  in   @hid
  @0 = compute norm final  q=cpu  wait(@hid)
  @1 = compute lm_head     q=cpu  wait(@0)
  out  @logits = @1
"""

# The example of the design, with the norms written out and a shared expert.
GPU = """\
program @l7.decode {layer = 7, phase = decode, experts = 64, top_k = 6, \
rows = 1, shared = yes, budget = 8}
  in   @hid, %ring.tickets
  slot %hot  : resident {e1, e4}
  slot %ring : cache[6]
  @0  = compute norm attn                                 q=gpu0        wait(@hid)
  @1  = compute attention                                 q=gpu0        wait(@0)
  @2  = compute norm mlp                                  q=gpu0        wait(@1)
  @3  = compute gate, predict                             q=gpu0        wait(@2)
  @4  = recompile -> ?r[6] ?l[6] ?c[6] ?n[4] ?p[4] ?u[6]  q=host        wait(@3)
  @5  = stream load ?l[*] -> %ring                        q=h2d.demand  wait(@4)
  @6  = stream prefetch ?n[*] -> %ring                    q=h2d.spec    wait(@4)
  @7  = prefetch ?p[*] -> llc                             q=aux         wait(@4)
  @8  = compute shared_expert                             q=gpu0        wait(@2)
  @9  = compute expert ?c[*]                              q=cpu         wait(@4)
  @10 = compute expert ?r[*] from %hot, %ring             q=gpu0        wait(@4)
  @11 = compute expert ?l[*] from %ring                   q=gpu0        wait(@5)
  @12 = compute combine                                   q=gpu0        wait(@8, @9, @10, @11)
  @13 = unload ?u[*] from %ring                           q=host        wait(@10, @11)
  out  @hid = @12, %ring.tickets
"""

# One instruction for each entry; a separate predict; a sync before recompile.
GPU_SINGLE = """\
program @l3.decode {layer = 3, phase = decode, experts = 8, top_k = 2, rows = 1, budget = 4}
  in   @hid, %ring.tickets
  slot %ring : cache[4]
  @0  = compute norm attn                  q=gpu0        wait(@hid)
  @1  = compute attention                  q=gpu0        wait(@0)
  @2  = compute norm mlp                   q=gpu0        wait(@1)
  @3  = compute gate                       q=gpu0        wait(@2)
  @4  = compute predict                    q=cpu         wait(@2)
  @5  = sync                               q=host        wait(@3)
  @6  = recompile -> ?l[2] ?c[2] ?n[1] ?u[2]  q=host     wait(@4, @5)
  @7  = load ?l[0] -> %ring                q=h2d.demand  wait(@6)
  @8  = load ?l[1] -> %ring                q=h2d.demand  wait(@6)
  @9  = prefetch ?n[0] -> %ring            q=h2d.spec    wait(@6)
  @10 = compute expert ?c[0]               q=cpu         wait(@6)
  @11 = compute expert ?c[1]               q=cpu         wait(@6)
  @12 = compute expert ?l[0] from %ring    q=gpu0        wait(@7)
  @13 = compute expert ?l[1] from %ring    q=gpu0        wait(@8)
  @14 = compute combine                    q=gpu0        wait(@10, @11, @12, @13)
  @15 = unload ?u[0] from %ring            q=host        wait(@12, @13)
  @16 = unload ?u[1] from %ring            q=host        wait(@14)
  out  @hid = @14, %ring.tickets
"""

# A stream longer than its ring: slots are filled again as their readers finish.
GPU_PREFILL = """\
program @l3.prefill {layer = 3, phase = prefill, experts = 24, top_k = 2, \
rows = 17-40, shared = yes, budget = 5}
  in   @hid, %ring.tickets
  slot %hot  : resident {e0, e7}
  slot %ring : cache[3]
  @0  = compute norm attn                     q=gpu0        wait(@hid)
  @1  = compute attention                     q=gpu0        wait(@0)
  @2  = compute norm mlp                      q=gpu0        wait(@1)
  @3  = compute gate                          q=gpu0        wait(@2)
  @4  = compute shared_expert                 q=gpu0        wait(@2)
  @5  = recompile -> ?r[5] ?l[22] ?c[22] ?u[3]  q=host      wait(@3)
  @6  = stream load ?l[*] -> %ring            q=h2d.demand  wait(@5)
  @7  = compute expert ?c[*]                  q=cpu         wait(@5)
  @8  = compute expert ?r[*] from %hot, %ring q=gpu0        wait(@5)
  @9  = compute expert ?l[*] from %ring       q=gpu0        wait(@6)
  @10 = compute combine                       q=gpu0        wait(@4, @7, @8, @9)
  @11 = unload ?u[*] from %ring               q=host        wait(@8, @9)
  out  @hid = @10, %ring.tickets
"""

# Two devices, a weight format of the GPU's own, loads from disk.
GPU_TWO = """\
program @l3.batch {layer = 3, phase = batch, experts = 16, top_k = 2, \
rows = 2-4, streams = 4, budget = 4}
  in   @hid, %a.tickets, %b.tickets
  slot %hot : resident {e2} {device = 1, format = int4/g64/bf16}
  slot %a   : cache[4]
  slot %b   : cache[2] {device = 1, format = int4/g64/bf16}
  @0  = compute norm attn                  q=gpu0        wait(@hid)
  @1  = compute attention                  q=gpu0        wait(@0)
  @2  = compute norm mlp                   q=gpu0        wait(@1)
  @3  = compute gate tokens                q=gpu0        wait(@2)
  @4  = recompile -> ?r[8] ?l[8] ?c[8] ?u[2]  q=host     wait(@3)
  @5  = compute expert ?c[*]               q=cpu         wait(@4)
  @6  = stream load ?l[*] -> %a {tier = disk}  q=h2d.demand  wait(@4)
  @7  = compute expert ?l[*] from %a       q=gpu0        wait(@6)
  @8  = stream load ?l[*] -> %b {device = 1, format = int4/g64/bf16}  q=h2d.demand  wait(@4)
  @9  = compute expert ?l[*] from %b {format = int4/g64/bf16}  q=gpu1  wait(@8)
  @10 = compute expert ?r[*] from %a       q=gpu0        wait(@4)
  @11 = compute expert ?r[*] from %hot, %b {format = int4/g64/bf16}  q=gpu1  wait(@4)
  @12 = compute combine                    q=gpu0        wait(@5, @7, @9, @10, @11)
  @13 = unload ?u[*] from %a               q=host        wait(@7, @10)
  out  @hid = @12, %a.tickets, %b.tickets
"""

BY_NAME = {
    "prologue": PROLOGUE,
    "dense": DENSE,
    "moe": MOE,
    "shared": SHARED,
    "ahead": AHEAD,
    "epilogue": EPILOGUE,
    "gpu": GPU,
    "gpu_single": GPU_SINGLE,
    "gpu_prefill": GPU_PREFILL,
    "gpu_two": GPU_TWO,
}


def one(text: str) -> Program:
    [program] = parse_programs(text)
    return program


def in_phase(text: str, phase: str, rows: str, capacity: int = 8) -> str:
    """A CPU program of the decode phase moved to another one, ?c widened to its worst case."""
    text = text.replace("decode", phase).replace("rows = 1", f"rows = {rows}")
    return re.sub(r"\?c\[2\]", f"?c[{capacity}]", text)


def renumber(text: str, layer: int) -> str:
    """The same layer's program at another place."""
    return re.sub(r"@l\d+\.(\w+) \{layer = \d+", rf"@l{layer}.\1 {{layer = {layer}", text)


def cpu_plan(layers: int = 3, max_rows: int = 40) -> list[Program]:
    """All three phases of a model with one dense layer, then MoE layers with a shared expert."""
    middle = [renumber(DENSE, 0)] + [renumber(SHARED, k) for k in range(1, layers)]
    texts = []
    for phase, rows in (("decode", "1"), ("batch", "2-16"), ("prefill", f"17-{max_rows}")):
        for text in [PROLOGUE, *middle, EPILOGUE]:
            capacity = 2 if phase == "decode" else 8
            texts.append(in_phase(text, phase, rows, capacity))
    return [one(t) for t in texts]


def gpu_plan(layers: int = 3) -> list[Program]:
    """The decode phase of a model with GPU layers: every layer prefetches for the next one, the
    last does not."""
    middle = [
        renumber(GPU, k).replace("budget = 8", f"budget = {6 + 2 * layers}") for k in range(layers)
    ]
    last = middle[-1].replace(" ?n[4] ?p[4]", "").splitlines(keepends=True)
    kept = [x for x in last if "prefetch" not in x]
    old = [k for k in range(14) if k not in (6, 7)]
    text = re.sub(r"@(\d+)", lambda m: f"@{old.index(int(m[1]))}", "".join(kept))
    middle[-1] = text
    return [one(t) for t in [PROLOGUE, *middle, EPILOGUE]]
