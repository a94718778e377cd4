"""MadeUp under test."""

# What the methods promise is documented in conformance/src/subject.rs, once.
# ruff: noqa: D102, D107
from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from truebridge_conformance.subjects import Bench, Capabilities, Observed, Spec, Subject
#% if writes
from truebridge_conformance.subjects.common import SingleStream
#% end
#% if immutable
from truebridge_conformance.subjects.common import Unwritable
#% end


def unwritten(method: str, returns: str) -> Exception:
    """Return the error of a method that is to be written. Delete this with the last of them."""
    return NotImplementedError(f"write {method} in truebridge_conformance/subjects/madeup.py: it {returns}")


#% if writes
class MadeUp(SingleStream):
#% end
#% if immutable
class MadeUp(Unwritable):
#% end
    """MadeUp, by its own public functions, and never by the bridge."""

    def __init__(self, device: str) -> None:
        import madeup

        self.madeup = madeup
        self.device = device

    def capabilities(self) -> Capabilities:
        return Capabilities(
            ("float32", "uint8"),
#% if copied
            copies=False,
#% end
#% if immutable
            writes=False,
            immutable=True,
#% end
        )

    def create(self, spec: Spec, data: bytes) -> Any:
        raise unwritten("create", "makes the tensor that spec describes, over a base buffer that holds data")

    def create_unwritten(self, spec: Spec) -> Any:
        raise RuntimeError("called only with the capability gigabytes")

    def observe(self, tensor: Any) -> Observed:
        raise unwritten("observe", "returns what the framework reports of a tensor; strides in elements")

    def read(self, tensor: Any) -> bytes:
        raise unwritten("read", "returns the elements of a tensor in row-major order")
#% if writes

    def write(self, tensor: Any, data: bytes) -> None:
        raise unwritten("write", "overwrites the elements of a tensor")
#% end

    def fill(self, tensor: Any, byte: int) -> Any:
#% if writes
        raise unwritten("fill", "sets every byte of a tensor, and returns None")
#% end
#% if immutable
        raise unwritten("fill", "returns a tensor of the same shape whose bytes are all this one")
#% end

    def allocate(self, nbytes: int) -> Any:
        raise unwritten("allocate", "returns a compact uint8 tensor, or one of another dtype with so many bytes")

    def snapshot(self, source: Any, into: Any) -> Any:
#% if writes
        raise unwritten("snapshot", "copies the elements of source into a compact tensor, and returns None")
#% end
#% if immutable
        raise unwritten("snapshot", "returns a copy of source")
#% end

    def delay(self) -> None:
#% if cuda
        raise unwritten("delay", "submits work of a few milliseconds to the current stream, without a wait")
#% end
#% if host
        pass
#% end

    def settle(self) -> int | None:
        gc.collect()
        return None

    def import_natively(self, other: Any) -> Any:
        return None


subject: Callable[[str], Subject] = MadeUp


def bench(device: str) -> Bench | None:
    """Return what the benches need: nothing, until somebody measures it."""
    return None
