"""The mock driver configured with the times that a simulation is given, in its own text form."""

import random

from pdscope.compiler.simulate.timing import Given, Link, Work

KERNELS = (
    *("rope", "norm", "attention", "mlp", "gate"),
    *("experts", "shared", "combine", "lm_head"),
)
HOST = ("cpu.embed", "cpu.predict", "cpu.experts")


def mock_text(timing: Given) -> str:
    """Settings of the mock driver (docs/mock-driver.md) for the same times."""
    link = timing.link
    pairs: dict[str, int | str] = {
        "clock": "virtual",
        "h2d": link.h2d,
        "d2h": link.d2h,
        "h2d_busy": link.h2d_busy,
        "d2h_busy": link.d2h_busy,
        "h2d_start": link.h2d_start,
        "d2h_start": link.d2h_start,
        "h2d_latency": link.h2d_latency,
        "d2h_latency": link.d2h_latency,
        "enqueue": link.enqueue,
    }
    for prefix, table in (("kernel", timing.kernels), ("host", timing.hosts)):
        for name, work in table.items():
            pairs[f"{prefix}.{name}.base"] = work.base
            if work.knots:
                pairs[f"{prefix}.{name}.curve"] = ",".join(f"{t}:{ns}" for t, ns in work.knots)
            if work.extra_num:
                pairs[f"{prefix}.{name}.per_extra"] = f"{work.extra_num}/{work.extra_den}"
    return "; ".join(f"{key}={value}" for key, value in pairs.items())


def some_timing(seed: int, enqueue: int = 0) -> Given:
    """Times of a machine that does not exist: what takes long differs from seed to seed."""
    rng = random.Random(seed)

    def work() -> Work:
        knots, at, ns = [], rng.randint(1, 3), rng.randint(0, 4000)
        for _ in range(rng.randint(1, 4)):
            knots.append((at, ns))
            at += rng.randint(1, 90)
            ns += rng.randint(0, 30000)
        return Work(rng.choice((0, rng.randint(0, 20000))), tuple(knots))

    kernels = {name: work() for name in KERNELS if rng.random() < 0.9}
    kernels["attention"] = Work(
        rng.randint(0, 9000), work().knots, rng.randint(0, 5000), rng.randint(1, 7)
    )
    return Given(
        Link(
            h2d=rng.randint(10**8, 10**10),
            d2h=rng.randint(10**8, 10**10),
            h2d_busy=rng.choice((0, rng.randint(10**8, 10**10))),
            d2h_busy=rng.choice((0, rng.randint(10**8, 10**10))),
            h2d_start=rng.randint(0, 20000),
            d2h_start=rng.randint(0, 20000),
            h2d_latency=rng.choice((0, rng.randint(0, 3000))),
            d2h_latency=rng.choice((0, rng.randint(0, 3000))),
            enqueue=enqueue,
        ),
        kernels,
        {name: work() for name in HOST},
    )
