"""The docstrings: each public name has the sections that its signature asks for, and the examples run."""

import inspect
from pathlib import Path
from typing import Any, Dict, Iterator, Tuple

import pytest

import truebridge_tf1 as tb
from docstrings import check_the_example, check_the_function, check_the_summary, sections


def public() -> Iterator[Tuple[str, Any]]:
    """Yield every public function and class, and the public members of classes."""
    for name in tb.__all__:
        thing = getattr(tb, name)
        yield name, thing
        if isinstance(thing, type):
            members = ((member, value) for member, value in vars(thing).items() if not member.startswith("_"))
            yield from ((f"{name}.{member}", value) for member, value in members if hasattr(value, "__get__"))


EVERY: Dict[str, Any] = dict(public())


@pytest.mark.parametrize("name", EVERY)
def test_the_docstring_fits_the_signature(name: str) -> None:
    thing = EVERY[name]
    found = sections(thing)
    check_the_summary(found)
    if inspect.isfunction(thing):
        returned = inspect.signature(thing).return_annotation is not None
        check_the_function(thing, found, "Returns" if returned else "")
        assert "." in name or ">>> import truebridge_tf1 as tb" in found["Examples"]


@pytest.mark.parametrize("name", [name for name, thing in EVERY.items() if "Examples" in sections(thing)])
def test_the_example_runs(name: str, tf: Any, tmp_path: Path, monkeypatch: Any) -> None:
    if tf.config.experimental.list_physical_devices("GPU"):
        pytest.skip("its graphs would be built for the GPU, and are fed from the host")
    # For the socket, if no test before has made it.
    tmp_path.chmod(0o700)
    monkeypatch.setenv("TRUEBRIDGE_IPC", str(tmp_path))
    with tf.Graph().as_default():
        check_the_example(name, sections(EVERY[name])["Examples"])
