"""What ``doctor`` returns."""

from __future__ import annotations

import dataclasses
import html
import json
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

__all__ = ["Finding", "Framework", "Gpu", "Matrix", "Pair", "Report"]

Method = Literal["in place", "copy", "refused"]

#: The kinds of findings. The page docs/doctor.md explains each.
FindingKind = Literal[
    "broken",
    "crash",
    "hang",
    "version",
    "untested",
    "build",
    "no_cuda",
    "driver",
    "hidden",
    "old_gpu",
    "import_order",
    "memory",
    "allocator",
    "pairs",
    "missing",
]


class Table(NamedTuple):
    """A head and rows of cells. The columns in ``numbers`` stand on the right."""

    rows: list[list[str]]
    numbers: range = range(0)

    def __str__(self) -> str:
        """Return lines of text, with a rule below the head."""
        widths = [max(map(len, column)) for column in zip(*self.rows, strict=True)]

        def line(cells: list[str]) -> str:
            padded = (
                cell.rjust(width) if index in self.numbers else cell.ljust(width)
                for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
            )
            return "  ".join(padded).rstrip()

        head, *rows = self.rows
        return "\n".join([line(head), "  ".join("-" * width for width in widths), *map(line, rows)])

    def as_html(self) -> str:
        """Return a table of HTML."""

        def line(cells: list[str], tag: str) -> str:
            sides = ("right" if index in self.numbers else "left" for index in range(len(cells)))
            made = (
                f'<{tag} style="text-align: {side}">{html.escape(cell)}</{tag}>'
                for cell, side in zip(cells, sides, strict=True)
            )
            return f"<tr>{''.join(made)}</tr>"

        head, *rows = self.rows
        body = "".join(line(row, "td") for row in rows)
        return f"<table><thead>{line(head, 'th')}</thead><tbody>{body}</tbody></table>"


class Shown:
    """What is shown as its text, and in a notebook with tables of HTML, which an export keeps."""

    def _parts(self) -> Iterator[str | Table]:
        """Yield the lines and the tables."""
        raise NotImplementedError

    def __str__(self) -> str:
        """Return the text."""
        return "\n".join(map(str, self._parts()))

    def __repr__(self) -> str:
        """Return the text."""
        return str(self)

    def _repr_html_(self) -> str:
        """Return the lines and the tables as HTML."""
        made = (part.as_html() if isinstance(part, Table) else _line(part) for part in self._parts())
        return f"<div>{''.join(made)}</div>"


def _line(text: str) -> str:
    return f'<div style="white-space: pre-wrap">{html.escape(text) or "&nbsp;"}</div>'


class Written(Shown):
    """A dataclass that can be written as JSON."""

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON holds.

        Returns
        -------
        dict
            The attributes, in dicts and tuples.
        """
        return dataclasses.asdict(self)  # type: ignore[call-overload, no-any-return]

    def as_json(self) -> str:
        """Return JSON.

        Returns
        -------
        str
            The text of ``as_dict``.
        """
        return json.dumps(self.as_dict(), indent=2)


@dataclasses.dataclass(frozen=True)
class Pair:
    """How a tensor of one framework on one device becomes one of another.

    Attributes
    ----------
    source, target : str
        Names of frameworks, as ``convert`` takes them.
    device : str
        Where the tensor is, such as ``"cpu"`` or ``"cuda:0"``.
    method : {"in place", "copy", "refused"}
        What ``convert`` would do with a compact tensor of float32 whose address 64 divides.
    reason : str or None
        Why it is copied or refused, or which tensors are in place where those of the source usually are not.
    """

    source: str
    target: str
    device: str
    method: Method
    reason: str | None


@dataclasses.dataclass(frozen=True, repr=False)
class Matrix(Written):
    """The pairs of frameworks. ``str`` makes a table of them.

    Attributes
    ----------
    pairs : tuple of Pair
        Every two frameworks, on every device of the first.
    """

    pairs: tuple[Pair, ...]

    def _parts(self) -> Iterator[str | Table]:
        """Yield a table with a row per framework and device, and the reasons."""
        if not self.pairs:
            yield "no pairs: fewer than two frameworks can be imported here"
            return
        targets = list(dict.fromkeys(pair.target for pair in self.pairs))
        reasons = list(dict.fromkeys(pair.reason for pair in self.pairs if pair.reason))
        rows: dict[tuple[str, str], dict[str, str]] = {}
        for pair in self.pairs:
            mark = f" [{reasons.index(pair.reason) + 1}]" if pair.reason else ""
            rows.setdefault((pair.source, pair.device), {})[pair.target] = pair.method + mark
        table = [["from", "on", *(f"to {target}" for target in targets)]]
        table += [[*row, *(methods.get(target, "") for target in targets)] for row, methods in rows.items()]
        yield Table(table)
        yield from (f"[{number}] {text}" for number, text in enumerate(reasons, 1))


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A device that the CUDA driver shows.

    Attributes
    ----------
    name : str
        As the driver calls it.
    memory : int
        In bytes.
    capability : tuple of int
        The major and the minor number of its compute capability.
    """

    name: str
    memory: int
    capability: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Framework:
    """A framework that is installed here.

    Attributes
    ----------
    name : str
        As ``convert`` takes it.
    version : str or None
        ``None`` where it cannot be imported.
    build : str or None
        What it was built for: ``"CPU"`` or, for example, ``"CUDA 13.0"``.
    devices : int or None
        The number of CUDA devices that it sees; ``None`` if it cannot be imported.
    allocator : str or None
        What allocates its memory on a GPU that it sees: in this process where it is imported here, else by default.
    imported : bool
        Whether the caller's process has imported it.
    """

    name: str
    version: str | None
    build: str | None
    devices: int | None
    allocator: str | None
    imported: bool


@dataclasses.dataclass(frozen=True)
class Finding:
    """A problem. ``str`` makes two lines of it.

    Attributes
    ----------
    kind : str
        What it is, in one word, such as ``"build"``. The page about ``doctor`` lists the words.
    subject : str
        What it concerns, such as a framework.
    text : str
        What was found.
    advice : str
        What to do about it.
    """

    kind: FindingKind
    subject: str
    text: str
    advice: str

    def __str__(self) -> str:
        """Return the finding as one line, and the advice as another."""
        return f"{self.subject}: {self.text}\n    {self.advice}"


@dataclasses.dataclass(frozen=True, repr=False)
class Report(Written):
    """What ``doctor`` has found. ``str`` makes a page of it.

    Attributes
    ----------
    version, python, executable : str
        Of this package, of Python, and the path of Python.
    driver : str or None
        The version of CUDA that the driver has, such as ``"13.0"``, and ``None`` without a driver.
    module : str or None
        The version of the driver's module in the kernel, such as ``"580.95.05"``.
    gpus : tuple of Gpu
        The devices that processes can use.
    frameworks : tuple of Framework
        The frameworks that are installed.
    missing : tuple of str
        The names of those that are not installed.
    matrix : Matrix
        Which pairs are in place.
    findings : tuple of Finding
        The problems that were found.
    """

    version: str
    python: str
    executable: str
    driver: str | None
    module: str | None
    gpus: tuple[Gpu, ...]
    frameworks: tuple[Framework, ...]
    missing: tuple[str, ...]
    matrix: Matrix
    findings: tuple[Finding, ...]

    def _parts(self) -> Iterator[str | Table]:
        yield f"truebridge {self.version}, Python {self.python} ({self.executable})"
        cuda = f"CUDA {self.driver}" if self.driver else "no CUDA driver"
        yield cuda + (f", kernel module {self.module}" if self.module else "")
        for index, gpu in enumerate(self.gpus):
            major, minor = gpu.capability
            yield f"  cuda:{index}  {gpu.name}, {gpu.memory / (1 << 30):.0f} GiB, compute capability {major}.{minor}"
        yield ""
        table = [["framework", "version", "built for", "CUDA devices", "allocator", "imported"]]
        table += [[_shown(value) for value in dataclasses.astuple(framework)] for framework in self.frameworks]
        yield Table(table)
        if self.missing:
            yield f"not installed: {', '.join(self.missing)}"
        yield ""
        yield from self.matrix._parts()
        yield ""
        if not self.findings:
            yield "No problem was found."
            return
        yield f"Problems ({len(self.findings)}):"
        for finding in self.findings:
            yield f"- {finding}"


def _shown(value: str | int | bool | None) -> str:
    return {True: "yes", False: "no", None: "-"}[value] if value is None or isinstance(value, bool) else str(value)


def size(nbytes: float) -> str:
    """Return a number of bytes in words."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"


def told(error: BaseException) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {error!s:.1000}".rstrip(": ")
