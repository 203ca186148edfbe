"""Draws an SVG picture that is as wide as the page and has a fixed height. The elements form a tree; no markup is
assembled from strings.

Horizontal places are shares of the width (0 to 1), vertical places are pixels, so that text and dots keep their size on
a phone and on paper. Colours are classes of `page.css`. Text is made printable, then escaped by ElementTree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.etree import ElementTree

from markupsafe import Markup

from resihp.wrapper.output.render import literal

INNER_WIDTH = 1000
"""Width of the part with lines and areas, in its own units; this part is stretched to the width of the page."""
MARK_PATHS = {
    "cross": "M-4-4L4 4M4-4L-4 4",
    "diamond": "M0-6L6 0L0 6L-6 0Z",
    "square": "M-4.5-4.5H4.5V4.5H-4.5Z",
    "triangle": "M0-5.5L5.5 4.5H-5.5Z",
    "down": "M0 5.5L5.5-4.5H-5.5Z",
}
"""SVG paths of the marks. A mark is about 10 pixels wide, and its centre is its place."""


class Drawing:
    """A picture of `height` pixels. `title` is its description for screen readers."""

    def __init__(self, height: float, title: str) -> None:
        self._root = ElementTree.Element(
            "svg", {"class": "drawing", "width": "100%", "height": _n(height), "role": "img", "aria-label": _t(title)}
        )

    def box(self, start: float, end: float, top: float, height: float, style: str, tip: str = "") -> None:
        """Add a rectangle from `start` to `end`, at least 2 pixels wide."""
        share = max(end - start, 0.0)
        element = self._add("rect", style, tip, x=_p(start), y=_n(top), height=_n(height), width=_p(share))
        if share < 0.002:
            element.set("width", "2")

    def rule(self, top: float, style: str = "grid") -> None:
        """Add a horizontal line over the whole width."""
        self._add("line", style, x1="0", x2="100%", y1=_n(top), y2=_n(top))

    def post(self, at: float, top: float, bottom: float, style: str, tip: str = "") -> None:
        """Add a vertical line."""
        self._add("line", style, tip, x1=_p(at), x2=_p(at), y1=_n(top), y2=_n(bottom))

    def text(self, at: float, baseline: float, words: str, style: str = "label", anchor: str = "start") -> None:
        element = self._add("text", style, x=_p(at), y=_n(baseline))
        if anchor != "start":
            element.set("text-anchor", anchor)
        element.text = _t(words)

    def beside(self, baseline: float, words: str) -> None:
        """Add a text left of the picture, where the page has a margin for it."""
        self._add("text", "tick", x="-8", y=_n(baseline), **{"text-anchor": "end"}).text = _t(words)

    def mark(self, at: float, middle: float, shape: str, style: str, tip: str = "", beside: str = "") -> None:
        """Add a mark about 10 pixels wide, with the text `beside` next to it. `shape`: a key of `MARK_PATHS`."""
        # Only a nested picture can be placed at a share of the width and have coordinates in pixels.
        holder = ElementTree.SubElement(self._root, "svg", {"x": _p(at), "y": _n(middle), "class": "mark"})
        element = ElementTree.SubElement(holder, "path", {"d": MARK_PATHS[shape], "class": f"mark-{shape} {style}"})
        if tip:
            ElementTree.SubElement(element, "title").text = _t(tip)
        if beside:
            ElementTree.SubElement(holder, "text", {"class": "number", "x": "8", "y": "4"}).text = _t(beside)

    def area(self, top: float, height: float, uppers: Points, lowers: Points, style: str) -> None:
        """Add the area between two lines that have the same horizontal places. Values are shares of `height`, from
        below."""
        points = [*uppers, *reversed(lowers)]
        self._stretched(top, height, f"M{_path(points, height)}Z", style)

    def line(self, top: float, height: float, points: Points, style: str) -> None:
        """Add a line through `points`."""
        if len(points) == 1:  # a line of no length: round ends make it a dot
            self._stretched(top, height, f"M{_path(points, height)}h0.01", style)
        elif points:
            self._stretched(top, height, f"M{_path(points, height)}", style)

    def markup(self) -> Markup:
        """Return the picture as markup for a page."""
        # Safe as markup: ElementTree has escaped all text.
        return Markup(ElementTree.tostring(self._root, encoding="unicode"))

    def _stretched(self, top: float, height: float, path: str, style: str) -> None:
        frame = {
            "viewBox": f"0 0 {INNER_WIDTH} {_n(height)}",
            "preserveAspectRatio": "none",
            "width": "100%",
            "height": _n(height),
            "y": _n(top),
        }
        holder = ElementTree.SubElement(self._root, "svg", frame)
        ElementTree.SubElement(holder, "path", {"d": path, "class": style})

    def _add(self, name: str, style: str, tip: str = "", **places: str) -> ElementTree.Element:
        element = ElementTree.SubElement(self._root, name, {"class": style, **places})
        if tip:
            ElementTree.SubElement(element, "title").text = _t(tip)
        return element


Points = Sequence[tuple[float, float]]
"""(place, value) pairs, both as shares: places of the width, from the left; values of the height, from below."""


def sign(shape: str, style: str) -> Markup:
    """Return one mark as markup for running text."""
    root = ElementTree.Element(
        "svg", {"class": "sign", "width": "12", "height": "12", "viewBox": "-6 -6 12 12", "aria-hidden": "true"}
    )
    ElementTree.SubElement(root, "path", {"d": MARK_PATHS[shape], "class": f"mark-{shape} {style}"})
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def ticks(low: float, high: float, wanted: int) -> list[float]:
    """Return about `wanted` round numbers from `low` to `high`."""
    if not high > low:
        return [low]
    rough = (high - low) / max(wanted, 1)
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def time_ticks(seconds: float, wanted: int) -> list[float]:
    """Return about `wanted` round numbers of seconds from 0; for long times, half or whole minutes, hours and days."""
    steps = (30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800, 2592000)
    rough = seconds / max(wanted, 1)
    if seconds < 120:
        return ticks(0.0, seconds, wanted)
    step = next((step for step in steps if step >= rough * 0.8), steps[-1] * math.ceil(rough / steps[-1]))
    return [float(n * step) for n in range(int(seconds // step) + 1)]


def _path(points: Points, height: float) -> str:
    return "L".join(f"{_n(at * INNER_WIDTH)} {_n((1 - value) * height)}" for at, value in points)


def _n(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


def _p(share: float) -> str:
    return f"{100 * share:.2f}".rstrip("0").rstrip(".") + "%"


def _t(text: str) -> str:
    return literal(text)
