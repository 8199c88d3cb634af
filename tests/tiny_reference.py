"""A small package in two versions, and its error reference."""

from __future__ import annotations

from pathlib import Path

from headrace.reference.build import build
from headrace.reference.database import database_path
from headrace.reference.packages import directory

FIRST = """
class Stone:
    def check(self):
        if self.stone_width % self.groove_spacing != 0:
            raise ValueError(f"the stone width {self.stone_width} does not fit the groove spacing")

    def lift(self):
        raise OverflowError("the old crane has broken down")

    def store(self, place):
        if place is None:
            raise ValueError(f"the stone cannot be stored in the place {place}")
"""
SECOND = '''
"""<script>alert(1)</script>"""
import dataclasses

class Stone:
    """What grinds.

    It turns.
    """

    def check(self):
        """Look whether the grooves fit.

        Args:
            nothing: at all

        Raises:
            ValueError: If the width is not
                a multiple of the spacing.
        """
        # The grooves would not meet.
        if self.stone_width % self.groove_spacing != 0:
            raise ValueError(f"stone_width ({self.stone_width}) must be a multiple of ({self.groove_spacing})")

    def store(self, place):
        if place is None:
            raise ValueError(f"the stone cannot be stored in this place: {place}")


@dataclasses.dataclass
class Wheel:
    diameter: int

    def __post_init__(self):
        if self.diameter < 1 or self.spokes is None:
            if self.tail > 2:
                raise TypeError("<script>alert('wheel')</script> & <b>bold</b> is no wheel")
        assert self.spokes != 7
        raise Unusual[0]("an unusual wheel")


def turn(error):
    raise RuntimeError(f"The turning ended with: {error}")


def again(error):
    raise RuntimeError(f"The turning ended with: {error}")


def flags(parser):
    parser.add_argument("--stone-width", type=int)
    parser.add_argument("--groove-spacing", "-gs", type=int)
'''
STONE = "stone_width (64) must be a multiple of (3)"


def built(folder: Path) -> Path:
    """The database of both versions, where the cache is."""
    for number, source in ((1, FIRST), (2, SECOND)):
        root = folder / f"mill-{number}"
        (root / "mill").mkdir(parents=True)
        (root / "mill" / "__init__.py").write_text(source, encoding="utf-8")
        (root / "pyproject.toml").write_text(
            f'[project]\nname = "mill"\nversion = "{number}.0"\n[project.urls]\nsource = "https://github.com/water/mill"\n'
        )
        build(directory(root, package="mill"))
    return database_path("mill")
