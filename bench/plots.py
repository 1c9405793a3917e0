"""Small charts as SVG, legible on light and dark pages, equal bytes for equal numbers; for `bench/report.py`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

GREY = "#7d848c"
"""Text, axes and bases: as far from white as from GitHub's dark grey."""
COLOURS = ("#3b82f6", "#e0702c", "#2f9e6e", "#a56de2", "#d4519a")

Range = tuple[float, float, float]
"""p20, median, p80."""


@dataclass(frozen=True)
class Series:
    """One thing at several places of the x axis; `colour` is a place in COLOURS, None is grey."""

    name: str
    points: dict[str, Range]
    kind: str = "line"
    """`bar`, `line` or a marker of matplotlib's."""
    colour: int | None = None


@dataclass(frozen=True)
class Panel:
    title: str
    places: tuple[str, ...]
    """Of the x axis, from left to right."""
    series: tuple[Series, ...]
    x: str = ""
    y: str = ""
    one: bool = False
    """Whether 1 is a line of its own."""


def draw(file: Path, panels: Sequence[Sequence[Panel]], height: float = 2.5) -> None:
    """Rows of panels of `height` inches; what all of them show is named once, above. Needs matplotlib."""
    import matplotlib as mpl  # an extra, needed nowhere else

    with mpl.rc_context(_style()):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8.4, height * len(panels) + 0.4), layout="constrained")
        axes = figure.subplots(len(panels), len(panels[0]), squeeze=False)
        handles: dict[str, Any] = {}
        for row, row_axes in zip(panels, axes, strict=True):
            for panel, ax in zip(row, row_axes, strict=True):
                handles = _draw_panel(ax, panel) | handles
        columns = 120 // (8 + max(map(len, handles), default=0))
        figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=columns)
        file.parent.mkdir(parents=True, exist_ok=True)
        text = StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    file.write_text(re.sub(r"(?<!>)\n", " ", re.sub(r"\s*\n\s*", "\n", text.getvalue())))  # smaller


def _style() -> dict[str, Any]:
    names = ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color")
    return dict.fromkeys(names, GREY) | {
        "svg.hashsalt": "lorry",
        "svg.fonttype": "none",  # text stays text: small files, and the reader's own font
        "savefig.transparent": True,
        "font.size": 8,
        "font.sans-serif": ["DejaVu Sans", "Arial"],  # the first comes with matplotlib: the same layout everywhere
        "axes.titlesize": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": GREY,
        "grid.alpha": 0.25,
        "legend.frameon": False,
    }


def _draw_panel(ax: Any, panel: Panel) -> dict[str, Any]:
    """Its series by name, for the legend."""
    handles = {}
    for series in panel.series:
        colour = GREY if series.colour is None else COLOURS[series.colour]
        found = [(i, *series.points[place]) for i, place in enumerate(panel.places) if place in series.points]
        if not found:
            continue
        x, middle = [i for i, *_ in found], [m for *_, m, _ in found]
        below, above = ([m - v for _, v, m, _ in found], [v - m for *_, m, v in found])
        spread = [below, above] if any(below + above) else None
        if series.kind == "bar":
            handles[series.name] = ax.bar(x, middle, 0.62, color=colour, alpha=0.55)
            ax.errorbar(x, middle, spread, fmt="none", ecolor=colour, elinewidth=1)
        else:
            line = series.kind == "line"
            style: dict[str, Any] = {"marker": "o" if line else series.kind, "markersize": 3 if line else 6}
            style |= {"linestyle": "-" if line else "none", "linewidth": 1.4}
            handles[series.name] = ax.errorbar(x, middle, spread, color=colour, elinewidth=0.8, **style)
    if panel.one:
        ax.axhline(1, color=GREY, linewidth=0.8, linestyle=":")
    ax.set_xticks(range(len(panel.places)), panel.places)
    ax.set_xlim(-0.6, len(panel.places) - 0.4)
    ax.set_ylim(0)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    ax.grid(axis="y")
    ax.set_axisbelow(True)
    ax.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
    return handles
