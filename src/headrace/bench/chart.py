"""A benchmark as a picture: a bar for each candidate, and the bound. Knows matplotlib, measures nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.bench.summary import Summary
from headrace.errors import InvalidSetting, MissingPackage


def require(purpose: str = "Drawing a chart") -> None:
    """Before anything is measured. Raises: MissingPackage without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise MissingPackage(package="matplotlib", purpose=purpose, extra="plot") from error
    matplotlib.use("Agg")


def save(figure: Any, file: Path, suggestion: str) -> None:
    """Write a picture; the suffix of `file` says in which format. Raises: InvalidSetting, which suggests a name."""
    try:
        figure.savefig(file, dpi=150)
    except (OSError, ValueError) as error:
        raise InvalidSetting(
            setting="--plot",
            value=f"{str(file)!r} ({error})",
            allowed="a file that can be written, whose name ends in .png, .pdf or .svg",
            suggestion=suggestion,
        ) from None


def draw(found: Summary, title: str, file: Path) -> None:
    """Write the picture to `file`; its suffix says in which format. Raises: MissingPackage, InvalidSetting."""
    require()
    from matplotlib.figure import Figure

    lines = sorted(found.lines, key=lambda line: -line.seconds_per_token)
    names = [line.name for line in lines]
    colors = ["C1" if name == "headrace" else "C0" for name in names]
    figure = Figure(figsize=(9, 1.8 + 0.45 * len(lines)), layout="constrained")
    token, first = figure.subplots(1, 2, sharey=True)
    bars = token.barh(names, [line.seconds_per_token for line in lines], color=colors)
    token.bar_label(bars, [f"{line.seconds_per_token:.3g} s ({line.ratio:.2g}x)" for line in lines], padding=3)
    token.axvline(
        found.bound_s, color="black", linestyle=":", label=f"bound: {found.bound_s:.3g} s ({found.limited_by})"
    )
    token.set_xlabel("seconds per token")
    token.margins(x=0.35)
    token.legend(fontsize="small", loc="upper right")
    bars = first.barh(names, [line.seconds_to_first_token for line in lines], color=colors)
    first.bar_label(bars, [f"{line.seconds_to_first_token:.3g} s" for line in lines], padding=3)
    first.set_xlabel("seconds to the first token, cold start")
    first.margins(x=0.2)
    figure.suptitle(title, fontsize="medium")
    save(figure, file, "bench.png")
