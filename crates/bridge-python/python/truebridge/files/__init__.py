"""Tensors in files: ``.npy``, ``.npz`` and ``.safetensors``, for tensors of every framework and device.

The files are those of NumPy and of safetensors, and other programs open them.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import os
import secrets
import stat
from typing import TYPE_CHECKING, Any

from .. import _core
from ..diagnostics.progress import Meter, Progress, metered
from ..diagnostics.report import size
from ..errors import BridgeError, of_kind
from ..processes.trees import SAVED, flattened, least, tree_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .._core import Device, Target
    from ..processes.client import Client

__all__ = ["load", "save"]


#: The bytes of the tensors that are converted at once: a step of the progress.
_STEP = 64 << 20


def save(path: str | os.PathLike[str], x: Any, *, progress: Progress = None) -> None:
    """Save a tensor, or a tree of tensors, of any framework and device.

    The file is written next to ``path`` and then renamed. An error leaves the previous file unchanged, and tensors that
    were loaded from that file remain valid. Tensors of a GPU are moved to the host first.

    Parameters
    ----------
    path : str or path
        The suffix names the format. ``.npy`` holds one tensor. ``.npz`` and ``.safetensors`` hold a tensor by itself,
        or dicts, lists and tuples of tensors, numbers, strings and ``None``, as ``share`` takes them. What describes
        such a tree may have 16 MiB.
    x : tensor or tree
        A dict of tensors is saved under its keys. In other trees a tensor is named by its path, such as
        ``layers.0.weight``, and a description of the tree is saved next to them. A tensor that occurs in the tree twice
        is saved twice.
    progress : bool or function, optional
        Whether a line on standard error shows how far the call is. The default shows it on a terminal, after a second.
        A function is called with the bytes that are written and the total. Moves from a GPU come before the first byte.

    Raises
    ------
    BridgeError
        ``argument`` for a suffix, a name or a number that no format has, ``not_a_tensor``, ``dtype`` for one that the
        format does not have (NumPy's have no bfloat16 and no float8, safetensors no complex128), ``requires_grad``,
        ``file`` where a directory, a pipe or a device is at ``path``, and ``missing`` where NumPy or safetensors is not
        installed.
    OSError
        If the file cannot be written.

    Examples
    --------
    >>> import torch
    >>> import truebridge as tb
    >>> tb.save("model.safetensors", {"weight": torch.ones(2, 3), "bias": torch.zeros(3)})
    """
    path, suffix = _place(path)
    write, _ = _format(os.path.basename(path), suffix, {})
    # A dict of tensors is not described.
    for item in x.values() if isinstance(x, dict) else [x]:
        _check(sum(least(item)))
    leaves, text = flattened(x)
    names = list(_names(text))
    description = None if _plain(text) else json.dumps({"tree": text, "names": names})
    _check(len(description or ""))
    arrays = {name: _on_the_host(name, leaf) for name, leaf in zip(names, leaves, strict=True)}
    with replaced(path) as beside, metered(progress, f"save {os.path.basename(path)}", size) as meter:
        meter.expect(sum(getattr(array, "nbytes", 0) for array in arrays.values()))
        write(beside, arrays, description, meter)


def load(
    path: str | os.PathLike[str],
    target: Target,
    *,
    device: Device | None = None,
    copy: bool | None = None,
    max_nbytes: int | None = None,
    progress: Progress = None,
    into: Client | None = None,
) -> Any:
    """Load the tensors of a file as tensors of a framework.

    The file is mapped, not read: on the host, tensors of NumPy and PyTorch are in place in the mapping, which is
    private, so that writes to them do not reach the file. Its pages are read when they are first used. A tensor for a
    GPU goes from the mapping to the device through pinned staging. A tensor that is compressed, unaligned, or in a
    layout that the target does not take is copied. Do not shorten a file that is in use: a process that reads beyond
    its end is killed.

    Parameters
    ----------
    path : str or path
        A file of NumPy (``.npy``, ``.npz``) or safetensors (``.safetensors``), written by ``save`` or by others.
    target : Target
        The name of a framework.
    device : str or device, optional
        Where the tensors must be, such as ``"cuda:0"``. The default is the host.
    copy : bool, optional
        As for ``convert``. With ``True`` the tensors do not need the file.
    max_nbytes : int, optional
        The most bytes that all tensors may have together. The default is no limit for mapped tensors, and the memory of
        the machine for compressed or unaligned ones.
    progress : bool or function, optional
        As for ``save``, with the bytes that are converted. Those of a compressed tensor count twice, because they are
        decompressed first.
    into : Client, optional
        A connection to a store: the tensors are made by its ``empty``, so its ``put`` hands them over without a copy.
        The target is a framework whose tensors can be written: not JAX or TensorFlow. ``copy`` has no meaning then.

    Returns
    -------
    tensor or tree
        The saved tensors. For a file of another program: a tensor for ``.npy``, otherwise a dict of tensors by name.
        Elements of less than a byte, such as ``F4`` of safetensors, are loaded as their bytes, ``uint8``.

    Raises
    ------
    BridgeError
        ``file`` for what is truncated, malformed, too large or pickled, ``dtype`` for another byte order or a dtype
        without a counterpart, ``missing`` where a package is, ``out_of_memory``, and what ``convert`` raises. Nothing
        is decompressed or allocated for tensors before all sizes have been checked.
    OSError
        If the file cannot be opened.

    Warns
    -----
    BridgeWarning
        For tensors that are loaded as their bytes.

    Examples
    --------
    >>> import numpy as np
    >>> import truebridge as tb
    >>> tb.save("layer.npz", {"bias": np.zeros(3, np.float32), "step": 7})
    >>> tb.load("layer.npz", "torch")
    {'bias': tensor([0., 0., 0.]), 'step': 7}
    """
    path, suffix = _place(path)
    _, read = _format(os.path.basename(path), suffix, _OTHERS)
    if max_nbytes is not None and (isinstance(max_nbytes, bool) or not isinstance(max_nbytes, int) or max_nbytes < 0):
        raise of_kind("argument", f"max_nbytes must be a number of bytes, not {max_nbytes!r:.80}")
    _core.profile(target)
    if into is not None and not hasattr(into, "empty"):
        raise of_kind("argument", f"into must be a connection to a store, as connect returns it, not {into!r:.80}")
    with metered(progress, f"load {os.path.basename(path)}", size) as meter:
        arrays, described = read(path, max_nbytes, meter)
        if described is not None:
            with _fits(path):
                text, names = described["tree"], list(described["names"])
                if arrays.keys() != set(names):
                    raise LookupError(names)
        if into is None:
            loaded = _converted(arrays, target, device, copy, meter)
        else:
            loaded = _filled(arrays, into.empty(arrays, target, device="cpu" if device is None else device), meter)
    if described is None:
        return loaded
    with _fits(path):
        tensors = [loaded[name] for name in names]
        tree = tree_of(text, tensors)
        # Each tensor stands in it once, in the order of the names, as in what save() writes.
        if list(map(id, flattened(tree)[0])) != list(map(id, tensors)):
            raise LookupError(text)
    return tree


def _converted(arrays: Any, target: Target, device: Device | None, copy: bool | None, meter: Meter) -> Any:
    """Convert an array, or a dict of arrays in steps."""
    if not isinstance(arrays, dict):
        loaded = _core.convert_inside(arrays, target, device=device, copy=copy, progress=False)
        meter.step(arrays.nbytes)
        return loaded
    loaded = {}
    for group in _groups(arrays):
        loaded |= _core.convert_inside(group, target, device=device, copy=copy, progress=False)
        meter.step(sum(array.nbytes for array in group.values()))
    return loaded


def _filled(arrays: Any, out: Any, meter: Meter) -> Any:
    """Copy an array, or a dict of arrays in steps, into tensors."""
    if not isinstance(arrays, dict):
        _core.copy(arrays, out=out, progress=False)
        meter.step(arrays.nbytes)
        return out
    for group in _groups(arrays):
        _core.copy(group, out={name: out[name] for name in group}, progress=False)
        meter.step(sum(array.nbytes for array in group.values()))
    return out


def _groups(arrays: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the arrays of each step, and of a dict without arrays itself: arguments are checked with it."""
    group, nbytes = {}, 0
    for name, array in arrays.items():
        group[name] = array
        nbytes += array.nbytes
        if nbytes >= _STEP:
            yield group
            group, nbytes = {}, 0
    if group or not arrays:
        yield group


def _on_the_host(name: str, x: Any) -> Any:
    try:
        array = _core.convert_inside(x, "numpy", device="cpu", progress=False)
    except BridgeError as error:
        raise of_kind(error.kind, f"{name}: {error}") from error
    if not hasattr(array, "dtype"):
        # It is a container, converted whole.
        text = f"{name}: {type(x).__name__} is not a tensor: save a dict, a list or a tuple of those in it"
        raise of_kind("not_a_tensor", text)
    return array


@contextlib.contextmanager
def _fits(path: str) -> Iterator[None]:
    try:
        yield
    except (BridgeError, LookupError, TypeError, ValueError) as error:
        raise of_kind("file", f"{path}: the description of the tree does not fit the tensors") from error


_FIRST = "the path comes first, save(path, x) and load(path, target)"

#: Files of other programs, by suffix, and how to read them.
_OTHERS = {
    **dict.fromkeys((".pt", ".pth", ".bin"), "read it with torch.load(path, weights_only=True), then convert"),
    **dict.fromkeys((".h5", ".keras"), "read it with keras.models.load_model, then convert model.get_weights()"),
    ".gz": "decompress it first",
}


def _place(path: str | os.PathLike[str]) -> tuple[str, str]:
    """Return the path of the file itself, where ``path`` may be a link, and the suffix."""
    try:
        text = os.path.realpath(os.fsdecode(path))
    except (TypeError, ValueError) as error:
        what = f"path is a {type(path).__name__}; expected a str or a pathlib.Path"
        raise of_kind("argument", f"{what}: {_FIRST}") from error
    if not os.fsdecode(path):
        raise of_kind("argument", f"the path is empty: {_FIRST}")
    return text, os.path.splitext(os.fsdecode(path))[1].lower()


def _format(name: str, suffix: str, others: Mapping[str, str]) -> Any:
    """Return the functions that write and read files with this suffix. ``others`` has advice for other suffixes."""
    try:
        known = importlib.import_module(".formats", __package__).FORMATS
    except ImportError as error:
        raise of_kind("missing", "files are read and written by NumPy: pip install numpy") from error
    if suffix not in known:
        text = f"the path ends with {suffix!r:.80}" if suffix else f"the path {name!r:.80} has no suffix"
        advice = _FIRST if name in _core.FRAMEWORKS else others.get(suffix, f"it must end with {', '.join(known)}")
        raise of_kind("argument", f"{text}: {advice}")
    return known[suffix]


def _plain(text: str | None) -> bool:
    """Whether a tree needs no description: a dict of tensors."""
    kind, items = _described(text)
    return kind == "d" and all(isinstance(key, str) and item[0] == "x" for key, item in items)


def _names(text: str | None) -> Iterator[str]:
    """Yield a name for each tensor of a tree, in their order."""
    taken: set[str] = set()
    for number, path in enumerate(_paths(_described(text), ())):
        name = ".".join(path) if path else "tensor"
        while name in taken:
            name = f"{name}#{number}"
        taken.add(name)
        yield name


def _check(nbytes: int) -> None:
    """Refuse what takes too many bytes to describe, before anything is made of it."""
    if nbytes > SAVED:
        what = f"what describes this tree has more than {SAVED} bytes"
        raise of_kind("argument", f"{what}: save it in parts, and long lists of numbers as tensors")


def _described(text: str | None) -> Any:
    return ["x", 0] if text is None else json.loads(text)


def _paths(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    kind, value = tree
    if kind == "x":
        yield path
    elif kind in "lt":
        for index, item in enumerate(value):
            yield from _paths(item, (*path, str(index)))
    elif kind == "d":
        for key, item in value:
            yield from _paths(item, (*path, str(key)))


@contextlib.contextmanager
def replaced(path: str) -> Iterator[str]:
    """Give the path of a file next to ``path`` to write to, which then replaces ``path``.

    It has the mode of the file that was there, or that of any new file. After an error it is removed. Anything else
    than a file, such as a directory, a pipe or a device, keeps its place.
    """
    mode = None
    with contextlib.suppress(FileNotFoundError):
        mode = os.stat(path).st_mode
    if mode is not None and not stat.S_ISREG(mode):
        raise of_kind("file", f"{path} is not a regular file: pass the path of one, or of none")
    # Its name is short, so that it fits wherever that of the file does.
    beside = os.path.join(os.path.dirname(path), f".{secrets.token_hex(8)}.part")
    try:
        # Ctrl-C may come as soon as the file is there.
        with open(beside, "xb") as file:
            mode = mode or os.fstat(file.fileno()).st_mode
        yield beside
        os.chmod(beside, stat.S_IMODE(mode))
        os.replace(beside, path)
    except OSError as error:
        if error.errno is None:
            # It is not the system's: a signal handler may raise TimeoutError.
            raise
        folder = os.path.dirname(path)
        if not os.path.isdir(folder):
            text = f"there is no folder {folder}: make it first, or name another"
            raise FileNotFoundError(errno.ENOENT, text, path) from error
        # The caller knows of one path.
        error.filename = path
        del error.filename2
        raise
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(beside)
