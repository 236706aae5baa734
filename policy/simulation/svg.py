"""Line charts as SVG text: enough for a report that needs no script and no other file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = (
    "#1b6ca8",
    "#c44e1c",
    "#2f8f4e",
    "#8a4fb0",
    "#b0902c",
    "#4d4d4d",
    "#c2427e",
    "#2aa5a5",
    "#7a5c3e",
)
_LEFT, _TOP, _BOTTOM, _LEGEND, _LEGEND_MARK, _LETTER = 64, 34, 44, 170, 48, 6.5


@dataclass(frozen=True, slots=True)
class Line:
    """A named series; ``dashed`` for what is context rather than subject."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False
    points: bool = True


def line_chart(
    title: str, x_label: str, y_label: str, lines: Sequence[Line], from_zero: bool = True
) -> str:
    """Return a chart with ticks at round numbers and a legend on the right."""
    legend = max(_LEGEND, math.ceil(_LEGEND_MARK + _LETTER * max(len(line.name) for line in lines)))
    width, height = 590 + legend, 320
    x_low, x_high = min(min(line.x) for line in lines), max(max(line.x) for line in lines)
    y_ticks = ticks(
        0.0 if from_zero else min(min(line.y) for line in lines), max(max(line.y) for line in lines)
    )
    y_low, y_span = y_ticks[0], y_ticks[-1] - y_ticks[0]
    inner_w, inner_h = width - _LEFT - legend, height - _TOP - _BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + (x - x_low) / ((x_high - x_low) or 1) * inner_w, _TOP + (
            1 - (y - y_low) / y_span
        ) * inner_h

    parts = [
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{escape(title)}">'
    ]
    parts.append(f'<text x="{_LEFT}" y="18" class="title">{escape(title)}</text>')
    for tick in y_ticks:
        _, y = place(x_low, tick)
        parts.append(
            f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_LEFT + inner_w}" y2="{y:.1f}" class="grid"/>'
        )
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in [t for t in ticks(x_low, x_high) if x_low - 1e-9 <= t <= x_high + 1e-9]:
        x, _ = place(tick, y_low)
        parts.append(
            f'<line x1="{x:.1f}" y1="{_TOP + inner_h}" x2="{x:.1f}" y2="{_TOP + inner_h + 4}" '
            f'class="axis"/>'
        )
        parts.append(
            f'<text x="{x:.1f}" y="{_TOP + inner_h + 17}" text-anchor="middle">{tick:g}</text>'
        )
    middle = _TOP + inner_h / 2
    parts.append(
        f'<text x="{_LEFT + inner_w / 2}" y="{height - 8}" '
        f'text-anchor="middle">{escape(x_label)}</text>'
    )
    parts.append(
        f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 '
        f'{middle})">{escape(y_label)}</text>'
    )
    for index, line in enumerate(lines):
        parts += _series(
            line,
            COLOURS[index % len(COLOURS)],
            [place(x, y) for x, y in zip(line.x, line.y, strict=True)],
        )
        parts += _legend(
            line, COLOURS[index % len(COLOURS)], _LEFT + inner_w + 14, _TOP + 8 + 18 * index
        )
    return "\n".join([*parts, "</svg>"])


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return round numbers (1, 2 or 5 times a power of ten apart) that span low..high."""
    raw = (high - low) / about or 1.0
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, max(last, first + 1) + 1)]


def _series(line: Line, colour: str, points: list[tuple[float, float]]) -> list[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dash = ' stroke-dasharray="5 4"' if line.dashed else ""
    parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"{dash}/>']
    if line.points:
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
    return parts


def _legend(line: Line, colour: str, x: float, y: float) -> list[str]:
    dash = ' stroke-dasharray="5 4"' if line.dashed else ""
    return [
        f'<line x1="{x}" y1="{y}" x2="{x + 22}" y2="{y}" stroke="{colour}" '
        f'stroke-width="2.4"{dash}/>',
        f'<text x="{x + 28}" y="{y + 4}">{escape(line.name)}</text>',
    ]
