"""Plots as inline SVG: text in, text out. Colours are CSS classes, so that one drawing serves light and dark pages.

Classes ``r0``, ``r1``, ... are routes in their order; ``k-NAME`` are kinds of spans.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

WIDTH = 480
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 10, 34
CDF_HEIGHT = 170
STRIP_HEIGHT = 30
TICKS = 6

Scale = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Interval:
    """One row of `forest`: a value and its interval."""

    label: str
    route: int
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Bar:
    """One span of `gantt`, in ms. ``lane`` and ``track``: the process, and which of its rows. ``faded``: it is only context."""

    lane: str
    track: str
    kind: str
    start: float
    length: float
    title: str
    faded: bool = False


def ticks(low: float, high: float, count: int = TICKS) -> list[float]:
    """About ``count`` round numbers from ``low`` to ``high``: steps of 1, 2 or 5 times a power of ten."""
    if high <= low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [step * index for index in range(first, math.floor(high / step + 1e-9) + 1)]


def distribution(values: Mapping[str, Sequence[float]], title: str) -> str:
    """The share of requests answered within a time, by route, over a strip with box for each route. Milliseconds."""
    highest = max(max(some) for some in values.values()) * 1.04
    height = TOP + CDF_HEIGHT + 12 + STRIP_HEIGHT * len(values) + BOTTOM
    x = _scale(0, highest, LEFT, WIDTH - RIGHT)
    y = _scale(0, 1, TOP + CDF_HEIGHT, TOP)
    parts = list(_grid(x, ticks(0, highest), TOP, height - BOTTOM, "ms"))
    for share in (0, 0.25, 0.5, 0.75, 1):
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(share):.1f}" y2="{y(share):.1f}"/>'
        )
        parts.append(
            f'<text class="tick" x="{LEFT - 6}" y="{y(share) + 4:.1f}" text-anchor="end">{100 * share:.0f} %</text>'
        )
    for number, (route, some) in enumerate(values.items()):
        parts.append(
            f'<path class="line r{number}" d="{_steps(sorted(some), x, y)}"><title>{escape(route)}</title></path>'
        )
        middle = TOP + CDF_HEIGHT + 12 + STRIP_HEIGHT * (number + 0.5)
        parts += _strip(np.array(some), x, middle, number, route)
    return _svg(WIDTH, height, title, parts)


def forest(rows: Sequence[Interval], title: str) -> str:
    """Changes in percent with their intervals, about a line at 0."""
    left, row_height = 190, 24
    low = min(-5.0, *(row.low for row in rows)) * 1.05
    high = max(5.0, *(row.high for row in rows)) * 1.05
    height = TOP + row_height * len(rows) + BOTTOM
    width = 760
    x = _scale(low, high, left, width - 90)
    parts = list(_grid(x, ticks(low, high), TOP, height - BOTTOM, "%"))
    parts.append(
        f'<line class="zero" x1="{x(0):.1f}" x2="{x(0):.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>'
    )
    for index, row in enumerate(rows):
        middle = TOP + row_height * (index + 0.5)
        parts.append(
            f'<text class="label" x="{left - 10}" y="{middle + 4:.1f}" text-anchor="end">{escape(row.label)}</text>'
        )
        parts.append(
            f'<line class="whisker r{row.route}" x1="{x(row.low):.1f}" x2="{x(row.high):.1f}" y1="{middle:.1f}" y2="{middle:.1f}"/>'
            f'<circle class="dot r{row.route}" cx="{x(row.value):.1f}" cy="{middle:.1f}" r="4.5"/>'
            f'<text class="value" x="{width - 8}" y="{middle + 4:.1f}" text-anchor="end">{row.value:+.1f} %</text>'
        )
    return _svg(width, height, title, parts)


def gantt(
    bars: Sequence[Bar],
    tracks: Sequence[str],
    begin: float,
    end: float,
    marks: Mapping[str, float],
    title: str,
) -> str:
    """Spans on a time axis from ``begin`` to ``end`` ms: one row for each lane and track. ``marks``: named moments."""
    lanes = list(dict.fromkeys(bar.lane for bar in bars))
    used = {(bar.lane, bar.track) for bar in bars}
    rows = [(lane, track) for lane in lanes for track in tracks if (lane, track) in used]
    left, row_height, width, top = 150, 20, 980, 26
    height = top + row_height * len(rows) + BOTTOM
    x = _scale(begin, end, left, width - RIGHT)
    parts = list(
        _grid(
            x, ticks(begin, end, 10), top, height - BOTTOM, "ms since the request was sent", width
        )
    )
    for index, (lane, track) in enumerate(rows):
        y = top + row_height * index
        if index == 0 or rows[index - 1][0] != lane:
            parts.append(f'<line class="lane" x1="0" x2="{width}" y1="{y}" y2="{y}"/>')
            parts.append(f'<text class="label strong" x="4" y="{y + 14}">{escape(lane)}</text>')
        parts.append(
            f'<text class="tick" x="{left - 8}" y="{y + 14}" text-anchor="end">{escape(track)}</text>'
        )
        parts += [
            _bar(bar, x, y + 3, row_height - 6)
            for bar in bars
            if (bar.lane, bar.track) == (lane, track)
        ]
    for name, moment in marks.items():
        parts.append(
            f'<line class="mark" x1="{x(moment):.1f}" x2="{x(moment):.1f}" y1="{top - 4}" y2="{height - BOTTOM}"/>'
        )
        anchor = "end" if x(moment) > width - 100 else "middle"
        parts.append(
            f'<text class="tick strong" x="{x(moment):.1f}" y="{top - 8}" text-anchor="{anchor}">{escape(name)}</text>'
        )
    return _svg(width, height, title, parts)


def _bar(bar: Bar, x: Scale, y: float, height: float) -> str:
    begin, stop = x(bar.start), x(bar.start + bar.length)
    words = f"k-{escape(bar.kind)}" + (" faded" if bar.faded else "")
    place = f'x="{begin:.1f}" y="{y:.1f}" width="{max(stop - begin, 1.5):.1f}" height="{height:.1f}" rx="2"'
    return f'<rect class="{words}" {place}><title>{escape(bar.title)}</title></rect>'


def _strip(
    values: "np.ndarray[Any, np.dtype[np.float64]]",
    x: Scale,
    middle: float,
    number: int,
    route: str,
) -> Iterator[str]:
    """Every value as a dot, the middle half as a box, the median as a line, the mean as a diamond."""
    for index, value in enumerate(values):
        offset = ((index * 0.618034) % 1 - 0.5) * (
            STRIP_HEIGHT - 12
        )  # spread evenly, whatever the count
        yield f'<circle class="sample r{number}" cx="{x(value):.1f}" cy="{middle + offset:.1f}" r="2"/>'
    low, median, high = np.percentile(values, [25, 50, 75])
    half, mean = STRIP_HEIGHT / 2 - 5, float(values.mean())
    top, tall = f"{middle - half:.1f}", f"{2 * half:.1f}"
    words = f"{escape(route)}: half of the requests between {low:.1f} and {high:.1f} ms, mean {mean:.1f} ms"
    place = (
        f'x="{x(low):.1f}" y="{top}" width="{max(x(high) - x(low), 1):.1f}" height="{tall}" rx="2"'
    )
    yield f'<rect class="box r{number}" {place}><title>{words}</title></rect>'
    yield f'<line class="median r{number}" x1="{x(median):.1f}" x2="{x(median):.1f}" y1="{top}" y2="{middle + half:.1f}"/>'
    yield f'<path class="mean r{number}" d="M{x(mean):.1f} {middle - 5:.1f}l5 5l-5 5l-5 -5z"/>'


def _steps(values: Sequence[float], x: Scale, y: Scale) -> str:
    """An empirical distribution function as a path."""
    path = [f"M{x(0):.1f} {y(0):.1f}"]
    for index, value in enumerate(values, 1):
        path.append(f"H{x(value):.1f}V{y(index / len(values)):.1f}")
    return "".join(path)


def _grid(
    x: Scale, at: Sequence[float], top: float, bottom: float, unit: str, width: float = WIDTH
) -> Iterator[str]:
    for value in at:
        yield f'<line class="grid" x1="{x(value):.1f}" x2="{x(value):.1f}" y1="{top}" y2="{bottom}"/>'
        yield f'<text class="tick" x="{x(value):.1f}" y="{bottom + 15}" text-anchor="middle">{value:g}</text>'
    yield f'<text class="tick" x="{x(at[-1]):.1f}" y="{bottom + 29}" text-anchor="end">{escape(unit)}</text>'


def _scale(low: float, high: float, start: float, stop: float) -> Scale:
    return lambda value: start + (value - low) / (high - low) * (stop - start)


def _svg(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return f'<svg viewBox="0 0 {width} {height:.0f}" role="img" aria-label="{escape(title)}">{body}</svg>'
