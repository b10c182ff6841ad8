"""Plots of exponents: powers of two over layers, and over steps, as inline SVG."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_WIDTH = 360  # units; a phone's window is about as many pixels wide
_SIDE = 6
_LEFT = 42  # for the powers of two beside a picture over steps
_NAME, _STRIP = 13, 9  # height of a row's name, and of its strip
_TALL = 150  # of a picture over steps
_COLUMNS = 64  # of a picture over steps; more than that cannot be told apart
_LETTERS = 54  # of a name that fit
_TICKS = 6
_HALO = ' stroke="#fff" stroke-width="3" paint-order="stroke"'
_INK, _WARN, _SOFT = "#0072b2", "#d55e00", "#6b7280"


@dataclass(frozen=True)
class Line:
    """A border of a format."""

    power: int
    """Numbers of 2**power and more are on its upper side."""
    label: str


def range_of(
    histograms: Sequence[Mapping[int, int]], lines: Sequence[Line]
) -> tuple[int, int]:
    """Return the lowest and the highest power of two to show, a margin included."""
    powers = [power for histogram in histograms for power in histogram]
    powers += [line.power for line in lines]
    return (min(powers) - 1, max(powers) + 1) if powers else (-1, 1)


def plot_layers(
    rows: Sequence[tuple[str, Mapping[int, int]]], lines: Sequence[Line], title: str
) -> str:
    """Draw a strip for each tensor: the darker, the more of its numbers.

    Args:
        rows: Names and histograms, the first on top.
        lines: Borders of formats.
        title: Words for a screen reader.
    """
    low, high = range_of([histogram for _, histogram in rows], lines)
    unit = (_WIDTH - 2 * _SIDE) / (high - low + 1)

    def x(power: float) -> float:
        return _SIDE + (power - low) * unit

    head = 14 + 12 * len(lines)
    height = head + len(rows) * (_NAME + _STRIP) + 6
    parts = [_text(x(power), 10, _power(power)) for power in _ticks(low, high)]
    names = []
    for number, (name, histogram) in enumerate(rows):
        y = head + number * (_NAME + _STRIP)
        words = f"<title>{escape(name)}</title>{escape(_short(name))}"
        names.append(f'<text x="{_SIDE}" y="{y + 10}"{_HALO}>{words}</text>')
        parts.append(_rect(_SIDE, y + _NAME, _WIDTH - 2 * _SIDE, _STRIP, "#f1f3f5"))
        for power, shade in _shades(histogram):
            parts.append(_rect(x(power), y + _NAME, unit, _STRIP, _INK, shade))
    for number, line in enumerate(lines):
        at, y = x(line.power), 24 + 12 * number
        parts.append(_stroke(at, y + 3, at, height - 4))
        anchor = "end" if at > _WIDTH / 2 else "start"
        parts.append(_text(at, y, line.label, anchor, _WARN))
    return _svg(height, [*parts, *names], title)


def plot_steps(
    samples: Sequence[tuple[int, Mapping[int, int]]], lines: Sequence[Line], title: str
) -> str:
    """Draw the histogram of one tensor as it changes: steps across, powers upward.

    Args:
        samples: Steps in rising order, and what was counted then; at least one.
        lines: Borders of formats.
        title: Words for a screen reader.
    """
    low, high = range_of([histogram for _, histogram in samples], lines)
    unit = _TALL / (high - low + 1)
    stride = math.ceil(len(samples) / _COLUMNS)
    sampled = samples[::stride]
    wide = (_WIDTH - _LEFT - _SIDE) / len(sampled)

    def y(power: float) -> float:
        return 6 + (high + 1 - power) * unit

    parts = [_rect(_LEFT, 6, _WIDTH - _LEFT - _SIDE, _TALL, "#f1f3f5")]
    for column, (_, histogram) in enumerate(sampled):
        for power, shade in _shades(histogram):
            x = _LEFT + column * wide
            parts.append(_rect(x, y(power + 1), wide, unit, _INK, shade))
    parts += [
        _text(_LEFT - 3, y(power) + 4, _power(power), "end")
        for power in _ticks(low, high)
    ]
    for line in lines:
        at = y(line.power)
        parts.append(_stroke(_LEFT, at, _WIDTH - _SIDE, at))
        lower = at < _TALL / 2
        label_y = at + 11 if lower else at - 4
        parts.append(_text(_WIDTH - _SIDE - 3, label_y, line.label, "end", _WARN))
    base = _TALL + 19
    parts.append(_text(_LEFT, base, f"step {sampled[0][0]:,}", "start"))
    if len(sampled) > 1:
        parts.append(_text(_WIDTH - _SIDE, base, f"{sampled[-1][0]:,}", "end"))
    return _svg(base + 5, parts, title)


def _ticks(low: int, high: int) -> Iterator[int]:
    """Yield some round powers within a range."""
    step = next(
        size for size in (1, 2, 5, 10, 20, 50, 1000) if (high - low) / size <= _TICKS
    )
    first = math.ceil((low + 1) / step) * step
    yield from range(first, high, step)


def _power(power: int) -> str:
    return f"2^{power}"


def _shades(histogram: Mapping[int, int]) -> Iterator[tuple[int, float]]:
    """Yield powers and how dark they are, 0 to 1: rare ones must still be seen."""
    most = max(histogram.values(), default=0)
    for power, count in sorted(histogram.items()):
        if count:
            yield power, 0.15 + 0.85 * math.sqrt(count / most)


def _short(name: str) -> str:
    """Return a name that fits, its middle left out."""
    if len(name) <= _LETTERS:
        return name
    half = (_LETTERS - 3) // 2
    return f"{name[:half]}...{name[-half:]}"


def _rect(
    x: float, y: float, width: float, height: float, colour: str, shade: float = 1.0
) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.2f}" height="{height:.2f}"'
    faded = f' fill-opacity="{shade:.2f}"' if shade < 1 else ""
    return f'<rect {place} fill="{colour}"{faded}/>'


def _stroke(x: float, y: float, to_x: float, to_y: float) -> str:
    place = f'x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"'
    return f'<line {place} stroke="{_WARN}" stroke-dasharray="3 2"/>'


def _text(
    x: float, y: float, words: str, anchor: str = "middle", colour: str = _SOFT
) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"'
    return f"<text {place}{_HALO}>{escape(words)}</text>"


def _svg(height: float, parts: Sequence[str], title: str) -> str:
    size = f'viewBox="0 0 {_WIDTH} {height:.0f}"'
    font = 'font-family="system-ui, sans-serif" font-size="11" fill="#1f2933"'
    inner = "".join(parts)
    return f'<svg role="img" aria-label="{escape(title)}" {size} {font}>{inner}</svg>'
