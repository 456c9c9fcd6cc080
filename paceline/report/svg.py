"""From matplotlib's SVG files to elements of a page that follow the page's font and its light or dark colours."""

from __future__ import annotations

import hashlib
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from xml.etree.ElementTree import Element

from markupsafe import Markup

PALETTE_CSS = """
:root { color-scheme: light dark; --page: #fafaf8; --card: #ffffff; --ink: #1d2129; --soft: #5d6570; --rule: #e2e3e0;
  --blue: #2563c9; --yellow: #d9930d; --purple: #9a4fb5; --green: #15915f; --teal: #1f8a9e; --grey: #8d949e; --pale: #cfd3d8;
  --red: #c93434; }
@media (prefers-color-scheme: dark) { :root { --page: #14171c; --card: #1c2027; --ink: #e6e8eb; --soft: #9aa3af; --rule: #2d333c;
  --blue: #6ea3f5; --yellow: #e8b54a; --purple: #c78be0; --green: #4cc38f; --teal: #4fb9cc; --grey: #7d8590; --pale: #4a515b;
  --red: #f07171; } }
"""
"""Values of the CSS variables that charts and pages refer to, in light and dark mode."""

PLACEHOLDERS = {name: f"#0000{number:02x}" for number, name in enumerate(
    ("ink", "soft", "rule", "blue", "yellow", "purple", "green", "teal", "grey", "pale", "red"), start=1)}
"""Colour that matplotlib draws with → CSS variable that replaces it, by the variable's name."""

_SVG = "http://www.w3.org/2000/svg"


def inline_svg(source: str, title: str, description: str, tooltips: dict[str, list[str]]) -> Markup:
    """Turns matplotlib's SVG file into an element for a page.

    CSS variables replace the placeholder colours, the size and the fonts become the page's, tooltips become title elements, and
    ids are removed where nothing refers to them and made unique to this drawing elsewhere.
    """
    root = ElementTree.fromstring(source)
    for element in root.iter():
        element.tag = element.tag.removeprefix(f"{{{_SVG}}}")
        element.attrib = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
    _add_tooltips(root, tooltips)
    prefix = "chart-" + hashlib.sha1(f"{title}\n{source}".encode(errors="replace")).hexdigest()[:10]
    referred = set(re.findall(r'(?:href="|url\()#([^")]+)', source))
    for element in root.iter():
        _clean(element, prefix, referred)
    _flatten(root)
    root.attrib = {"xmlns": _SVG, "viewBox": root.attrib["viewBox"], "role": "img",
                   "aria-labelledby": f"{prefix}-title {prefix}-description"}
    for place, (tag, name, text) in enumerate((("title", "title", title), ("desc", "description", description))):
        child = Element(tag, {"id": f"{prefix}-{name}"})
        child.text = text
        root.insert(place, child)
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _add_tooltips(root: Element, tooltips: dict[str, list[str]]) -> None:
    """Browsers show the title element inside of a shape when the pointer is over it."""
    for group in root.iter("g"):
        texts = tooltips.get(group.get("id", ""))
        if texts is None:
            continue
        shapes = list(group.iter("use")) or list(group.iter("path"))
        for shape, text in zip(shapes, texts, strict=True):
            shape.set("pointer-events", "all")
            ElementTree.SubElement(shape, "title").text = text


def _clean(element: Element, prefix: str, referred: set[str]) -> None:
    attributes = element.attrib
    if element.tag not in ("text", "title"):
        element.text = None
    element.tail = None
    if "id" in attributes:
        name = attributes.pop("id")
        attributes |= {"id": f"{prefix}-{name}"} if name in referred else {}
    for name in ("href", "clip-path"):
        if name in attributes:
            attributes[name] = attributes[name].replace("#", f"#{prefix}-")
    if attributes.get("transform", "").startswith("rotate(-0 "):
        del attributes["transform"]
    for name in attributes.keys() & {"d", "x", "y", "transform"}:
        attributes[name] = " ".join(re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."),
                                           attributes[name]).split())
    if "style" in attributes:
        rules = (rule for rule in attributes["style"].split("; ") if not rule.startswith("font-family"))
        attributes["style"] = re.sub(r"#[0-9a-f]{6}", _css_variable, "; ".join(rules))


def _css_variable(colour: re.Match[str]) -> str:
    [name] = [name for name, placeholder in PLACEHOLDERS.items() if placeholder == colour[0]]
    return f"var(--{name})"


def _flatten(element: Element) -> None:
    """Removes matplotlib's style sheet and metadata, and replaces groups without attributes by their content."""
    element[:] = list(_flattened(element))


def _flattened(element: Element) -> Iterable[Element]:
    for child in list(element):
        _flatten(child)
        if child.tag in ("metadata", "style") or (child.tag == "defs" and len(child) == 0):
            continue
        if child.tag == "g" and not child.attrib:
            yield from child
        else:
            yield child
