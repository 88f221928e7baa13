"""Draws the losses of a run that was killed and resumed over those of one that was not, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

Losses = Sequence[tuple[int, float]]
"""(step, loss) of the steps that one process computed."""

WIDTH, HEIGHT = 380, 348  # as narrow as a telephone, where words keep their size
SHOWN = 400  # pixels across, where there is room
LEFT, RIGHT, TOP, BOTTOM = 66, 366, 66, 226
COLOURS = ("#3f51b5", "#2e7d32", "#b3392f", "#8e6c00", "#00838f", "#6a1b9a", "#455a64", "#ad1457")
STYLE = (
    "text { font-family: Helvetica, Arial, sans-serif; font-size: 13px; fill: #1f2430; } "
    ".title { font-weight: bold; font-size: 14px; }  .soft { fill: #4b5464; } "
    "polyline, path { fill: none; } "
    "@media (prefers-color-scheme: dark) { text { fill: #e2e4ea; } .soft { fill: #b4bbc8; } rect { fill: #1e2129; } "
    '[stroke="#c5cad6"] { stroke: #5a6275; } [stroke="#5b6475"] { stroke: #a3abba; } '
    '[stroke="#1f2430"] { stroke: #e2e4ea; } [stroke="#3f51b5"] { stroke: #9fa8da; } '
    '[stroke="#2e7d32"] { stroke: #81c784; } [stroke="#b3392f"] { stroke: #ef8a80; } '
    '[stroke="#8e6c00"] { stroke: #d4b04c; } [stroke="#00838f"] { stroke: #4dd0e1; } '
    '[stroke="#6a1b9a"] { stroke: #ce93d8; } [stroke="#455a64"] { stroke: #90a4ae; } '
    '[stroke="#ad1457"] { stroke: #f48fb1; } }'
)


def draw(path: Path, straight: Losses, lives: Sequence[tuple[Losses, bool]]) -> None:
    """Writes the picture.

    Args:
        path: of the SVG file.
        straight: the losses of the run that nobody killed.
        lives: for each process of the other run, its losses and whether it was killed.
    """
    last_step = max(step for step, _ in straight)
    low, high = min(loss for _, loss in straight), max(loss for _, loss in straight)

    def at(step: float, loss: float) -> tuple[float, float]:
        across = LEFT + (RIGHT - LEFT) * step / max(last_step, 1)
        return across, BOTTOM - (BOTTOM - TOP) * (loss - low) / max(high - low, 1e-9)

    def line(losses: Losses, colour: str, width: float) -> str:
        points = " ".join("{:.1f},{:.1f}".format(*at(step, loss)) for step, loss in losses)
        return f'<polyline points="{points}" stroke="{colour}" stroke-width="{width}"/>'

    def cross(across: float, down: float) -> str:
        return f'<path d="M{across - 4:.1f} {down - 4:.1f}l8 8m0 -8l-8 8" stroke="#1f2430" stroke-width="2"/>'

    kills = sum(killed for _, killed in lives)
    shapes = [line(straight, "#c5cad6", 7)]
    row = (HEIGHT - 24 - BOTTOM - 20) / max(len(lives), 1)
    for number, (losses, killed) in enumerate(lives):
        if not losses:
            continue
        colour, down = COLOURS[number % len(COLOURS)], BOTTOM + 20 + row * (number + 0.5)
        (first, _), (last, loss) = losses[0], losses[-1]
        begin, end = at(first, low)[0], at(last, low)[0]
        shapes += [
            line(losses, colour, 1.6),
            f'<path d="M{begin - 1:.1f} {down:.1f}H{end + 1:.1f}" stroke="{colour}" stroke-width="5"/>',
        ]
        if killed:
            across, height = at(last, loss)
            shapes += [
                f'<path d="M{across:.1f} {height:.1f}V{down:.1f}" stroke="#5b6475" stroke-dasharray="1 3"/>',
                cross(across, height),
                cross(across, down),
            ]
    shapes += _axes(last_step, low, high)
    heading = f"{kills} times kill -9 in the middle of a save:", "the loss is the same, to the bit"
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{SHOWN}" height="{SHOWN * HEIGHT / WIDTH:.0f}" '
        'role="img" aria-labelledby="title desc">\n'
        f'<title id="title">{" ".join(heading)}</title>\n'
        f'<desc id="desc">Loss by step of a run that was not stopped (grey, broad), and of {len(lives)} processes '
        "that were killed and resumed, one colour a process. The lines lie on each other.</desc>\n"
        f"<style>{STYLE}</style>\n"
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff" stroke="#c5cad6"/>\n'
        f'<text x="14" y="26" class="title">{heading[0]}</text>\n'
        f'<text x="14" y="45" class="title">{heading[1]}</text>\n'
        + "\n".join(shapes)
        + "\n</svg>\n"
    )


def _axes(last_step: int, low: float, high: float) -> list[str]:
    words = [
        (LEFT - 8, TOP + 4, "end", f"{high:.2f}"),
        (LEFT - 8, BOTTOM + 4, "end", f"{low:.2f}"),
        (LEFT - 8, (TOP + BOTTOM) / 2, "end", "loss"),
        (LEFT - 8, (BOTTOM + HEIGHT) / 2, "end", "process"),
        (LEFT, HEIGHT - 10, "start", "step 0"),
        (RIGHT, HEIGHT - 10, "end", f"step {last_step}"),
        (RIGHT, TOP + 8, "end", "broad and grey: nobody killed it"),
        (RIGHT, TOP + 26, "end", "coloured: one process each; x: kill -9"),
    ]
    return [
        f'<path d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}" stroke="#c5cad6"/>',
        *(
            f'<text x="{across:.0f}" y="{down:.0f}" text-anchor="{anchor}" class="soft">{word}</text>'
            for across, down, anchor, word in words
        ),
    ]
