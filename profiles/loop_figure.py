"""The figure of `bench_loop`: time to ready by load, class, arrivals and order, as SVG text without any package."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

Cases = Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]]

COLOURS = {"two_queues": "#1b6ca8", "fifo_prefetch": "#e08e0b", "single_queue": "#b3282d"}
NAMES = {"two_queues": "two queues (FC-MAS)", "fifo_prefetch": "prefetch by arrival", "single_queue": "single queue"}
PANEL_W, PANEL_H, LEFT, TOP, GAP_X, GAP_Y = 300, 190, 70, 70, 60, 70


def write(path: str, cases: Cases, loads: Sequence[float], orders: Sequence[str]) -> None:
    """Draw mean (solid) and P99 (dashed) on a logarithmic scale; a panel for each class and kind of arrivals."""
    parts = []
    for row, kind in enumerate(("small", "large")):
        values = [
            figures[kind][name]
            for orders_of in cases.values()
            for figures in orders_of.values()
            for name in ("mean", "p99")
        ]
        low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        for column, arrivals in enumerate(("poisson", "bursty")):
            x, y = LEFT + column * (PANEL_W + GAP_X), TOP + row * (PANEL_H + GAP_Y)
            title = f"{'DRAM hits' if kind == 'small' else 'SSD restores'}, {arrivals} arrivals"
            parts += _frame(x, y, title, loads, (low, high))
            for order in orders:
                for name, dash in (("mean", ""), ("p99", ' stroke-dasharray="5 4"')):
                    points = [
                        (
                            x + _at_load(n, loads),
                            y + _at_value(cases[f"{arrivals} {load:.0%}"][order][kind][name], low, high),
                        )
                        for n, load in enumerate(loads)
                    ]
                    line = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
                    parts.append(
                        f'<polyline points="{line}" fill="none" stroke="{COLOURS[order]}" stroke-width="2"{dash}/>'
                    )
                    parts += [
                        f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{COLOURS[order]}"/>' for px, py in points
                    ]
    for number, order in enumerate(orders):
        x = LEFT + number * 190
        parts.append(f'<rect x="{x}" y="16" width="14" height="14" fill="{COLOURS[order]}"/>')
        parts.append(f'<text x="{x + 20}" y="28">{NAMES[order]}</text>')
    parts.append(f'<text x="{LEFT + 570}" y="28">solid: mean; dashed: P99</text>')
    width, height = LEFT + 2 * PANEL_W + GAP_X + 90, TOP + 2 * PANEL_H + GAP_Y + 50
    size = f'width="{width}" height="{height}" font-family="sans-serif" font-size="12"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"]))


def _frame(x: int, y: int, title: str, loads: Sequence[float], decades: tuple[int, int]) -> list[str]:
    low, high = decades
    parts = [
        f'<rect x="{x}" y="{y}" width="{PANEL_W}" height="{PANEL_H}" fill="none" stroke="#888"/>',
        f'<text x="{x}" y="{y - 8}" font-weight="bold">{title}</text>',
        f'<text x="{x + PANEL_W / 2}" y="{y + PANEL_H + 34}" text-anchor="middle">offered load</text>',
    ]
    for decade in range(low, high + 1):
        py = y + _at_value(10.0**decade, low, high)
        parts.append(f'<line x1="{x}" x2="{x + PANEL_W}" y1="{py:.1f}" y2="{py:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{x - 6}" y="{py + 4:.1f}" text-anchor="end">{10.0**decade:g} ms</text>')
    for number, load in enumerate(loads):
        px = x + _at_load(number, loads)
        parts.append(f'<text x="{px:.1f}" y="{y + PANEL_H + 16}" text-anchor="middle">{load:.0%}</text>')
    return parts


def _at_load(number: int, loads: Sequence[float]) -> float:
    return PANEL_W * (0.1 + 0.8 * number / max(1, len(loads) - 1))


def _at_value(value: float, low: int, high: int) -> float:
    return PANEL_H * (1 - (math.log10(value) - low) / max(1, high - low))
