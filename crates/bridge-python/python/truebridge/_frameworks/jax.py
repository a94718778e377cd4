"""JAX."""

from __future__ import annotations

import os
from typing import Any

from .table import SMALL, Example, Framework, Side

_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"


def _platform(index: int | None) -> str:
    return "cpu" if index is None else "cuda"


def _made(jax: Any, array: Any, index: int | None) -> Any:
    """Return an array with its own memory, which is computed."""
    with jax.default_device(jax.local_devices(backend=_platform(index))[index or 0]):
        return jax.numpy.array(array, copy=True).block_until_ready()


def _gpus(jax: Any) -> int:
    try:
        return len(jax.local_devices(backend="cuda"))
    except RuntimeError:
        return 0


def _side(_: Any, index: int | None) -> Side:
    # The class of arrays is defined in jaxlib, which is what callers that know it by its class pass.
    import jax
    import numpy

    return Side(
        of_host=lambda array: _made(jax, array, index),
        to_host=numpy.asarray,
        capsule=lambda x: x.__dlpack__(),
        of_dlpack=jax.dlpack.from_dlpack,
        transposed=lambda x: jax.numpy.array(x.T, copy=True).block_until_ready(),
        wait=lambda: jax.effects_barrier(),
        takes_capsules=False,
    )


def _small(jax: Any, kind: str, index: int) -> Any:
    import numpy

    return _made(jax, numpy.zeros(SMALL, numpy.float32), index if kind == "cuda" else None)


def _settings(jax: Any) -> dict[str, Any]:
    return {"takes_all_memory": os.environ.get(_PREALLOCATE, "true").lower() in ("1", "true")}


FRAMEWORK = Framework(
    label="JAX",
    alias="jax",
    tensor="jax.Array",
    kind=("jaxlib._jax", "ArrayImpl"),
    install="`pip install jax`",
    example=Example("import jax.numpy as jnp", "jnp.ones(3)", "(3,)"),
    build=lambda jax: "CUDA" if _gpus(jax) else "CPU",
    devices=_gpus,
    small=_small,
    side=_side,
    settings=_settings,
    sparing={_PREALLOCATE: "false"},
    spare=f'os.environ["{_PREALLOCATE}"] = "false" before JAX is imported',
    on_gpu=lambda x: bool(x.platform() != "cpu"),
)
