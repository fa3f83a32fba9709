"""report.html: plots of a plan's predictors, as one small page that needs no other file.

Drawn as SVG here: a plotting library's script, inline, would add megabytes to every plan, and from
the network it would be missing where there is none. The same figures give the same bytes. May
import pdscope.predictor_figures and the standard library.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from pdscope.predictor_figures import (
    GROUPS,
    PHASEPER,
    PHASES,
    RIVALS,
    Layer,
    Predictors,
    Summary,
    summaries,
)

HTML = "report.html"

_COLOURS = {
    PHASEPER: "#0057b8",
    "cross_gate": "#c2410c",
    "previous": "#15803d",
    "frequency": "#7e22ce",
    "transition": "#a16207",
    "input": "#0e7490",
    "middle": "#9d174d",
    "output": "#4d7c0f",
}
_TITLES = {PHASEPER: "PhasePer"}
_WIDTH, _HEIGHT = 720, 300  # of a plot
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 12, 40  # of its axes

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 780px; margin: 2em auto; padding: 0 1em;
  color: #1f2937; background: #fff }
svg { width: 100%; height: auto } svg text { font-size: 12px; fill: #374151 }
table { border-collapse: collapse } th, td { padding: 2px 10px; text-align: right }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left }
tr { border-bottom: 1px solid #e5e7eb } .key { margin-right: 1.2em; white-space: nowrap }
.key i { display: inline-block; width: 1.4em; height: .25em; margin: 0 .4em .25em 0 }
"""


@dataclass(frozen=True)
class Line:
    """Points (x, y) joined in their order. strong: drawn thicker, above the others."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    strong: bool = False


@dataclass(frozen=True)
class Axis:
    """ticks: places and what stands there; they lie in [low, high]."""

    title: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]

    def part(self, value: float) -> float:
        return (value - self.low) / ((self.high - self.low) or 1)


def report(predictors: Predictors, layers: Sequence[Layer], text: str) -> str:
    """The page. layers: with the figures to show; text: what they were measured on, "": the
    calibration's validation rows."""
    on = text or "the calibration's validation rows"
    parts = [
        f"<p>{escape(_trained_on(predictors))} Figures are of {escape(on)}.</p>",
        "<h2>How alike neighbouring layers' gate inputs are</h2>",
        _similarity(predictors),
        "<h2>Hit rate</h2><p>Of the experts that the next layer's gate chooses, the share among "
        "the predicted ones. Rings: what the plan uses.</p>",
        *(_hit_rates(phase, [x for x in layers if x.phase == phase]) for phase in PHASES),
        "<h2>Reliability</h2><p>How often the gate chose the experts that were given a "
        "probability; on the diagonal, it is the true one.</p>",
        *(_reliability(phase, [x for x in layers if x.phase == phase]) for phase in PHASES),
        "<h2>Means by layer group</h2><p>Hit rate / rank accuracy, in percent.</p>",
        _table(summaries(layers)),
    ]
    return _page("\n".join(parts))


def dummy_page(what: str) -> str:
    """The page of a plan whose predictor is a dummy; `what` says of what kind."""
    return _page(f"<p><strong>DUMMY</strong>: {escape(what)}. Nothing was measured.</p>")


def _page(body: str) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>Predictors of the next layer's experts</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>Predictors of the next layer's experts</h1>\n{body}\n</body></html>\n"
    )


def _trained_on(predictors: Predictors) -> str:
    name = predictors.traces.get("calibration") or "the model's own answers to built-in prompts"
    rows = " and ".join(f"{n:,} {phase} rows" for phase, n in predictors.rows.items())
    return f"Trained on {rows} of {name}."


def _similarity(predictors: Predictors) -> str:
    moe, cosines = predictors.moe_layers, predictors.similarity
    bands = [
        (first - 0.5, last + 0.5, name)
        for name in GROUPS
        if (of := [n for n, g in zip(moe, predictors.groups, strict=True) if g == name])
        for first, last in [(of[0], of[-1])]
    ]
    low = min([0.0, *cosines])
    line = Line("", list(zip(moe, cosines, strict=False)), "#0057b8", strong=True)
    y = Axis("mean cosine with the next", low, 1, _tenths(low, 1, 5))
    return _key((n, _COLOURS[n]) for _, _, n in bands) + _plot(
        [line], _layer_axis(moe), y, bands=bands
    )


def _hit_rates(phase: str, layers: Sequence[Layer]) -> str:
    if not layers:
        return ""
    lines = []
    for name in (*reversed(RIVALS), PHASEPER):
        points = [(x.layer, x.figures[name].hit) for x in layers if name in x.figures]
        if points:
            lines.append(Line(name, points, _COLOURS[name], name == PHASEPER))
    rings = [(x.layer, x.figures[x.chosen].hit, _COLOURS[x.chosen]) for x in layers]
    plot = _plot(
        lines,
        _layer_axis([x.layer for x in layers]),
        Axis("hit rate", 0, 1, _tenths(0, 1, 5)),
        rings=rings,
    )
    names = [line.name for line in reversed(lines)]
    return f"<h3>{phase}</h3>" + _key((_title(n), _COLOURS[n]) for n in names) + plot


def _reliability(phase: str, layers: Sequence[Layer]) -> str:
    lines = [Line("", [(0, 0), (1, 1)], "#9ca3af")]
    for group in GROUPS:
        points = _diagram([x.reliability for x in layers if x.group == group])
        if points:
            lines.append(Line(group, points, _COLOURS[group], strong=True))
    if len(lines) == 1:
        return ""
    x = Axis("predicted probability", 0, 1, _tenths(0, 1, 5))
    y = Axis("chosen", 0, 1, _tenths(0, 1, 5))
    key = _key((line.name, line.colour) for line in lines[1:])
    return f"<h3>{phase}</h3>" + key + _plot(lines, x, y)


def _diagram(found: Sequence[Mapping[str, Sequence[float]]]) -> list[tuple[float, float]]:
    """Diagrams of several layers as one: each bin's means, by pairs; empty bins are left out."""
    points = []
    for bins in zip(
        *(zip(d["predicted"], d["observed"], d["pairs"], strict=True) for d in found), strict=True
    ):
        pairs = sum(n for _, _, n in bins)
        if pairs:
            predicted, observed = (sum(b[i] * b[2] for b in bins) / pairs for i in (0, 1))
            points.append((predicted, observed))
    return points


def _table(rows: Sequence[Summary]) -> str:
    heads = ["phase", "group", "layers", "plan", *map(_title, (PHASEPER, *RIVALS))]
    out = ["<tr>" + "".join(f"<th>{h}</th>" for h in heads) + "</tr>"]
    for s in rows:
        cells = [s.phase, s.group, str(s.layers)]
        for f in (s.plan, *(s.figures.get(n) for n in (PHASEPER, *RIVALS))):
            cells.append("" if f is None else f"{100 * f.hit:.1f} / {100 * f.rank_hit:.1f}")
        out.append("<tr>" + "".join(f"<td>{c}</td>" for c in cells) + "</tr>")
    return "<table>" + "\n".join(out) + "</table>"


def _title(name: str) -> str:
    return _TITLES.get(name, name.replace("_", " "))


def _layer_axis(layers: Sequence[int]) -> Axis:
    step = max(1, len(layers) // 12)
    ticks = [(n, str(n)) for n in layers[::step]]
    return Axis("layer", min(layers) - 0.5, max(layers) + 0.5, ticks)


def _tenths(low: float, high: float, count: int) -> list[tuple[float, str]]:
    values = [low + (high - low) * i / count for i in range(count + 1)]
    return [(v, f"{v:.2f}".rstrip("0").rstrip(".")) for v in values]


def _key(entries: Iterable[tuple[str, str]]) -> str:
    return "".join(
        f'<span class="key"><i style="background:{colour}"></i>{escape(name)}</span>'
        for name, colour in entries
    )


def _plot(
    lines: Sequence[Line],
    x: Axis,
    y: Axis,
    bands: Sequence[tuple[float, float, str]] = (),
    rings: Sequence[tuple[float, float, str]] = (),
) -> str:
    """bands: (from x, to x, group), shaded; rings: (x, y, colour)."""
    wide, high = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def across(value: float) -> str:
        return f"{_LEFT + wide * x.part(value):.1f}"

    def down(value: float) -> str:
        return f"{_TOP + high * (1 - y.part(value)):.1f}"

    left, right, top, bottom = _LEFT, _WIDTH - _RIGHT, _TOP, _HEIGHT - _BOTTOM
    out = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">']
    for begin, end, name in bands:
        size = float(across(end)) - float(across(begin))
        out.append(
            f'<rect x="{across(begin)}" y="{top}" width="{size:.1f}" height="{high}" '
            f'fill="{_COLOURS[name]}" opacity=".12"><title>{name} group</title></rect>'
        )
    for value, label in y.ticks:
        out.append(
            f'<path d="M{left} {down(value)}H{right}" stroke="#e5e7eb"/>'
            f'<text x="{left - 6}" y="{down(value)}" text-anchor="end" dy=".35em">{label}</text>'
        )
    for value, label in x.ticks:
        out.append(
            f'<text x="{across(value)}" y="{bottom + 16}" text-anchor="middle">{label}</text>'
        )
    out.append(
        f'<text x="{(left + right) / 2:.0f}" y="{_HEIGHT - 4}" text-anchor="middle">{x.title}'
        f'</text><text transform="rotate(-90)" x="{-(top + bottom) / 2:.0f}" y="12" '
        f'text-anchor="middle">{y.title}</text>'
    )
    for line in lines:
        points = [(across(a), down(b)) for a, b in line.points]
        path = " ".join(f"{a},{b}" for a, b in points)
        width = 2.5 if line.strong else 1.2
        out.append(
            f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="{width}"/>'
        )
        if not line.name and not line.strong:
            continue
        for (a, b), (at, value) in zip(points, line.points, strict=True):
            said = f"{_title(line.name)} {at:g}: {value:.3f}".strip()
            out.append(
                f'<circle cx="{a}" cy="{b}" r="{width}" fill="{line.colour}"><title>{said}</title>'
                "</circle>"
            )
    for at, value, colour in rings:
        out.append(
            f'<circle cx="{across(at)}" cy="{down(value)}" r="6" fill="none" stroke="{colour}"/>'
        )
    return "\n".join([*out, "</svg>"])
