"""Draw what `make demo` printed as docs/demo.svg: `make demo 2>&1 | python tools/demo_picture.py > docs/demo.svg`.

Most decode steps look alike, so only the lines that show something new are kept.
"""

import re
import sys
import textwrap
from collections.abc import Iterable
from html import escape

WIDTH, LINE, SIZE, MARGIN = 104, 18, 13, 20
COLOURS = {
    "PRE-FILL": "#7fd1b9",
    "DECODE": "#82aaff",
    "WAITING": "#ffcb6b",
    "PREEMPTED": "#ff869a",
    "FINISHED": "#c3e88d",
    "ADDED": "#9aa5b8",
    "[": "#ffffff",
}


def parts(lines: Iterable[str]) -> list[list[str]]:
    """Lines in groups: a part of a step with its sequences, or one other line."""
    groups: list[list[str]] = []
    for line in lines:
        if line.startswith("seq[") and groups:
            groups[-1].append(line)
        else:
            groups.append([line])
    return groups


def shortened(groups: list[list[str]]) -> list[str]:
    """Decode steps are kept next to an event, and where the number of a sequence's blocks changes; the rest is dots."""

    def is_dull(group: list[str]) -> bool:
        return group[0].startswith("DECODE")

    lines: list[str] = []
    for before, group, after in zip([[""], *groups], groups, [*groups[1:], [""]], strict=False):
        if not is_dull(group) or not is_dull(after) or not is_dull(before):
            lines += group
        elif lines[-1] != "...":
            lines.append("...")
    return lines


def wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, WIDTH, drop_whitespace=True) if len(line) > WIDTH else [line]


def main() -> None:
    text = [line.rstrip() for line in sys.stdin if re.match(r"(PRE-FILL|DECODE|[A-Z ]+: seq|seq\[|\[\d|[^\[\s])", line)]
    start = next(i for i, line in enumerate(text) if line.startswith("ADDED"))
    lines = ["$ make demo", *(piece for line in shortened(parts(text[start:])) for piece in wrapped(line))]
    height = len(lines) * LINE + 2 * MARGIN
    print(f'<svg xmlns="http://www.w3.org/2000/svg" width="860" height="{height}" viewBox="0 0 860 {height}">')
    print(f'<rect width="860" height="{height}" rx="8" fill="#1b2130"/>')
    print(f'<g font-family="Menlo, Consolas, DejaVu Sans Mono, monospace" font-size="{SIZE}" fill="#d5dbe6">')
    for number, line in enumerate(lines):
        colour = next((value for key, value in COLOURS.items() if line.startswith(key)), "#d5dbe6")
        y = MARGIN + number * LINE + SIZE
        print(f'<text x="{MARGIN}" y="{y}" fill="{colour}" xml:space="preserve">{escape(line)}</text>')
    print("</g>\n</svg>")


if __name__ == "__main__":
    main()
