"""The GPU's GEMM kernels on a real GPU, beside what its memory and its tensor cores can do.

For the experts of Qwen3-30B-A3B, DeepSeek-V2-Lite and Mixtral, at 1, 16, 32 and 2048 rows an
expert, and for a few dense GEMMs: time of one launch, GB/s and TFLOP/s, and their shares of two
ceilings of the same run: the greater of what copying and summing up device memory reach, and
torch's bf16 matmul of 8192 x 8192 x 8192. Every case is checked against torch first. Launches of a
case go round more weights than the second-level cache holds, in one CUDA graph, and the median of
its replays counts.

Needs a GPU, torch, a C compiler, and NVRTC (torch brings it; else nvcc). Reads the sources in
runtime_c; imports nothing of pdscope.

    python benchmarks/gpu_gemm.py [--quick] [--models qwen3,mixtral] [--dtypes bf16,i8]
        [--define NAME=VALUE]...
"""

import argparse
import ctypes
import json
import sys
from collections.abc import Callable, Iterator
from ctypes import c_uint8, c_uint32, c_uint64, c_void_p
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpu_driver import Ceilings, Gpu, Head, ceilings, params, seconds_of

HOLES = 128
F32, BF16, I8, I4 = 1, 2, 4, 5
BITS = {F32: 32, BF16: 16, I8: 8, I4: 4}
GROUP = {I8: 64, I4: 32}
NAMES = {"bf16": BF16, "i8": I8, "i4": I4}
OUT_F32 = 0
# hidden, inter, experts, top k
MODELS = {
    "qwen3": (2048, 768, 128, 8),
    "deepseek": (2048, 1408, 64, 6),
    "mixtral": (4096, 14336, 8, 2),
}
# A result's distance from torch's, relative to its norm: rounding of y, or of weights, to bf16.
TOLERANCE = {F32: 1e-4, BF16: 3e-3, I8: 4e-3, I4: 4e-3}


# --- the structs of params.h ---


class Hole(ctypes.Structure):
    _fields_ = [("at", c_void_p)] + [(n, c_uint32) for n in ("first", "rows", "tile", "pad")]


class Gemm(ctypes.Structure):
    _fields_ = (
        [("head", Head)]
        + [(n, c_void_p) for n in ("x", "w", "y", "x_index", "y_index", "bias")]
        + [(n, c_uint64) for n in ("panel_bytes", "w_step", "x_step", "y_step", "w_offset")]
        + [(n, c_uint32) for n in ("x_stride", "y_stride", "rows", "k", "k_pad", "cols", "pad")]
        + [(n, c_uint32) for n in ("x_div", "count", "n_holes")]
        + [(n, c_uint8) for n in ("w_dtype", "act_dtype", "out", "swiglu")]
        + [("free", c_uint32), ("holes", Hole * HOLES)]
    )


# --- weights ---


def ceil(n: int, to: int) -> int:
    return -(-n // to) * to


def panel_bytes(dtype: int, k: int) -> int:
    if dtype in GROUP:
        k = ceil(k, 64)
        return k * 2 * BITS[dtype] + ceil(k // GROUP[dtype] * 32, 64)
    return ceil(k, 32) * 2 * BITS[dtype]


def random_matrix(torch: Any, dtype: int, n: int, k: int) -> tuple[Any, Any]:
    """Packed bytes [panels, panel bytes] of a random matrix [n, k], n a multiple of 16 and k of 64,
    and the matrix, fp32."""
    panels = n // 16
    if dtype in (F32, BF16):
        w = torch.randn(n, k, device="cuda") / k**0.5
        w = w.to(torch.bfloat16 if dtype == BF16 else torch.float32)
        per = 32 // BITS[dtype]
        packed = w.view(panels, 16, k // per, per).permute(0, 2, 1, 3).contiguous()
        return packed.view(torch.uint8).view(panels, -1), w.float()
    most = 127 if dtype == I8 else 7
    q = torch.randint(-most, most + 1, (n, k), device="cuda", dtype=torch.int8)
    scale = (torch.rand(n, k // GROUP[dtype], device="cuda") + 0.5) * (1.7 / most / k**0.5)
    scale = scale.to(torch.bfloat16)
    w = (q.view(n, -1, GROUP[dtype]).float() * scale.float()[..., None]).view(n, k)
    if dtype == I8:
        words = q.view(panels, 16, k // 4, 4).permute(0, 2, 1, 3).contiguous().view(torch.uint8)
    else:
        pairs = (q + 8).view(torch.uint8).view(panels, 16, k // 8, 2, 4).permute(0, 2, 1, 3, 4)
        words = pairs[..., 0, :] + 16 * pairs[..., 1, :]
    out = torch.zeros(panels, panel_bytes(dtype, k), device="cuda", dtype=torch.uint8)
    rows = words.reshape(panels, -1)
    out[:, : rows.shape[1]] = rows
    tail = scale.view(panels, 16, -1).permute(0, 2, 1).contiguous().view(torch.uint8)
    out[:, rows.shape[1] : rows.shape[1] + tail[0].numel()] = tail.reshape(panels, -1)
    return out, w


# --- measuring ---


@dataclass
class Result:
    case: str
    dtype: str
    holes: int
    rows: int
    kernel: str
    microseconds: float
    gigabytes: float
    teraflops: float
    memory_share: float
    compute_share: float
    error: float


@dataclass
class Bench:
    gpu: Gpu
    ceiling: Ceilings
    repeats: int
    results: list[Result]

    def measure(
        self, case: str, dtype: int, launches: list[Gemm], nbytes: float, flops: float,
        rows: int, check: Callable[[], float],
    ) -> None:  # fmt: skip
        """launches: the same work on other weights each time; `check` says how far the first one's
        result is from torch's."""
        device = ctypes.byref(self.gpu.device)
        shapes = [self.gpu.shape("pds_cu_shape_gemm", device, ctypes.byref(g)) for g in launches]
        self.gpu.launch(launches[0], shapes[0])
        self.gpu.torch.cuda.synchronize()
        error = check()
        if not error <= TOLERANCE[dtype]:
            print(f"WRONG: {case}: off by {error:.2e} of the result's norm", file=sys.stderr)
        work: list[Callable[[], None]] = [
            lambda g=g, s=s: self.gpu.launch(g, s)  # type: ignore[misc]
            for g, s in zip(launches, shapes, strict=True)
        ]
        while len(work) < 8:
            work += work
        seconds = seconds_of(self.gpu.torch, work, self.repeats)
        gb, tf = nbytes / seconds / 1e9, flops / seconds / 1e12
        name = self.gpu.names[shapes[0].kernel].removeprefix("gemm_")
        shares = gb / self.ceiling.gigabytes, tf / self.ceiling.teraflops
        r = Result(
            case, next((n for n, d in NAMES.items() if d == dtype), "f32"),
            launches[0].n_holes, rows, name, seconds * 1e6, gb, tf, *shares, error,
        )  # fmt: skip
        self.results.append(r)
        print(
            f"{case:<22} {r.dtype:>4} {r.holes:>5} {rows:>5}  {name:<12} {r.microseconds:>9.1f} us "
            f"{gb:>7.0f} GB/s {100 * shares[0]:>4.0f} %  {tf:>7.1f} TFLOP/s "
            f"{100 * shares[1]:>4.0f} %  off {error:.1e}",
            flush=True,
        )


def distance(torch: Any, got: Any, want: Any) -> float:
    return float((got.float() - want).norm() / want.norm())


def reference(torch: Any, x: Any, w: list[Any]) -> Any:
    """fp32 x W^T, or SwiGLU of two matrices."""
    torch.backends.cuda.matmul.allow_tf32 = False
    y = x.float() @ w[0].T
    return torch.nn.functional.silu(y) * (x.float() @ w[1].T) if len(w) == 2 else y


def experts(bench: Bench, model: str, dtype: int, rows_of: list[int]) -> None:
    """gate_up with gathered rows, and down with scattered ones, as a layer's experts run."""
    torch = bench.gpu.torch
    hidden, inter, count, top_k = MODELS[model]
    pb_up, pb_down = panel_bytes(dtype, hidden), panel_bytes(dtype, inter)
    up_bytes, down_bytes = pb_up * (inter // 16) * 2, pb_down * (hidden // 16)
    blob = torch.empty(count, ceil(up_bytes + down_bytes, 4096), device="cuda", dtype=torch.uint8)
    for e in range(count):
        if e in (0, 1) or e == count - 1:  # the rest is a copy: what is read is what matters
            parts = [random_matrix(torch, dtype, inter, hidden) for _ in range(2)]
            gate_up = torch.stack([parts[0][0], parts[1][0]], 1)
            down = random_matrix(torch, dtype, hidden, inter)
        blob[e, :up_bytes] = gate_up.view(-1)
        blob[e, up_bytes : up_bytes + down_bytes] = down[0].view(-1)
    # those of the last expert, which the check looks at
    w_up, w_down = [p[1] for p in parts], [down[1]]

    for rows in rows_of:
        holes = top_k if rows == 1 else min(count, HOLES) if rows < 2048 else min(count, 8)
        total = rows * holes
        tokens = max(1, total // top_k)
        x = torch.randn(tokens, hidden, device="cuda").to(torch.bfloat16)
        mid = torch.randn(total, inter, device="cuda").to(torch.bfloat16)
        out = torch.zeros(total, hidden, device="cuda")
        y_mid = torch.zeros_like(mid)
        index = torch.randperm(tokens * top_k, device="cuda")[:total].to(torch.int32)
        if len(index) < total:
            index = index.repeat(-(-total // len(index)))[:total].contiguous()
        place = torch.randperm(total, device="cuda").to(torch.int32)
        turns = max(1, count // holes)

        def holes_of(g: Gemm, turn: int, holes: int = holes, rows: int = rows) -> Gemm:
            g.n_holes, g.count = holes, 1
            for i in range(holes):
                expert = count - 1 - (turn * holes + i) % count
                g.holes[i].at = blob[expert].data_ptr()
                g.holes[i].first, g.holes[i].rows = i * rows, rows
            return g

        common: dict[str, Any] = {"w_dtype": dtype, "act_dtype": BF16, "x_div": top_k}
        ups = [
            holes_of(
                params(
                    Gemm,
                    x=x, y=y_mid, x_index=index, panel_bytes=pb_up, x_stride=hidden,
                    y_stride=inter, k=hidden, k_pad=hidden, cols=inter, pad=inter, swiglu=1,
                    **common,
                ),
                turn,
            )
            for turn in range(turns)
        ]  # fmt: skip
        downs = [
            holes_of(
                params(
                    Gemm,
                    x=mid, y=out, y_index=place, panel_bytes=pb_down, w_offset=up_bytes,
                    x_stride=inter, y_stride=hidden, k=inter, k_pad=inter, cols=hidden,
                    out=OUT_F32, **common,
                ),
                turn,
            )
            for turn in range(turns)
        ]  # fmt: skip

        def check_up(x: Any = x, index: Any = index, y: Any = y_mid, rows: int = rows) -> float:
            picked = x[(index[:rows] // top_k).long()]
            return distance(torch, y[:rows], reference(torch, picked, w_up))

        def check_down(mid: Any = mid, y: Any = out, at: Any = place, rows: int = rows) -> float:
            return distance(torch, y[at[:rows].long()], reference(torch, mid[:rows], w_down))

        moved = tokens * hidden * 2 + total * inter * 2
        bench.measure(
            f"{model} gate_up", dtype, ups, holes * up_bytes + moved, 4 * total * hidden * inter,
            rows, check_up,
        )  # fmt: skip
        moved = total * (inter * 2 + hidden * 4)
        bench.measure(
            f"{model} down", dtype, downs, holes * down_bytes + moved, 2 * total * hidden * inter,
            rows, check_down,
        )  # fmt: skip


def dense(bench: Bench, case: str, dtype: int, n: int, k: int, rows_of: list[int]) -> None:
    """One matrix [n, k]; fp32 weights have fp32 x: the gate."""
    torch = bench.gpu.torch
    copies = max(1, min(8, (256 << 20) // (panel_bytes(dtype, k) * n // 16)))
    made = [random_matrix(torch, dtype, n, k) for _ in range(copies)]
    for rows in rows_of:
        x = torch.randn(rows, k, device="cuda")
        if dtype != F32:
            x = x.to(torch.bfloat16)
        y = torch.zeros(rows, n, device="cuda")
        launches = [
            params(
                Gemm,
                x=x, w=packed, y=y, panel_bytes=panel_bytes(dtype, k), x_stride=k, y_stride=n,
                rows=rows, k=k, k_pad=k, cols=n, count=1, w_dtype=dtype, out=OUT_F32,
                act_dtype=F32 if dtype == F32 else BF16,
            )
            for packed, _ in made
        ]  # fmt: skip

        def check(x: Any = x, y: Any = y) -> float:
            return distance(torch, y, reference(torch, x, [made[0][1]]))

        nbytes = panel_bytes(dtype, k) * n // 16 + x.numel() * x.element_size() + y.numel() * 4
        bench.measure(case, dtype, launches, nbytes, 2 * rows * n * k, rows, check)


def cases(asked: argparse.Namespace) -> Iterator[Callable[[Bench], None]]:
    rows = [1, 16, 32, 2048]
    for model in asked.models:
        for name in asked.dtypes:
            yield lambda b, m=model, d=NAMES[name]: experts(b, m, d, rows)  # type: ignore[misc]
    yield lambda b: dense(b, "gate 128 x 2048", F32, 128, 2048, [1, 16, 4096])
    yield lambda b: dense(b, "qkv 5120 x 2048", BF16, 5120, 2048, [1, 16, 512, 4096])
    yield lambda b: dense(b, "o 2048 x 4096", BF16, 2048, 4096, [1, 16, 512, 4096])
    yield lambda b: dense(b, "head 151936 x 2048", BF16, 151936, 2048, [1, 16])
    if not asked.quick:
        yield lambda b: dense(b, "head 151936 x 2048", I8, 151936, 2048, [1])
        yield lambda b: dense(b, "head 151936 x 2048", I4, 151936, 2048, [1])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="GEMM kernels on a GPU against its ceilings")
    parser.add_argument("--quick", action="store_true", help="Qwen3 alone, fewer repeats: a minute")
    parser.add_argument("--models", default=None, help="of " + ",".join(MODELS))
    parser.add_argument("--dtypes", default=",".join(NAMES), help="of " + ",".join(NAMES))
    parser.add_argument("--repeats", type=int, default=None, help="replays a case (20; quick: 7)")
    parser.add_argument(
        "--define", action="append", default=[], metavar="NAME=VALUE",
        help="of the kernels and the launcher: compares variants of gemm_shape.h's sizes",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, default=None, help="also write the results there")
    asked = parser.parse_args()
    asked.models = (asked.models or ("qwen3" if asked.quick else ",".join(MODELS))).split(",")
    asked.dtypes = asked.dtypes.split(",")
    for what, known in (("models", MODELS), ("dtypes", NAMES)):
        for name in getattr(asked, what):
            if name not in known:
                parser.error(f"--{what}: '{name}' is none of {', '.join(known)}")
    asked.repeats = asked.repeats or (7 if asked.quick else 20)
    return asked


def main() -> None:
    asked = arguments()
    try:
        import torch
    except ImportError:
        sys.exit("gpu_gemm: needs torch: pip install torch")
    if not torch.cuda.is_available():
        sys.exit("gpu_gemm: torch finds no GPU")
    structs = {"pds_cu_gemm": Gemm}
    gpu = Gpu(torch, ["gemm.cu"], ["launch_gemm.c"], structs, asked.define)
    torch.manual_seed(1)
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, {asked.repeats} repeats")
    bench = Bench(gpu, ceilings(torch, asked.repeats), asked.repeats, [])
    print(f"{'case':<22} dtype holes  rows  kernel")
    for case in cases(asked):
        case(bench)
        torch.cuda.empty_cache()
    if asked.json:
        report = {"ceilings": asdict(bench.ceiling), "results": [asdict(r) for r in bench.results]}
        asked.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    wrong = [r for r in bench.results if not r.error <= TOLERANCE[NAMES.get(r.dtype, F32)]]
    if wrong:
        sys.exit(f"gpu_gemm: {len(wrong)} of {len(bench.results)} cases are wrong")


if __name__ == "__main__":
    main()
