"""Problems, and what to do about them, from the facts of the probes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from .. import _core
from .._frameworks.table import ALL, FOLDERS
from .report import Finding, FindingKind, Framework

Facts = dict[str, Any]

#: The oldest compute capability that the kernels for copies are compiled for.
_OLDEST = (7, 0)


def of_driver(facts: Facts) -> Iterator[Finding]:
    """Yield what the driver lacks."""
    if "ended" in facts:
        yield Finding(facts["ended"][0], "CUDA driver", f"its start {facts['ended'][1]}", "check `nvidia-smi`")
    gpus, devices, hiding = facts.get("gpus", 0), facts.get("devices", []), os.environ.get("CUDA_VISIBLE_DEVICES")
    if gpus and not facts.get("library", True):
        text = f"the kernel has {gpus} GPU{'s' * (gpus > 1)}, and libcuda.so.1 is not found: {facts['error']}"
        yield Finding(
            "driver", "CUDA driver", text, "install the NVIDIA driver, or start the container with `--gpus all`"
        )
    elif gpus and hiding is not None and not devices:
        text = f"CUDA_VISIBLE_DEVICES={hiding!r} leaves none of {gpus} GPUs: {facts.get('error') or 'it names none'}"
        yield Finding("hidden", "CUDA driver", text, "unset CUDA_VISIBLE_DEVICES, or name the GPUs to use")
    elif gpus and facts.get("error"):
        text = f"the driver does not start: {facts['error']}"
        yield Finding("driver", "CUDA driver", text, "check `nvidia-smi`, and restart after an update of the driver")
    for index, device in enumerate(devices):
        if tuple(device["capability"]) < _OLDEST:
            major, minor = device["capability"]
            text = f"compute capability {major}.{minor}: no kernel of this package runs there, and the frameworks copy"
            yield Finding(
                "old_gpu", f"cuda:{index}", text, "nothing has to be done; `plan(...).copied_by` says who copies"
            )
        if not device["pools"]:
            text = "the driver has no memory pools there: strided tensors cannot be moved from and to the device"
            yield Finding("driver", f"cuda:{index}", text, "install a driver for CUDA 11.2 or later")


def of_framework(name: str, facts: Facts, gpus: int) -> Iterator[Finding]:
    """Yield what is wrong with a framework, on a machine with this many GPUs that can be used."""
    if "ended" in facts:
        kind, text = facts["ended"]
        advice = f"run `python -c 'import {name}'`; if that fails as well, reinstall it: {ALL[name].install}"
        yield Finding(kind, name, f"its import {text}", advice)
        return
    if "error" in facts:
        yield Finding(
            "broken", name, f"it is installed and cannot be imported: {facts['error']}", _repair(name, facts["error"])
        )
        return
    refusal, found = facts.get("refusal"), list(_on_gpus(name, facts, gpus)) if gpus and ALL[name].on_gpus else []
    yield from found
    kind = refusal["kind"] if refusal else None
    # That a framework for GPUs finds none is wrong on a machine with one only. A version is refused wherever it runs.
    if refusal and (kind == "version" or not found and (gpus or kind != "missing")):
        refused: FindingKind = "version" if kind == "version" else "broken"
        advice = f"docs/limits.md names the versions that work: {ALL[name].install}"
        yield Finding(refused, name, f"version {facts['version']} is refused: {refusal['text']}", advice)


def _on_gpus(name: str, facts: Facts, gpus: int) -> Iterator[Finding]:
    build, devices = facts["build"] or "CUDA", facts["devices"]
    if not build.startswith("CUDA"):
        text = f"this build is for {build}, and the machine has {gpus} GPU{'s' * (gpus > 1)}"
        yield Finding("build", name, text, f"install a build for CUDA: {ALL[name].install}")
    elif not devices:
        text = f"it was built for {build}, and sees no device: {facts.get('cuda_error') or 'it does not say why'}"
        advice = f"install a build for a version of CUDA that the driver has: {ALL[name].install}"
        yield Finding("no_cuda", name, text, advice)
    elif (tested := ALL[name].tested) and not facts.get("profile", {}).get("private_functions", True):
        text = f"version {facts['version']} was not tested, and tensors on a GPU are refused"
        yield Finding("untested", name, text, f"{tested} names the versions that were tested: use one of them")


def _repair(name: str, error: str) -> str:
    if "cannot open shared object file" in error or "undefined symbol" in error:
        return f"a library is missing, or another version of it is found first (LD_LIBRARY_PATH): {ALL[name].install}"
    return f"reinstall it: {ALL[name].install}"


def of_settings(name: str, settings: Facts) -> Iterator[Finding]:
    """Yield what is wrong with how a framework gets memory of a GPU, on a machine with one."""
    if settings.get("takes_all_memory"):
        text = "it takes nearly the whole GPU when it first uses it, and other frameworks find no memory"
        variables = " ".join(f"{key}={value}" for key, value in ALL[name].sparing.items())
        advice = f"set {variables}, or call {ALL[name].spare} first"
        yield Finding("memory", name, text, advice)
    if (why := ALL[name].unshared.get(settings.get("allocator", ""))) is not None:
        text = f"other processes cannot open memory of the allocator {settings['allocator']}: share() copies it once"
        yield Finding("allocator", name, text, why)


def of_folder(name: str, facts: Facts) -> Iterator[Finding]:
    """Yield what is wrong with a framework in a folder that an environment variable names."""
    text = facts.get("error") or (facts["ended"][1] if "ended" in facts else None)
    if text is not None:
        advice = f"{_core.FRAMEWORKS[name]} names {FOLDERS[name].folder}"
        yield Finding("broken", name, f"it cannot be loaded: {text}", advice)


def of_none(frameworks: Sequence[Framework]) -> Iterator[Finding]:
    """Yield that there is nothing to convert between."""
    if not frameworks:
        text = f"none of {', '.join(ALL)} is installed for {sys.executable}"
        advice = (
            "install those that you use, such as `pip install torch numpy`, or run this with the Python that has them"
        )
        yield Finding("missing", "frameworks", text, advice)


def of_imports(order: Sequence[str], gpus: int) -> Iterator[Finding]:
    """Yield what is wrong with the order in which the caller has imported frameworks."""
    first = next((name for name in order if ALL[name].hides_cuda()), None)
    if not gpus or first is None:
        return
    for late in order[order.index(first) + 1 :]:
        if ALL[late].on_gpus:
            text = f"it was imported after {ALL[first].label}, which shows stubs of CUDA's libraries to later imports"
            yield Finding("import_order", late, text, f"import {late} before {first}")


def of_pairs(tried: Sequence[tuple[Sequence[str], Facts]]) -> Iterator[Finding]:
    """Yield what happens where the frameworks are imported into one process, in each order that was tried."""
    failed = [(order, facts) for order, facts in tried if "pairs" not in facts]
    for order, facts in failed:
        kind, text = facts["ended"]
        worked = next((" then ".join(good) for good, facts in tried if "pairs" in facts), None)
        what = f"importing {' then '.join(order)} into one process {text}"
        if worked is not None:
            yield Finding("import_order", "frameworks", what, f"import them in this order: {worked}")
        elif (order, facts) == failed[-1]:
            advice = "leave one of them out, or reinstall them: their libraries do not work in one process"
            yield Finding(kind if kind == "hang" else "pairs", "frameworks", what, advice)
