"""Charts as SVG text: bars with confidence intervals, and lines on logarithmic axes.

Colours are CSS variables of the page, so that both of its themes fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from ckpt_core.bench._stats import Summary
from ckpt_core.bench._table import number

WIDTH, LABEL, VALUE, ROW, PAD = 880, 250, 140, 26, 8
COLOURS = 10


@dataclass(frozen=True)
class Bar:
    """One row: its label, its statistics, which of the page's colours it has, and if it is pale."""

    label: str
    summary: Summary
    colour: int
    pale: bool = False


def bars(rows: Sequence[Bar], unit: str) -> str:
    """Medians as bars, the 95 % interval of the mean as a whisker, every value as a dot.

    Where the values span more than a factor of 40 the axis is logarithmic and the bars are dots: a
    bar on such an axis would lie about proportions.
    """
    low = min(min(row.summary.values) for row in rows)
    high = max(max(max(row.summary.values), _upper(row.summary)) for row in rows)
    logarithmic = low > 0 and high / low > 40
    scale = _log_scale(low, high) if logarithmic else _linear_scale(high)
    height = ROW * len(rows) + 34
    parts = [_axis(scale, height, unit, logarithmic)]
    for index, row in enumerate(rows):
        y = PAD + index * ROW + ROW / 2
        parts.append(_row(row, y, scale, logarithmic))
    title = f"{len(rows)} cases, {unit}"
    return _svg(height, title, parts)


@dataclass(frozen=True)
class Scale:
    """A value's place between the labels and the right edge."""

    low: float
    high: float
    ticks: tuple[float, ...]
    logarithmic: bool
    left: float = LABEL
    right: float = WIDTH - VALUE

    def at(self, value: float) -> float:
        """In pixels."""
        if self.logarithmic:
            span = math.log(self.high / self.low) or 1.0
            part = math.log(max(value, self.low) / self.low) / span
        else:
            part = value / self.high if self.high else 0.0
        return self.left + (self.right - self.left) * min(1.0, max(0.0, part))


def _linear_scale(high: float) -> Scale:
    high = high if high > 0 else 1.0
    step = 10 ** math.floor(math.log10(high))
    for factor in (0.1, 0.2, 0.25, 0.5, 1, 2):
        if high / (step * factor) <= 6:
            step *= factor
            break
    count = math.ceil(high / step - 1e-9)
    return Scale(0.0, count * step, tuple(i * step for i in range(count + 1)), False)


def _log_scale(low: float, high: float, left: float = LABEL, right: float = WIDTH - VALUE) -> Scale:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    last = max(last, first + 1)
    ticks = tuple(10.0**power for power in range(first, last + 1))
    return Scale(ticks[0], ticks[-1], ticks, True, left, right)


def _upper(summary: Summary) -> float:
    return summary.mean + (summary.ci95 or 0.0)


def _axis(scale: Scale, height: float, unit: str, logarithmic: bool) -> str:
    bottom = height - 22
    lines: list[str] = []
    for tick in scale.ticks:
        x = scale.at(tick)
        lines.append(f'<line class="grid" x1="{x:.1f}" y1="{PAD}" x2="{x:.1f}" y2="{bottom:.1f}"/>')
        lines.append(
            f'<text class="tick" x="{x:.1f}" y="{bottom + 14:.1f}" text-anchor="middle">'
            f"{_tick(tick)}</text>"
        )
    note = f"{unit}, log scale" if logarithmic else unit
    lines.append(
        f'<text class="tick" x="{WIDTH - 4}" y="{bottom + 14:.1f}" text-anchor="end">'
        f"{escape(note)}</text>"
    )
    return "".join(lines)


def _tick(value: float) -> str:
    return f"{value:g}"


def _row(row: Bar, y: float, scale: Scale, logarithmic: bool) -> str:
    summary, colour = row.summary, f"c{row.colour % COLOURS}{' pale' if row.pale else ''}"
    x = scale.at(summary.median)
    label = row.label if len(row.label) <= 40 else row.label[:39] + "…"
    parts = [
        f'<text class="label" x="{LABEL - 10}" y="{y + 4:.1f}" text-anchor="end">'
        f"{escape(label)}<title>{escape(row.label)}</title></text>"
    ]
    if logarithmic:
        parts.append(f'<circle class="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="6"/>')
    else:
        width = max(1.0, x - scale.left)
        parts.append(
            f'<rect class="{colour}" x="{scale.left}" y="{y - 8:.1f}" width="{width:.1f}" '
            f'height="16" rx="2"/>'
        )
    for value in summary.values[:50]:
        parts.append(f'<circle class="dot" cx="{scale.at(value):.1f}" cy="{y:.1f}" r="2"/>')
    if summary.ci95 is not None:
        low, high = scale.at(max(summary.mean - summary.ci95, scale.low)), scale.at(_upper(summary))
        parts.append(
            f'<path class="whisker" d="M{low:.1f} {y - 4:.1f}V{y + 4:.1f}M{low:.1f} {y:.1f}'
            f'H{high:.1f}M{high:.1f} {y - 4:.1f}V{y + 4:.1f}"/>'
        )
    spread = "" if summary.ci95 is None else f" ± {number(summary.ci95)}"
    parts.append(
        f'<text class="value" x="{WIDTH - 4}" y="{y + 4:.1f}" text-anchor="end">'
        f"{number(summary.median)}{spread}</text>"
    )
    return "".join(parts)


def lines(series: Mapping[str, Sequence[tuple[float, Summary]]], x_name: str, unit: str) -> str:
    """Medians over a number, one line for each series, both axes logarithmic, whiskers for 95 %."""
    points = [point for found in series.values() for point in found]
    xs = [x for x, _ in points]
    ys = [value for _, summary in points for value in (summary.min, summary.max) if value > 0]
    left, right, top, bottom = 70.0, WIDTH - 230.0, 12.0, 300.0
    across = _log_scale(min(xs), max(xs), left, right)
    up = _log_scale(min(ys), max(ys), bottom, top)
    parts: list[str] = []
    for tick in across.ticks:
        x = across.at(tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}"/>')
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>'
        )
    for tick in up.ticks:
        y = up.at(tick)
        parts.append(f'<line class="grid" x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'
        )
    parts.append(
        f'<text class="tick" x="{(left + right) / 2}" y="{bottom + 34}" text-anchor="middle">'
        f"{escape(x_name)} (log); {escape(unit)} (log)</text>"
    )
    for index, (label, found) in enumerate(series.items()):
        parts.append(_line(sorted(found), index, label, across, up, right))
    return _svg(bottom + 44, f"{unit} over {x_name}", parts)


def _line(
    found: Sequence[tuple[float, Summary]],
    index: int,
    label: str,
    across: Scale,
    up: Scale,
    right: float,
) -> str:
    colour = f"c{index % COLOURS}"
    places = [(across.at(x), up.at(summary.median), summary) for x, summary in found]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y, _ in places)
    parts = [f'<path class="line {colour}" d="M{path}"/>']
    for x, y, summary in places:
        if summary.ci95 is not None and summary.mean > summary.ci95:
            low, high = up.at(summary.mean - summary.ci95), up.at(_upper(summary))
            parts.append(f'<path class="whisker {colour}" d="M{x:.1f} {low:.1f}V{high:.1f}"/>')
        parts.append(
            f'<circle class="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="4">'
            f"<title>{escape(label)}: {number(summary.median)}</title></circle>"
        )
    y = 20 + index * 20
    parts.append(
        f'<rect class="{colour}" x="{right + 20}" y="{y - 9}" width="12" height="12" rx="2"/>'
    )
    shown = label if len(label) <= 28 else label[:27] + "…"
    parts.append(f'<text class="label" x="{right + 40}" y="{y + 1}">{escape(shown)}</text>')
    return "".join(parts)


def _svg(height: float, title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}" '
        f'preserveAspectRatio="xMinYMin meet">{"".join(parts)}</svg>'
    )
