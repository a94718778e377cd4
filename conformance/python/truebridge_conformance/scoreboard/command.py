"""The command line: which pairs and properties, how often, and where the reports go."""

from __future__ import annotations

import argparse
import importlib.util
import platform
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

from truebridge_conformance.scoreboard import page
from truebridge_conformance.scoreboard.frameworks import FRAMEWORKS, GPU, HOST, Framework, labels
from truebridge_conformance.scoreboard.programs import OURS, OWN, Cell
from truebridge_conformance.scoreboard.properties import BY_NAME, PROPERTIES, RACES, Property
from truebridge_conformance.scoreboard.report import Report, row
from truebridge_conformance.scoreboard.run import Judged, Run
from truebridge_conformance.scoreboard.verdicts import Outcome


def main(argv: list[str]) -> int:
    """Judge the installed frameworks. Return the exit code: 2 where nothing could be judged."""
    options = _parser().parse_args(argv)
    try:
        chosen = _chosen(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.print:
        programs = [program.text for cell in chosen if (program := cell.program(options.repeat)) is not None]
        print("\n".join(programs), end="")
        return 0
    report = judge(options, chosen)
    options.report.mkdir(parents=True, exist_ok=True)
    (options.report / "scoreboard.json").write_text(report.text(), encoding="utf-8")
    (options.report / "scoreboard.md").write_text(page.whole(report), encoding="utf-8")
    print(page.summary(report), options.report / "scoreboard.md", sep="\n")
    return 0


def judge(options: argparse.Namespace, chosen: Sequence[Cell]) -> Report:
    """Run the programs: first those that check the snippets, then those that judge the pairs."""
    from truebridge.diagnostics.host import cores, date, processor, system
    from truebridge_conformance import host

    started = time.monotonic()
    folder = options.report.resolve() / "programs"
    shutil.rmtree(folder, ignore_errors=True)
    deadline = started + 60 * options.minutes if options.minutes else float("inf")
    jobs = options.jobs or cores()
    run = Run(folder, options.repeat, options.seconds, jobs=jobs, deadline=deadline)
    controls = run.judge(_controls(chosen))
    failed = {one.cell.key: one.outcome for one in controls if one.outcome.verdict != "right"}
    sound = [cell for cell in chosen if _failed(cell, failed) is None]
    judged = dict(zip(sound, run.judge(sound), strict=True))
    driver, gpus = host.driver_and_gpus()
    return Report(
        host={
            "gpus": gpus,
            "driver": driver,
            "cpu": processor(),
            "cores": cores(),
            "os": system(),
            "python": platform.python_version(),
        },
        versions={**_versions(installed()), "truebridge": _package()},
        missing=sorted(labels().keys() - _versions(installed()).keys()),
        date=date(),
        seconds=round(time.monotonic() - started, 1),
        repeat=options.repeat,
        controls=[row(one) for one in controls if one.outcome.verdict != "right"],
        rows=[row(judged.get(cell) or Judged(cell, _failed(cell, failed) or Outcome("not run"))) for cell in chosen],
    )


def cells(frameworks: Sequence[Framework], devices: Iterable[str], properties: Sequence[Property]) -> list[Cell]:
    """Return every cell that has a meaning, pair by pair."""
    return [
        cell
        for on in devices
        for source in frameworks
        for target in frameworks
        for by in (OWN, OURS)
        for one in properties
        if source.name != target.name and one.shown and on in one.on
        if (cell := Cell(source, target, on, by, one)).has_meaning
    ]


def installed() -> list[Framework]:
    """Return the rows whose modules are installed."""
    return [one for one in FRAMEWORKS if all(importlib.util.find_spec(module) for module in one.modules)]


def _controls(chosen: Sequence[Cell]) -> list[Cell]:
    """Return the cells that check the snippets which these use."""
    sides = dict.fromkeys((side, cell.on) for cell in chosen for side in (cell.source, cell.target))
    named = dict.fromkeys((one, on) for one, on in sides if on in one.on)
    every = [Cell(one, one, on, OWN, control) for one, on in named for control in PROPERTIES if not control.shown]
    races = any(RACES in cell.asked.needs for cell in chosen)
    asked = [cell for cell in every if races or RACES not in cell.asked.needs]
    return [cell for cell in asked if cell.on in cell.asked.on and cell.has_meaning]


def _failed(cell: Cell, failed: dict[tuple[str, ...], Outcome]) -> Outcome | None:
    """Return the outcome of a cell whose snippets fail on the framework's own tensors."""
    controls = ["control"] + (["control of streams"] if RACES in cell.asked.needs else [])
    for side in (cell.source, cell.target):
        for control in controls:
            found = failed.get((side.name, side.name, cell.on, OWN, control))
            if found is not None:
                said = f"the {control} of {side.label} failed: {found.verdict}: {found.text}"
                return Outcome("not run" if found.verdict == "not run" else "could not run", said)
    return None


def _chosen(options: argparse.Namespace) -> list[Cell]:
    """Return the cells that the options name.

    Raises
    ------
    ValueError
        There is no such framework, property or device, or nothing to judge.
    """
    from truebridge_conformance import host

    have = installed()
    names = {one.name for one in have}
    pairs = [tuple(pair.split(":")) for pair in options.pairs.split(",")] if options.pairs else []
    for pair in pairs:
        if len(pair) != 2 or not set(pair) <= names:
            raise ValueError(f"{':'.join(pair)} is not a pair of {', '.join(sorted(names))}: these are installed")
    properties = options.properties.split(",") if options.properties else [one.name for one in PROPERTIES]
    unknown = [name for name in properties if name not in BY_NAME]
    if unknown:
        raise ValueError(f"there is no property {unknown[0]!r}: there are {', '.join(BY_NAME)}")
    there = [HOST, GPU] if options.print or host.gpus() else [HOST]
    devices = [on for on in there if options.device in (None, on)]
    if not devices:
        raise ValueError("the driver shows no CUDA device: pass --device cpu")
    every = cells(have, devices, [BY_NAME[name] for name in properties])
    chosen = [cell for cell in every if not pairs or (cell.source.name, cell.target.name) in pairs]
    chosen = [cell for cell in chosen if not options.by or cell.by == options.by]
    if not chosen:
        raise ValueError("these options leave nothing to judge")
    return chosen


def _versions(frameworks: Sequence[Framework]) -> dict[str, str]:
    return {one.name: _version(one) for one in frameworks}


def _version(framework: Framework) -> str:
    for distribution in framework.distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def _package() -> str:
    import truebridge

    return str(truebridge.__version__)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scoreboard", description="Judge each framework's own interchange of tensors, and truebridge next to it."
    )
    parser.add_argument(
        "--device", choices=(HOST, GPU), help="judge only on this kind of device (default: what there is)"
    )
    parser.add_argument("--pairs", metavar="A:B,…", help="only these ordered pairs")
    parser.add_argument("--properties", metavar="NAME,…", help="only these properties")
    parser.add_argument("--by", choices=(OWN, OURS), help="only the frameworks' own functions, or only truebridge")
    parser.add_argument("--repeat", type=int, default=10, metavar="N", help="rounds of each race (default: 10)")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes side by side (default: one for each core)")
    parser.add_argument("--seconds", type=float, default=60, help="how long a program may take (default: 60)")
    parser.add_argument("--minutes", type=float, help="start no program after this time, and write the report")
    parser.add_argument("--print", action="store_true", help="print the programs, and run none")
    parser.add_argument(
        "--report", type=Path, default=Path("scoreboard-report"), metavar="DIR", help="where the reports go"
    )
    return parser
