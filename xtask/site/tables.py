"""Write the tables of the pages from the reports in docs/results and the profiles in fixtures.

A table stands between the comments ``<!-- table: NAME ARGUMENTS -->`` and ``<!-- /table -->``, so that a code host
shows it as well. ``cargo xtask generate tables`` writes every table; with ``--check`` it names the pages whose tables
are stale. A report or a row that is missing is an error.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import frameworks
import pictures
from results import DOCS, RESULTS, ROOT, about, commit, latest, link, micro, one, report, reports

sys.path.insert(0, str(ROOT / "conformance/python"))

from truebridge_conformance.scoreboard.page import body  # noqa: E402
from truebridge_conformance.scoreboard.report import Report  # noqa: E402

#: A table with its marks: the first mark, its name and arguments, and what stands before the second mark.
MARKED = re.compile(r"(<!-- table: ([\w ]+?) -->\n)(.*?)(?=<!-- /table -->)", re.S)

#: The newest report of each bench.
PROCESSES = latest("bench_processes")
PIECES = latest("bench_pieces")
STORE = latest("bench_keeper")
SESSIONS = latest("bench_sessions")
#: The runs that count what the frameworks' own method gets wrong.
ORDERS = ("2026-11-27-h100-suite/conformance", "2026-11-26-h200-tensorflow/conformance-tensorflow1")

#: What the frameworks are called, in the reports and for the reader. The tables have this order.
NAMES = frameworks.labels()
OLDER = {"tensorflow2": "tensorflow"}

#: The most files of docs/results. What was there before is in git's history.
MOST = 40
#: The size at which the paths are compared.
MIB = 64


def filled(page: Path) -> str:
    """Return the text of a page with every table as the reports have it."""
    text = page.read_text()
    if text.count("<!-- table: ") != len(MARKED.findall(text)):
        raise ValueError(f"{page} has a table without an end: write <!-- /table --> after its mark")
    links = "../" * (len(page.relative_to(DOCS).parts) - 1) + "results"

    def made(marked: re.Match[str]) -> str:
        name, *arguments = marked[2].split()
        return f"{marked[1]}\n{TABLES[name](links, *arguments)}\n\n"

    return MARKED.sub(made, text)


def main(arguments: list[str]) -> int:
    """Write the tables of all pages and the pictures, or with ``--check`` print the files that would change."""
    results = sum(path.is_file() for path in RESULTS.rglob("*"))
    if results > MOST:
        print(f"docs/results has {results} files, at most {MOST}: remove the older reports of each kind")
        return 1
    made = {page: filled(page) for page in sorted(DOCS.rglob("*.md"))}
    made |= {DOCS / pictures.FOLDER / f"{area}.svg": pictures.drawn(area) for area in pictures.AREAS}
    stale = [(page, text) for page, text in made.items() if not page.exists() or text != page.read_text()]
    for page, text in stale:
        print(page.relative_to(ROOT))
        if arguments != ["--check"]:
            page.parent.mkdir(exist_ok=True)
            page.write_text(text)
    if stale and arguments == ["--check"]:
        print("these tables and pictures are stale: run `cargo xtask generate tables`")
        return 1
    return 0


def table(head: Iterable[str], rows: Iterable[Iterable[object]], align: str = "l") -> str:
    """Return a table of Markdown. ``align`` has a letter for each column; columns without one hold numbers."""
    head = list(head)
    line = ["---" if side == "l" else "--:" for side in align.ljust(len(head), "r")]
    every = [head, line, *(list(row) for row in rows)]
    assert {len(row) for row in every} == {len(head)}, f"a row of {head} has another number of columns"
    return "\n".join(f"| {' | '.join(str(cell) for cell in row)} |" for row in every)


def sources(links: str, *names: str) -> str:
    """Return what stands under a table: where its numbers are from."""
    said = "; ".join(f"{link(links, name)}, {about(name)}" for name in names)
    return f"\n\nFrom {said}. The speed of hosts differs by a factor of two: compare times of one report."


def newest(bench: str, **wanted: object) -> dict[str, str]:
    """Return the newest reports of a bench that have such a row: that on a GPU (``cuda``), then that on the host."""
    found = {}
    for name in reports(bench):
        for row in report(name)["rows"]:
            if all(row.get(key) == value for key, value in wanted.items()):
                found[row["device"].partition(":")[0]] = name
    return {kind: found[kind] for kind in ("cuda", "cpu") if kind in found}


#: What bench_ways calls the paths, but for that in place: the bench of the handoffs ran on a quiet host.
SAID = {"host": "through the host and back", "file": "through a file", "process": "in another process"}

#: The columns of the tables of costs.
COST = (f"{MIB} MiB on a GPU", "truebridge, µs", "without it, µs", "ratio", "by")


def cost(what: str, ours: float, theirs: float | None, by: str | None) -> tuple[str, ...]:
    """Return a row of costs, of nanoseconds."""
    if theirs is None:
        return what, micro(ours), "–", "–", "there is none"
    ratio = ours / theirs
    return what, micro(ours), micro(theirs), f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.2g}", by or ""


def elsewhere(links: str, source: str, target: str) -> tuple[list[tuple[str, ...]], str]:
    """Return the costs of the paths that are not in place, and what stands under their table."""
    name = newest("bench_ways", source=source, target=target).get("cuda")
    if name is None:
        return [], ""
    rows = [row for row in report(name)["rows"] if (row["source"], row["target"], row["mib"]) == (source, target, MIB)]
    costs = [cost(SAID[row["way"]], row["ours"], row["theirs"], row["by"]) for row in rows if row["way"] in SAID]
    return costs, f" The other paths from {link(links, name)}, {about(name)}. {report(name).get('remark', '')}".rstrip()


def methods(links: str, source: str, target: str) -> str:
    """The paths from one framework to another, side by side."""
    known = {"torch": "torch.from_dlpack", "cupy": "cupy.from_dlpack", "jax": "jax.dlpack.from_dlpack"}
    native = "tf.experimental.dlpack" if "tensorflow" in (source, target) else known[target]
    path = f"{source}→{target}"
    name = latest("bench", path=path)
    rows = []
    for streams, words in (("cross", "streams idle"), ("cross, busy", "streams busy")):
        row = one(report(name)["rows"], path=path, streams=streams, size=MIB << 20)
        rows.append(cost(f"in place, {words}", row["ours"], row["native"], f"`{native}`"))
    others, said = elsewhere(links, source, target)
    return table(COST, [*rows, *others], "lrrrl") + sources(links, name) + said


def weights(links: str) -> str:
    """Copies of all weights of a model, and of very many slices."""
    rows = []
    said = {"ours": "`copy`", "prepared": "`copier`", "unchecked": "`copier`, `check=False`"}
    for pieces in ("weights", "equal"):
        found = {row["way"]: row for row in report(PIECES)["rows"] if row["pieces"] == pieces}
        theirs = found["foreach"]["seconds"] * 1e9
        of = f"{found['ours']['count']:,} tensors, {found['ours']['nbytes'] / (1 << 30):.1f} GiB"
        for way, words in said.items():
            rows.append(cost(f"{words}: {of}", found[way]["seconds"] * 1e9, theirs, "`torch._foreach_copy_`"))
    return table(("on a GPU", *COST[1:]), rows, "lrrrl") + sources(links, PIECES)


def store(links: str) -> str:
    """Weights that a store keeps, compared with loading them from a file."""
    found = {(row["what"], row["mib"]): row["milliseconds"] * 1e6 for row in report(STORE)["rows"]}
    rows = [
        cost(
            f"{mib / 1024:,.0f} GiB in 300 tensors",
            found["keeper", mib],
            found["file", mib],
            "`load`, the file in memory",
        )
        for what, mib in found
        if what == "file"
    ]
    return table(("until a process has", *COST[1:]), rows, "lrrrl") + sources(links, STORE)


def sessions(links: str) -> str:
    """A session of TensorFlow 1.15 on tensors of PyTorch, compared with feed_dict through the host."""
    rows = [
        (f"{row['mib']} MiB", micro(row["ours"]), micro(row["host"]), f"{row['faster']:,.0f}")
        for row in report(SESSIONS)["rows"]
    ]
    head = ("one run of `y = 2 * x + 1`", "in place, µs", "`feed_dict` through the host, µs", "times faster")
    return table(head, rows) + sources(links, SESSIONS)


def methods1(links: str) -> str:
    """The paths of 64 MiB from PyTorch into a session of TensorFlow 1.15, side by side."""
    row = one(report(SESSIONS)["rows"], mib=MIB)
    others, said = elsewhere(links, "torch", "tensorflow1")
    rows = [cost("a whole run, in place", row["ours"], row["host"], "`feed_dict`, through the host"), *others]
    return table(COST, rows, "lrrrl") + sources(links, SESSIONS) + said


def training(links: str) -> str:
    """A step of a PyTorch model with a layer of another framework, compared with its halves."""
    bench = "bench_training"
    tensorflow = newest(bench, framework="TensorFlow") or newest(bench, framework=None)
    found = [*tensorflow.values(), *newest(bench, framework="JAX").values()]
    return "\n\n".join(steps(name) + sources(links, name) for name in found)


def steps(name: str) -> str:
    """The steps of one report. The first ones were only of TensorFlow, and call the layer's half by its name."""
    rows = report(name)["rows"]
    framework, layer = ("TensorFlow", "tensorflow") if "tensorflow" in rows[0] else (rows[0]["framework"], "layer")
    lines = [
        (row["width"], *(micro(row[who]) for who in ("whole", "torch", layer)), f"{row['part']:.2f}") for row in rows
    ]
    head = ("width", "whole step, µs", "PyTorch's half, µs", f"{framework}'s half, µs", "part of the halves")
    return table(head, lines, "r")


def orders(links: str, source: str, target: str) -> str:
    """How often a result is wrong when the streams are busy: ours, and the frameworks' own method."""
    found: dict[str, Any] = {}
    for name in ORDERS:
        for pair in report(name)["pairs"]:
            if (known(pair["from"]), known(pair["to"])) == (source, target):
                found = {"report": name, **{row["name"]: row for row in pair["properties"]}}
    words = {"order": "read before the data was written", "release_order": "memory reused under a reader"}
    rows = [(said, *wrong(found[name])) for name, said in words.items()]
    head = ("what may go wrong", "truebridge", "the frameworks' own functions")
    return f"{table(head, rows)}\n\nFrom {link(links, found['report'])}, {about(found['report'])}."


def wrong(row: dict[str, Any]) -> tuple[str, str]:
    """Return the counts of a property that passed, which means that none was wrong."""
    if row["verdict"] != "passed":
        raise ValueError(f"{row['name']} did not pass: no count of it is known")
    native = row.get("native")
    if native is None:
        return f"0 of {row['cases']:,}", "there is none"
    refused = f", {native['refused']:,} refused" if native["refused"] else ""
    return f"0 of {row['cases']:,}", f"{native['wrong']:,}{refused} of {native['cases']:,}"


def known(name: str) -> str:
    """Return the framework of an adapter in a report, whatever its allocator."""
    name = name.partition("+")[0]
    return OLDER.get(name, name)


def handoff(links: str) -> str:
    """Every path of the bench in its newest report, at its worst size."""
    names = [name for name in reports("bench") if any(newest_of(name))]
    rows = []
    for name in names:
        for path, streams in newest_of(name):
            sizes = [row for row in report(name)["rows"] if (row["path"], row["streams"]) == (path, streams)]
            worst = max(sizes, key=lambda row: row["ratio"])
            rows.append((path, streams, micro(worst["ours"]), micro(worst["native"]), f"{worst['ratio']:.2f}"))
    head = ("path", "streams", "truebridge, µs", "native, µs", "part of native")
    return table(head, rows, "ll") + sources(links, *names)


def newest_of(name: str) -> list[tuple[str, str]]:
    """Return the paths of a report, with their streams, that no newer report has."""
    pairs = dict.fromkeys((row["path"], row["streams"]) for row in report(name)["rows"])
    return [(path, streams) for path, streams in pairs if latest("bench", path=path, streams=streams) == name]


def processes(links: str) -> str:
    """Tensors to another process."""
    words = {"ours": "truebridge", "torch": "`torch.multiprocessing`", "host": "memory of the host"}
    rows = [
        (row["what"], words[row["way"].rstrip("_")], *(f"{row[step]:,.1f}" for step in ("share", "open")))
        for row in report(PROCESSES)["rows"]
    ]
    return table(("what", "way", "share, µs", "open, µs"), rows, "ll") + sources(links, PROCESSES)


def mark(dtype: str, profile: dict[str, Any]) -> str:
    """Return whether a framework has a dtype, or has it only in another mode."""
    disabled, _ = profile.get("disabled", ((), ""))
    return "✓" if dtype in profile["dtypes"] else "✓ ¹" if dtype in disabled else "–"


def dtypes(links: str) -> str:
    """The dtypes of each framework, from the profiles that the tests compare with the installed versions."""
    kept = json.loads((ROOT / "fixtures/profiles.json").read_text())
    # A new framework has no profile before its adapter is done.
    have = {name: kept[name] for name in NAMES if name in kept}
    every = dict.fromkeys(dtype for profile in have.values() for dtype in profile["dtypes"])
    alike: dict[tuple[str, ...], list[str]] = {}
    for dtype in every:
        alike.setdefault(tuple(mark(dtype, profile) for profile in have.values()), []).append(f"`{dtype}`")
    rows = [(", ".join(names), *marks) for marks, names in alike.items()]
    alignments = {0: "any", 1: "of the element"}
    said: dict[str, tuple[str, Callable[[Any], str]]] = {
        "devices": ("devices", lambda value: ", ".join("host" if one == "cpu" else one.upper() for one in value)),
        "strides": ("strides in place", lambda value: value.replace("_", "-")),
        "alignment": ("alignment in place", lambda value: alignments.get(value, f"{value} bytes")),
        "keeps_read_only": ("keeps read-only", lambda value: "yes" if value else "no"),
    }
    rows += [(f"**{label}**", *(show(have[name][key]) for name in have)) for key, (label, show) in said.items()]
    return table(("", *(NAMES[name] for name in have)), rows, "l" * (len(have) + 1))


def pairs(links: str, device: str) -> str:
    """The cases that every pair has passed, in the report with the most cases for it."""
    best: dict[tuple[str, str], tuple[int, str]] = {}
    for name, found in conformance():
        for pair in found["pairs"]:
            passed = all(row["verdict"] != "failed" for row in pair["properties"])
            cases = sum(row["cases"] for row in pair["properties"])
            key = known(pair["from"]), known(pair["to"])
            if pair["device"].startswith(device) and passed and cases > best.get(key, (0, ""))[0]:
                best[key] = cases, name
    shown = [name for name in NAMES if any(name in key for key in best)]

    def cell(key: tuple[str, str]) -> str:
        if key not in best:
            return "–"
        cases, name = best[key]
        return f"[{cases:,}]({links}/{name}.json)"

    rows = [(f"**{NAMES[one]}**", *(cell((one, other)) for other in shown)) for one in shown]
    said = "; ".join(f"{link(links, name)}, {about(name)}" for name in sorted({name for _, name in best.values()}))
    return table(("from \\ to", *(NAMES[name] for name in shown)), rows) + f"\n\nFrom {said}."


def conformance() -> list[tuple[str, Any]]:
    """Return every report of the suite with its name."""
    return [(name, report(name)) for name in reports("conformance*")]


def runs(links: str) -> str:
    """Every run of the suite."""
    rows = []
    for name, found in reversed(conformance()):
        ran = {known(pair[side]) for pair in found["pairs"] for side in ("from", "to")}
        # Libraries that are known only by a protocol have no row, and so no other name.
        named = (
            (NAMES.get(known(one), one).split()[0], version)
            for one, version in found["host"]["versions"].items()
            if "-" not in one and known(one) in ran
        )
        versions = ", ".join(f"{one} {version}".replace(" ", "\N{NO-BREAK SPACE}") for one, version in named)
        counts = (f"{found['summary'][key]:,}" for key in ("cases", "passed", "failed"))
        folder, _, _ = name.partition("/")
        rows.append((f"{folder}, {commit(folder)}<br>{link(links, name)}", found["device"], versions, *counts))
    return table(("report", "device", "versions", "cases", "properties passed", "failed"), rows, "lll")


def versions(links: str, package: str) -> str:
    """The versions of a package with which the suite ran (``cargo xtask conformance --versions``), the newest first."""
    rows = []
    for row in reversed(json.loads((ROOT / "docs/versions.json").read_text())):
        if row["package"] != package:
            continue
        others = {"python": row["python"], **row["with"]} if package != "python" else row["with"]
        beside = ", ".join(
            f"{NAMES.get(other, 'Python').split()[0]}\N{NO-BREAK SPACE}{version}" for other, version in others.items()
        )
        result = "passed" if row["verdict"] == "passed" else f"**{row['verdict']}**: {row['reason']}"
        rows.append((row["version"], beside, result, row["date"], f"{row['pairs']}", f"{row['cases']:,}"))
    if not rows:
        raise ValueError(f"docs/versions.json has no row of {package}")
    return table(("version", "with", "result", "date", "pairs", "cases"), rows, "llll")


def scoreboard(links: str) -> str:
    """The newest run of the scoreboard, and of those with a GPU where there are any."""
    found = {path: Report.read(path) for path in sorted(RESULTS.glob("*/scoreboard.json"))}
    newest = max(found, key=lambda path: (bool(found[path].host["gpus"]), path))
    name = newest.relative_to(RESULTS)
    raw = f"The raw data: [scoreboard.json]({links}/{name}), commit {commit(name.parts[0])}."
    return f"{body(found[newest])}\n\n{raw}"


TABLES: dict[str, Callable[..., str]] = {
    made.__name__: made
    for made in (
        methods,
        methods1,
        weights,
        store,
        training,
        sessions,
        orders,
        handoff,
        processes,
        pictures.picture,
        dtypes,
        pairs,
        runs,
        versions,
        scoreboard,
    )
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
