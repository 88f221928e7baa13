"""Draws the losses of a run that was killed and resumed over those of one that was not, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

Losses = list[tuple[int, float]]
"""(step, loss) of the steps that one process computed."""

WIDTH, HEIGHT = 380, 348  # as narrow as a telephone, where words keep their size
SHOWN = 400  # pixels across, where there is room
LEFT, RIGHT, TOP, BOTTOM = 66, 366, 66, 226
HUES = (231, 123, 4, 45, 187, 277, 200, 338)  # one for each process
PLAIN = (
    "text { font-family: Helvetica, Arial, sans-serif; font-size: 13px; } "
    ".title { font-weight: bold; font-size: 14px; } polyline, path { fill: none; } "
    ".cross { stroke-width: 2; } .fall { stroke-dasharray: 1 3; }"
)


def colours(ink: str, soft: str, grey: str, paper: str, light: int) -> str:
    """The colours of a scheme, as rules of CSS."""
    lives = (f".life{n} {{ stroke: hsl({hue}, 55%, {light}%); }}" for n, hue in enumerate(HUES))
    return (
        f"text {{ fill: {soft}; }} polyline, path {{ stroke: {grey}; }} rect {{ fill: {paper}; stroke: {grey}; }} "
        f".title {{ fill: {ink}; }} .cross {{ stroke: {ink}; }} .fall {{ stroke: {soft}; }} "
        f"{' '.join(lives)}"
    )


LIGHT = colours("#1f2430", "#4b5464", "#c5cad6", "#ffffff", light=38)
DARK = colours("#e2e4ea", "#b4bbc8", "#5a6275", "#1e2129", light=70)


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

    def line(losses: Losses, how: str) -> str:
        points = " ".join("{:.1f},{:.1f}".format(*at(step, loss)) for step, loss in losses)
        return f'<polyline points="{points}" {how}/>'

    def cross(across: float, down: float) -> str:
        return f'<path d="M{across - 4:.1f} {down - 4:.1f}l8 8m0 -8l-8 8" class="cross"/>'

    shapes = [line(straight, 'stroke-width="7"'), f'<path d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}"/>']
    row = (HEIGHT - 24 - BOTTOM - 20) / max(len(lives), 1)
    for number, (losses, killed) in enumerate(lives):
        if not losses:
            continue
        how = f'class="life{number % len(HUES)}" stroke-width='
        down = BOTTOM + 20 + row * (number + 0.5)
        (first, _), (last, loss) = losses[0], losses[-1]
        begin, (end, height) = at(first, low)[0], at(last, loss)
        shapes.append(line(losses, f'{how}"1.6"'))
        shapes.append(f'<path d="M{begin - 1:.1f} {down:.1f}H{end + 1:.1f}" {how}"5"/>')
        if killed:
            shapes.append(f'<path d="M{end:.1f} {height:.1f}V{down:.1f}" class="fall"/>')
            shapes += [cross(end, height), cross(end, down)]
    kills = sum(killed for _, killed in lives)
    title = f"{kills} times kill -9 in the middle of a save:", "the loss is the same, to the bit"
    shapes += [
        f'<text x="14" y="{26 + 19 * n}" class="title">{text}</text>'
        for n, text in enumerate(title)
    ]
    shapes += [
        f'<text x="{across}" y="{down:.0f}" text-anchor="{anchor}">{text}</text>'
        for across, down, anchor, text in (
            (LEFT - 8, TOP + 4, "end", f"{high:.2f}"),
            (LEFT - 8, BOTTOM + 4, "end", f"{low:.2f}"),
            (LEFT - 8, (TOP + BOTTOM) / 2, "end", "loss"),
            (LEFT - 8, (BOTTOM + HEIGHT) / 2, "end", "process"),
            (LEFT, HEIGHT - 10, "start", "step 0"),
            (RIGHT, HEIGHT - 10, "end", f"step {last_step}"),
            (RIGHT, TOP + 8, "end", "broad and grey: nobody killed it"),
            (RIGHT, TOP + 26, "end", "coloured: one process each; x: kill -9"),
        )
    ]
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{SHOWN}" height="{SHOWN * HEIGHT / WIDTH:.0f}" '
        'role="img" aria-labelledby="title desc">\n'
        f'<title id="title">{" ".join(title)}</title>\n'
        f'<desc id="desc">Loss by step of a run that was not stopped (grey, broad), and of {len(lives)} '
        "processes that were killed and resumed, one colour a process. The lines lie on each other.</desc>\n"
        f"<style>{PLAIN} {LIGHT} @media (prefers-color-scheme: dark) {{ {DARK} }}</style>\n"
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8"/>\n' + "\n".join(shapes) + "\n</svg>\n"
    )
