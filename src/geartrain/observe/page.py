"""The frame of a report: sections, tables and the style of the page, light and dark.

The page forbids itself to load or to run anything (its content security policy says so).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Final, final


@final
class Html(str):
    """A cell of a table that is HTML already."""

    __slots__ = ()


def section(title: str, body: str, note: str = "") -> str:
    """A headed section; nothing at all without a body. ``body`` and ``note`` are HTML."""
    return f"<section><h2>{escape(title)}</h2>{note}{body}</section>" if body else ""


def wide(figure: str) -> str:
    """A figure over the whole width of the page."""
    return figure.replace("<figure>", "<figure class=wide>", 1)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of plain text, and of ``Html``; nothing at all without rows."""
    if not rows:
        return ""
    body = "".join(_row("td", row) for row in rows)
    return (
        f"<div class=scroll><table><thead>{_row('th', head)}</thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def page(name: str, sections: Iterable[str]) -> str:
    """The whole document. ``sections`` are HTML."""
    title = escape(name)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title} - geartrain</title><style>{_STYLE}</style></head>"
        f"<body><main><h1>{title}</h1>{''.join(sections)}</main></body></html>\n"
    )


def _row(tag: str, cells: Sequence[str]) -> str:
    shown = (cell if isinstance(cell, Html) else escape(cell) for cell in cells)
    return "<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in shown) + "</tr>"


_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1f2328; --dim: #59636e; --line: #d5d9de; --paper: #fff;
  --tile: #f5f6f8 }
.c0 { --c: #3b76af } .c1 { --c: #e0802b } .c2 { --c: #4f9a4a } .c3 { --c: #c8504f }
.c4 { --c: #8a6cb4 } .c5 { --c: #2f9c9c } .c6 { --c: #cf6fa5 } .c7 { --c: #97713f }
.c8 { --c: #b3a125 } .c9 { --c: #66747f } .cx { --c: #9aa4ad } .empty { --c: var(--line) }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7eb; --dim: #9aa4ae; --line: #363c44; --paper: #15181c; --tile: #1e2328 }
  .c0 { --c: #6ea6dc } .c1 { --c: #f0a05a } .c2 { --c: #78bf72 } .c3 { --c: #e57f7d }
  .c4 { --c: #b198d6 } .c5 { --c: #5fc2c2 } .c6 { --c: #e59cc6 } .c7 { --c: #c29a66 }
  .c8 { --c: #d6c655 } .c9 { --c: #93a1ac } .cx { --c: #5f6972 } }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif }
main { max-width: 1040px; margin: 0 auto; padding: 24px 20px 60px }
h1 { font-size: 26px; margin: 0 0 16px } h2 { font-size: 19px; margin: 36px 0 8px }
h3 { font-size: 15px; margin: 16px 0 4px } p { margin: 4px 0 10px; color: var(--dim) }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(165px, 1fr)); gap: 10px;
  margin: 0 }
.tiles div { background: var(--tile); border-radius: 8px; padding: 8px 12px }
dt { color: var(--dim); font-size: 13px } dd { margin: 0; font-weight: 600 }
.message { white-space: pre-wrap; color: var(--ink); border-left: 3px solid #c8504f;
  padding-left: 10px; margin-top: 14px }
figure { display: inline-block; vertical-align: top; width: min(100%, 510px); margin: 6px 0 }
figure.wide { width: 100% } figcaption { font-weight: 600; font-size: 14px }
svg { width: 100%; height: auto; display: block; overflow: visible }
svg text { font-size: 11.5px; fill: var(--dim) } svg .grid { stroke: var(--line) }
svg rect, svg circle { fill: var(--c) } svg .pale { opacity: .5 }
svg .curve { fill: none; stroke: var(--c); stroke-width: 1.8 } svg .faint { opacity: .4 }
.legend span { display: inline-flex; align-items: center; gap: 5px; margin-right: 16px }
.legend .key { width: 11px; height: 11px }
svg.small { height: 26px; display: inline-block; vertical-align: middle }
svg.graph { height: auto }
svg .box { fill: var(--tile); stroke: var(--dim) }
svg .box[class*=" c"] { fill: color-mix(in srgb, var(--c) 16%, var(--paper)); stroke: var(--c) }
svg .name { fill: var(--ink); font-size: 12.5px; font-weight: 600 } svg .does { font-size: 11px }
svg .edge { fill: none; stroke: var(--dim); stroke-width: 1.3 } svg .tip { fill: var(--dim) }
svg .edge.back { stroke: var(--ink); stroke-dasharray: 5 3 } svg .tip.back { fill: var(--ink) }
svg .port { paint-order: stroke; stroke: var(--paper); stroke-width: 4px; fill: var(--ink) }
.heat { padding: 1px 6px; border-radius: 4px }
details summary { cursor: pointer; color: var(--dim) }
.scroll { overflow-x: auto; margin: 8px 0 } table { border-collapse: collapse; font-size: 13.5px }
th, td { text-align: right; padding: 3px 14px 3px 0; border-bottom: 1px solid var(--line);
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere }
th { color: var(--dim); font-weight: 500; white-space: nowrap }
th:first-child, td:first-child, th:last-child, td:last-child { text-align: left }
pre { background: var(--tile); border-radius: 8px; padding: 10px 14px; overflow-x: auto;
  font-size: 12.5px }
"""
