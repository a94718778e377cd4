"""Draw what things cost, one picture for each area, from the newest reports in docs/results.

A table ``picture AREA`` of a page shows a picture and says where its figures are from. ``cargo xtask generate tables``
draws the pictures of these tables; with ``--check`` it names those that differ from the reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from html import escape
from typing import Any

import frameworks
from results import about, latest, link, one, report

#: Where the pictures lie, in docs/.
FOLDER = "images/cost"
#: The size of the tensors that are handed over, in MiB.
MIB = 64
OURS = "truebridge"

#: Pixels: the width, where bars begin, the longest bar, a line of text, and a bar with the space below it.
WIDTH, LEFT, LONGEST, LINE, STEP = 420, 176, 160, 20, 18
#: Light and dark: text, what is less important, bars of others, and ours.
COLOURS = {"light": ("#222", "#666", "#b0b4bd", "#3f51b5"), "dark": ("#e4e6eb", "#a4a8b3", "#666c7a", "#8c9eff")}


@dataclass(frozen=True)
class Group:
    """Bars that are to scale with one another."""

    what: str
    #: Where and when they were measured.
    source: str
    #: Who, and how much.
    bars: list[tuple[str, float]]


@dataclass(frozen=True)
class Picture:
    """The figures of an area."""

    title: str
    groups: list[Group]
    #: Writes a figure with its unit.
    said: Callable[[float], str]
    #: Links to the reports, given the way to the folder of the reports.
    reports: Callable[[str], str]
    #: The figure of the longest bar. Without it, that is the largest of each group.
    full: float | None = None


def time(nanoseconds: float) -> str:
    """Write a time."""
    units = {"s": 1e9, "ms": 1e6, "µs": 1e3, "ns": 1.0}
    unit = next(unit for unit, size in units.items() if nanoseconds >= size)
    much = nanoseconds / units[unit]
    return f"{much:.0f} {unit}" if much >= 100 else f"{much:.3g} {unit}"


def linked(*names: str) -> Callable[[str], str]:
    """Return what links to reports."""
    return lambda links: "; ".join(f"{link(links, name)}, {about(name)}" for name in dict.fromkeys(names))


def handoff() -> Picture:
    """In place from one framework to another on a GPU, streams idle."""
    labels, own = frameworks.labels(), {"torch": "torch", "cupy": "cupy", "jax": "jax.dlpack"}
    groups, names = [], []
    for path in ("torch→cupy", "cupy→torch", "torch→jax", "jax→torch", "torch→tensorflow", "tensorflow→torch"):
        name = latest("bench", path=path, streams="cross", size=MIB << 20)
        row = one(report(name)["rows"], path=path, streams="cross", size=MIB << 20)
        source, target = path.split("→")
        native = "tf.experimental.dlpack" if "tensorflow" in path else f"{own[target]}.from_dlpack"
        bars = [(OURS, row["ours"]), (native, row["native"])]
        groups.append(Group(f"{labels[source]} → {labels[target]}", about(name), bars))
        names.append(name)
    return Picture(f"Handoff of {MIB} MiB on a GPU, in place", groups, time, linked(*names))


def copies() -> Picture:
    """Strided copies on a GPU."""
    name = latest("bench_copies")
    who = {"ours": OURS, "torch": "PyTorch", "cupy": "CuPy"}
    groups = [
        Group(row["case"], about(name), [(words, row[key]) for key, words in who.items() if row[key]])
        for row in report(name)["rows"]
    ]
    title, said = "Copies on a GPU, as a part of a plain copy", linked(name)
    return Picture(title, groups, lambda part: f"{100 * part:.0f} %", said, full=1.0)


def moves() -> Picture:
    """Moves between the host and a GPU."""
    name = latest("bench_moves")
    ways = {"ours": OURS, "pinned": "one copy, pinned memory", "pageable": "PyTorch, pageable"}
    where = {"down": "to the host", "up": "to the GPU"}
    groups = [
        Group(
            f"{row['size']} {where[row['direction']]}",
            about(name),
            [(said, row[key]) for key, said in ways.items()],
        )
        for row in report(name)["rows"]
    ]
    return Picture("Moves between the host and a GPU", groups, time, linked(name))


def tickets() -> Picture:
    """Tensors of a GPU for another process: sharing and opening together."""
    name = latest("bench_processes")
    ways = {"ours": OURS, "torch": "torch.multiprocessing", "host": "memory of the host"}
    groups = [
        Group(what, about(name), [(ways[row["way"].rstrip("_")], 1e3 * (row["share"] + row["open"])) for row in rows])
        for what, rows in grouped(report(name)["rows"], "what")
    ]
    return Picture("Tensors of a GPU for another process: share and open", groups, time, linked(name))


def trees() -> Picture:
    """Many tensors in one call."""
    name = latest("bench_pieces", way="loop")
    ways = {
        "ours": "truebridge, copy",
        "prepared": "truebridge, copier",
        "unchecked": "the same, check=False",
        "one by one": "truebridge, one by one",
        "foreach": "torch._foreach_copy_",
        "select": "torch.index_select",
        "batch": "cuMemcpyBatchAsync",
        "loop": "Tensor.copy_, in a loop",
        "plain": "one plain copy",
    }
    kinds = {
        "equal": "{:,} equal pieces, {:.2g} GB",
        "of another process": "the same, of another process",
        "weights": "{:,} weights of a model, {:.2g} GB",
        "shards": "{:,} parts of a mixture of experts, cut in another way, {:.2g} GB",
        "up": "{:,} tensors to the GPU, {:.2g} GB",
        "down": "{:,} tensors to the host, {:.2g} GB",
    }
    groups = []
    for kind, rows in grouped(report(name)["rows"], "pieces"):
        found = {row["way"]: row["seconds"] * 1e9 for row in rows}
        what = kinds[kind].format(rows[0]["count"], rows[0]["nbytes"] / 1e9)
        groups.append(Group(what, about(name), [(said, found[way]) for way, said in ways.items() if way in found]))
    return Picture("Many tensors in one call", groups, time, linked(name))


def grouped(rows: Iterable[dict[str, Any]], key: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Return the rows for each value of a key, in their order."""
    rows = list(rows)
    for value in dict.fromkeys(row[key] for row in rows):
        yield value, [row for row in rows if row[key] == value]


AREAS = {made.__name__: made for made in (handoff, copies, moves, tickets, trees)}


def picture(links: str, area: str) -> str:
    """The picture of an area, and its figures as a table."""
    made = AREAS[area]()
    folder = links[: -len("results")] + FOLDER
    rows = [f"| {group.what} | {who} | {made.said(much)} |" for group in made.groups for who, much in group.bars]
    figures = "\n".join(["| what | who | figure |", "| --- | --- | --: |", *rows])
    return (
        f"![{made.title}]({folder}/{area}.svg)\n\nFrom {made.reports(links)}.\n\n"
        f"<details>\n<summary>The figures</summary>\n\n{figures}\n\n</details>"
    )


def drawn(area: str) -> str:
    """Return the picture of an area as SVG, for light and dark grounds."""
    made = AREAS[area]()
    scale = "a full bar is 100 %" if made.full else "each group of bars has its own scale"
    lines, y = [text(0, LINE, made.title, "title"), text(0, 2 * LINE, scale, "source")], 3 * LINE
    for number, group in enumerate(made.groups):
        lines.append(text(0, y + LINE, group.what, "what"))
        y += LINE + 6
        most = made.full or max(much for _, much in group.bars)
        for who, much in group.bars:
            end = max(1, round(LONGEST * much / most))
            kind = "ours" if who.startswith((OURS, "the same")) else "other"
            lines.append(text(0, y + 13, who))
            lines.append(f'<rect class="{kind}" x="{LEFT}" y="{y + 2}" width="{end}" height="{STEP - 5}"/>')
            lines.append(text(LEFT + end + 5, y + 13, made.said(much)))
            y += STEP
        if group.source not in (following.source for following in made.groups[number + 1 : number + 2]):
            y += LINE
            lines.append(text(0, y, group.source, "source"))
        y += 8
    head = f"<title>{escape(made.title)}</title>\n<style>{style()}</style>"
    size = f'viewBox="0 0 {WIDTH} {y + 4}" font-family="sans-serif" font-size="13"'
    body = "\n".join(lines)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{head}\n{body}\n</svg>\n'


def text(x: int, y: int, said: str, kind: str = "") -> str:
    """Return a line of text."""
    of = f' class="{kind}"' if kind else ""
    return f'<text{of} x="{x}" y="{y}">{escape(said)}</text>'


def style() -> str:
    """Return the colours, for both grounds."""

    def colours(scheme: str) -> str:
        plain, faint, other, ours = COLOURS[scheme]
        return f"text{{fill:{plain}}}.source{{fill:{faint}}}.other{{fill:{other}}}.ours{{fill:{ours}}}"

    sizes = ".title{font-size:16px;font-weight:bold}.what{font-weight:bold}.source{font-size:12px}"
    return f"{sizes}{colours('light')}@media(prefers-color-scheme:dark){{{colours('dark')}}}"
