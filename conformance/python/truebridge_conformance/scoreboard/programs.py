"""Programs, composed of the lines of two frameworks and of a property."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from string import Template

from truebridge_conformance.scoreboard.frameworks import (
    APART,
    CAPSULE,
    DLPACK,
    GPU,
    HOST,
    INTERFACE,
    STRIDED,
    Framework,
    rows,
)
from truebridge_conformance.scoreboard.properties import (
    COPY,
    ELSEWHERE,
    OBJECT,
    RACES,
    SHARED,
    TO_HOST,
    WRITTEN,
    Property,
)
from truebridge_conformance.scoreboard.sentences import BY_INTERFACE, Sentence

#: Who exchanges: the target by its own function, or this package.
OWN, OURS = "own", "truebridge"

#: An object that hands out one capsule again and again.
AGAIN = "class Again: __dlpack__ = lambda self, **_: c; __dlpack_device__ = lambda self: x.__dlpack_device__()"


@dataclass(frozen=True)
class Program:
    """A program, and the numbers of the lines that take the tensor, and that use what was taken."""

    text: str
    takes: frozenset[int] = frozenset()
    checks: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Cell:
    """What is judged: a property of a pair on a kind of device, with one of the two who exchange."""

    source: Framework
    target: Framework
    on: str
    by: str
    asked: Property

    @property
    def key(self) -> tuple[str, ...]:
        """What names the cell in reports."""
        return self.source.name, self.target.name, self.on, self.by, self.asked.name

    @property
    def protocol(self) -> str:
        """The protocol by which the target's own function takes the source's tensors, if there is one."""
        return next((one for one in self.target.takes if one in self.source.exports), "")

    @property
    def sentence(self) -> Sentence:
        """What the property rests on."""
        by = self.protocol if self.by == OWN else DLPACK
        sentence = self.asked.sentence
        return BY_INTERFACE.get(sentence, sentence) if by == INTERFACE else sentence

    @property
    def has_meaning(self) -> bool:
        """Whether the property can be asked of the pair at all."""
        source, target, needs = self.source, self.target, self.asked.needs
        if self.asked.special and self.asked.special not in source.special:
            return False
        if self.asked.takes == TO_HOST:
            return HOST in target.on and self.on in source.on
        if ELSEWHERE in needs:
            return self.on in source.on and target.name not in {row.name for row in rows(self.on)}
        met = {
            OBJECT: self.protocol in (DLPACK, CAPSULE) if self.by == OWN else DLPACK in source.exports,
            SHARED: bool((source.pointer and target.pointer) or source.fill or target.changes_all),
            WRITTEN: bool(target.fill),
            RACES: bool(source.wait and target.wait),
        }
        return self.on in source.on and self.on in target.on and all(met[need] for need in needs)

    def call(self) -> str:
        """Return the call that takes ``$t``: empty where the target has none for this property."""
        target, kind = self.target, self.asked.takes
        if self.by == OURS:
            plain = (target.ours_ordered if RACES in self.asked.needs else None) or target.ours
            copy, to_host = target.ours_copy, target.ours_to_host
        else:
            plain = target.takes.get(self.protocol, "")
            copy, to_host = (target.takes_copy, target.takes_to_host) if self.protocol == DLPACK else ("", "")
        return {COPY: copy, TO_HOST: to_host}.get(kind, plain) or ""

    def program(self, repeat: int) -> Program | None:
        """Return the program, with ``repeat`` rounds of a race. There is none where the target has no such call."""
        call = self.call()
        if not call:
            return None
        lines = list(self.asked.imports)
        both = sorted({row.name: row for row in (self.source, self.target)}.values(), key=lambda row: row.name in APART)
        for row in both:
            lines += [APART[row.name]] if row.name in APART and self.on == GPU and len(both) > 1 else []
            lines += row.imports
        lines += ["import truebridge as tb"] if self.by == OURS else []
        lines += [line for row in both for line in row.typed_imports if self.asked.typed]
        lines += [line for row in self._racing() for line in row.before]
        return _composed(list(dict.fromkeys(lines)), self.asked.template, self._values(call, repeat))

    def _racing(self) -> list[Framework]:
        """Return the frameworks whose statements for a race the program has."""
        if RACES not in self.asked.needs:
            return []
        template = self.asked.template
        used = {"$slow_x": self.source, "$write_i": self.source, "$slow_y": self.target}
        racing = [row for name, row in used.items() if name in template and (name != "$write_i" or not row.slow)]
        # A library without slow work is slow in each statement, and its calls name its stream.
        return racing + [row for row in (self.target,) if not row.slow]

    def _values(self, call: str, repeat: int) -> Mapping[str, str]:
        source, target = self.source, self.target
        own_capsule = self.by == OWN and self.protocol == CAPSULE

        def fill(line: str | None, tensor: str = "", value: str = "") -> str:
            return Template(line or "").substitute(t=tensor, v=value, on=self.on)

        def take(tensor: str, capsule: str) -> str:
            return Template(call).substitute(t=tensor, v=self.asked.copy, on=self.on, capsule=capsule)

        made = fill(source.made)
        shown, on_gpu = source.pointer and target.pointer, self.on == GPU
        seen = fill(target.list, "y") if source.fill else fill(source.list, "x")
        seen += "[0]" if self.asked.special in STRIDED else ""
        reused = f'f"right: the memory was reused in {{reused}} of {repeat}"' if source.pointer else '"right"'
        return {
            "made": made,
            "special": fill(source.special.get(self.asked.special, "$t"), made),
            "typed": fill(source.typed),
            "aligned": fill(source.aligned or source.full, value="1.0"),
            "ones": fill(source.full, value="1.0"),
            "twos": fill(source.full, value="2.0"),
            "take": take("x", fill(source.exports.get(CAPSULE), "x")),
            "take_again": take("Again()", "c"),
            "again": "" if own_capsule else AGAIN,
            "capsule": fill(source.exports[CAPSULE] if own_capsule else "$t.__dlpack__()", "x"),
            "list_x": fill(source.list, "x"),
            "list_y": fill(target.list, "y"),
            "shape_y": fill(target.shape, "y"),
            "dtype_y": fill(target.dtype, "y"),
            "fill_y": fill(target.fill, "y", "9"),
            # Whether it is the same memory is known by the addresses, or by a write that is seen on the other side.
            "touch": "" if shown else fill(source.fill, "x", "9") or fill(target.fill, "y", "9"),
            "same": f"{fill(source.pointer, 'x')} == {fill(target.pointer, 'y')}" if shown else f"9 in {seen}",
            "settle": "" if shown else (source if source.fill else target).wait if on_gpu else "",
            "settle_y": target.wait if on_gpu else "",
            "placed": f"assert {fill(target.placed, 'y')}" if target.placed and on_gpu else "",
            "streams": ", ".join(dict.fromkeys(row.stream for row in (source, target) if row.stream)),
            "wait": source.wait,
            "slow_x": source.slow or "",
            "slow_y": target.slow or "",
            "write_i": fill(source.write, value="i"),
            "copied": target.copied,
            "array_z": fill(target.array, "z"),
            "remember": f"at = {fill(source.pointer, 'x')}" if source.pointer else "",
            "count": f"reused += at in [{fill(source.pointer, 'n')} for n in new]" if source.pointer else "",
            "unbroken": reused,
            "repeat": str(repeat),
            "half": str(repeat // 2),
            "end": str(repeat + 2),
            "expected": self.asked.expected,
        }


def _composed(lines: list[str], template: str, values: Mapping[str, str]) -> Program:
    """Fill in a template, and put it after these lines."""
    takes: set[int] = set()
    checks: set[int] = set()
    marked = {"!": takes, "?": checks, " ": set[int]()}
    inside = True
    for row in template.strip("\n").splitlines():
        line = Template(row[2:]).substitute(values)
        if line == "with :":
            # Neither of the two has streams that a program can choose.
            inside = False
            continue
        line = line if inside else line.removeprefix("    ")
        if line.strip():
            lines.append(line)
            marked[row[0]].add(len(lines))
    return Program("\n".join(lines) + "\n", frozenset(takes), frozenset(checks))
