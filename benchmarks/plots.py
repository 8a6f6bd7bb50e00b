"""Charts of the reports. matplotlib is wanted here alone: `pip install "core-runner[bench]"`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#9c6b4e", "#a463f2", "#97bbf5", "#9498a0", "#3ca951")


def _figure(panels: int, width: float, height: float, columns: int = 3) -> tuple[Any, list[Any]]:
    """A figure and its panels, in rows of so many columns; width and height are a panel's, in inches."""
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit('--plot needs matplotlib: pip install "core-runner[bench]"') from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(columns, panels)
    rows = -(-panels // columns)
    size = (columns * width, rows * height)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    panels_drawn = list(axes.flat)[:panels]
    for axis in list(axes.flat)[panels:]:
        axis.set_axis_off()
    for axis in panels_drawn:
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_axisbelow(True)
    return figure, panels_drawn


def _save(figure: Any, path: Path, title: str) -> None:
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=150)


def barh_panels(path: Path, title: str, panels: Mapping[str, Mapping[str, float]], unit: str) -> None:
    """One panel of horizontal bars for each entry: name -> value, written at the end of its bar."""
    names = list(dict.fromkeys(name for values in panels.values() for name in values))
    figure, axes = _figure(len(panels), 4.6, 1.1 + 0.34 * len(names), columns=2)
    for position, (axis, (heading, values)) in enumerate(zip(axes, panels.items(), strict=True)):
        axis.barh(
            [names.index(name) for name in values],
            list(values.values()),
            color=[COLOURS[0] if names.index(name) == 0 else COLOURS[6] for name in values],
        )
        for name, value in values.items():
            text = f" {value:,.0f}" if value >= 100 else f" {value:.3g}"
            axis.text(value, names.index(name), text, va="center", fontsize=8)
        axis.set_title(heading, fontsize=9)
        axis.set_xlabel(unit, fontsize=9)
        axis.set_yticks(range(len(names)), names if position % 2 == 0 else [""] * len(names), fontsize=9)
        axis.set_ylim(len(names) - 0.4, -0.6)
        axis.set_xlim(0, 1.2 * (max(values.values(), default=0.0) or 1.0))
        axis.tick_params(axis="x", labelsize=8)
        axis.grid(axis="x", color="#e4e4e4")
    _save(figure, path, title)


def stacked_bars(
    path: Path,
    title: str,
    names: Sequence[str],
    parts: Mapping[str, Sequence[float]],
    unit: str,
    labels: Sequence[str] = (),
) -> None:
    """One horizontal bar for each name, made of parts in the order given. labels: at its end, not the sum."""
    figure, (axis,) = _figure(1, 9.0, 1.6 + 0.5 * len(names))
    left = [0.0] * len(names)
    for colour, (part, values) in zip(COLOURS, parts.items(), strict=False):
        axis.barh(range(len(names)), values, left=left, color=colour, label=part)
        left = [start + value for start, value in zip(left, values, strict=True)]
    for row, total in enumerate(left):
        axis.text(total, row, f" {labels[row] if labels else f'{total:.3g}'}", va="center", fontsize=8)
    axis.set_yticks(range(len(names)), names, fontsize=9)
    axis.invert_yaxis()
    axis.set_xlabel(unit, fontsize=9)
    axis.set_xlim(0, (1.3 if labels else 1.1) * max(left, default=1.0))
    axis.grid(axis="x", color="#e4e4e4")
    axis.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    _save(figure, path, title)


def line_panels(
    path: Path,
    title: str,
    xs: Sequence[float],
    panels: Mapping[str, Mapping[str, Sequence[float]]],
    x_label: str,
) -> None:
    """One panel of lines over the same x for each entry: its label -> line's name -> values."""
    figure, axes = _figure(len(panels), 3.8, 3.2)
    for axis, (label, lines) in zip(axes, panels.items(), strict=True):
        for colour, (name, values) in zip(COLOURS, lines.items(), strict=False):
            axis.plot(xs, values, color=colour, marker="o", markersize=4, label=name)
        axis.set_ylabel(label, fontsize=9)
        axis.set_xlabel(x_label, fontsize=9)
        axis.set_ylim(bottom=0)
        axis.set_xlim(left=0)
        axis.tick_params(labelsize=8)
        axis.grid(color="#e4e4e4")
        if len(lines) > 1:
            axis.legend(fontsize=8, frameon=False)
    _save(figure, path, title)
