"""Charts as SVG text: bars with confidence intervals, and lines on logarithmic axes.

Colours are CSS variables of the page, so that charts follow its light and dark theme.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from ckpt_core.bench._rows import number
from ckpt_core.bench._stats import Summary

WIDTH = 480
"""Width of line charts in SVG units: small, so that their text is readable on a telephone."""
ROW, TOP, BOTTOM = 38, 4, 30
COLOURS = 10


@dataclass(frozen=True)
class Bar:
    """One row of a bar chart; ``colour`` is an index into the page's colours."""

    label: str
    summary: Summary
    colour: int
    pale: bool = False


def bars(rows: Sequence[Bar], unit: str) -> str:
    """Medians as bars, the 95 % interval of the mean as a whisker, every value as a dot.

    If the values span more than a factor of 40 the axis is logarithmic and the bars become dots: the
    length of a bar would mislead on such an axis. Positions are in percent and text sizes in pixels,
    so that a narrow screen shrinks the bars and not the text.
    """
    low = min(min(row.summary.values) for row in rows)
    high = max(max(max(row.summary.values), _upper(row.summary)) for row in rows)
    logarithmic = low > 0 and high / low > 40
    scale = _log_scale(low, high) if logarithmic else _linear_scale(high)
    height = TOP + ROW * len(rows) + BOTTOM
    parts = [_axis(scale, height, f"{unit}, log scale" if logarithmic else unit)]
    for index, row in enumerate(rows):
        parts.append(_row(row, TOP + index * ROW, scale, logarithmic))
    title = f"{len(rows)} {'case' if len(rows) == 1 else 'cases'}, {unit}"
    return (
        f'<svg class="bars" width="100%" height="{height}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>"
    )


@dataclass(frozen=True)
class Scale:
    """Maps values to positions on an axis; by default in percent of the width, with margins for text."""

    low: float
    high: float
    ticks: tuple[float, ...]
    logarithmic: bool
    left: float = 1.0
    right: float = 97.0

    def at(self, value: float) -> float:
        """The position of a value, in the unit of ``left`` and ``right``."""
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


def _log_scale(low: float, high: float, left: float = 1.0, right: float = 97.0) -> Scale:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    last = max(last, first + 1)
    ticks = tuple(10.0**power for power in range(first, last + 1))
    return Scale(ticks[0], ticks[-1], ticks, True, left, right)


def _upper(summary: Summary) -> float:
    return summary.mean + (summary.ci95 or 0.0)


def _axis(scale: Scale, height: int, unit: str) -> str:
    bottom = height - BOTTOM
    lines: list[str] = []
    last = len(scale.ticks) - 1
    for index, tick in enumerate(scale.ticks):
        x = f"{scale.at(tick):.2f}%"
        lines.append(f'<line class="grid" x1="{x}" y1="{TOP}" x2="{x}" y2="{bottom}"/>')
        anchor = "start" if index == 0 else "end" if index == last else "middle"
        lines.append(
            f'<text class="tick" x="{x}" y="{bottom + 13}" text-anchor="{anchor}">{tick:g}</text>'
        )
    lines.append(
        f'<text class="tick" x="100%" y="{bottom + 27}" text-anchor="end">{escape(unit)}</text>'
    )
    return "".join(lines)


def _row(row: Bar, top: float, scale: Scale, logarithmic: bool) -> str:
    """The label and the median on one line, the bar below them."""
    summary, colour = row.summary, f"c{row.colour % COLOURS}{' pale' if row.pale else ''}"
    x, y = scale.at(summary.median), top + 26
    label = row.label if len(row.label) <= 40 else row.label[:39] + "…"
    spread = "" if summary.ci95 is None else f" ± {number(summary.ci95)}"
    parts = [
        f'<text class="label" x="{scale.left}%" y="{top + 13}">'
        f"{escape(label)}<title>{escape(row.label)}</title></text>",
        f'<text class="value" x="100%" y="{top + 13}" text-anchor="end">'
        f"{number(summary.median)}{spread}</text>",
    ]
    if logarithmic:
        parts.append(f'<circle class="{colour}" cx="{x:.2f}%" cy="{y}" r="6"/>')
    else:
        width = max(0.2, x - scale.left)
        parts.append(
            f'<rect class="{colour}" x="{scale.left}%" y="{y - 7}" width="{width:.2f}%" '
            f'height="14" rx="2"/>'
        )
    if summary.n > 1:  # the bar of a single run is at its only value
        for value in summary.values[:50]:
            parts.append(f'<circle class="dot" cx="{scale.at(value):.2f}%" cy="{y}" r="2"/>')
    if summary.ci95:
        parts.append(_whisker(summary, y, scale))
    return "".join(parts)


def _whisker(summary: Summary, y: float, scale: Scale) -> str:
    low = scale.at(max(summary.mean - (summary.ci95 or 0.0), scale.low))
    high = scale.at(_upper(summary))
    ends = "".join(
        f'<line x1="{x:.2f}%" y1="{y - 4}" x2="{x:.2f}%" y2="{y + 4}"/>' for x in (low, high)
    )
    across = f'<line x1="{low:.2f}%" y1="{y}" x2="{high:.2f}%" y2="{y}"/>'
    return f'<g class="whisker">{across}{ends}</g>'


def lines(series: Mapping[str, Sequence[tuple[float, Summary]]], x_name: str, unit: str) -> str:
    """A line of medians for each series, both axes logarithmic, with 95 % intervals as whiskers."""
    points = [point for found in series.values() for point in found]
    xs = [x for x, _ in points]
    ys = [value for _, summary in points for value in (summary.min, summary.max) if value > 0]
    left, right, top, bottom = 56.0, WIDTH - 14.0, 12.0, 240.0
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
        parts.append(_line(sorted(found), index, label, across, up))
    return _svg(bottom + 44, f"{unit} over {x_name}", parts) + _legend(series)


def _line(
    found: Sequence[tuple[float, Summary]],
    index: int,
    label: str,
    across: Scale,
    up: Scale,
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
    return "".join(parts)


def _legend(labels: Iterable[str]) -> str:
    """The labels with their colours, as HTML text, so that a narrow screen can wrap them."""
    entries = (
        f'<span class="key"><i class="k{index % COLOURS}"></i>{escape(label)}</span>'
        for index, label in enumerate(labels)
    )
    return f'<p class="legend">{"".join(entries)}</p>'


def _svg(height: float, title: str, parts: Sequence[str]) -> str:
    return (
        f'<div class="scroll"><svg class="lines" viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'aria-label="{escape(title)}" preserveAspectRatio="xMinYMin meet">{"".join(parts)}</svg></div>'
    )
