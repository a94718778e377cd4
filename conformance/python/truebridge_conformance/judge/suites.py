"""The suites that can judge the package, and the functions in whose place it is called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from truebridge_conformance.judge.replace import (
    Replaced,
    exchanging,
    importing,
    lending,
    lending_all,
    of_another_framework,
)

#: Of each framework, the functions that take tensors of others.
FUNCTIONS: dict[str, tuple[Replaced, ...]] = {
    "torch": (
        Replaced("torch.from_dlpack", importing("torch")),
        Replaced("torch.utils.dlpack.from_dlpack", importing("torch")),
    ),
    "numpy": (Replaced("numpy.from_dlpack", importing("numpy")),),
    "cupy": (
        Replaced("cupy.from_dlpack", importing("cupy")),
        Replaced("cupy.fromDlpack", importing("cupy")),
        Replaced("cupy.asarray", importing("cupy"), when=of_another_framework("cupy")),
    ),
    "jax": (
        Replaced("jax.dlpack.from_dlpack", importing("jax")),
        Replaced("jax.numpy.from_dlpack", importing("jax")),
        Replaced("jax.numpy.array", importing("jax", by_default=True), when=of_another_framework("jax")),
    ),
    "tensorflow": (
        Replaced("tensorflow.experimental.dlpack.from_dlpack", importing("tensorflow")),
        Replaced("tensorflow.python.dlpack.dlpack.from_dlpack", importing("tensorflow")),
    ),
    "tvm_ffi": (Replaced("tvm_ffi.from_dlpack", lending),),
    "test_ndarray_ext": (Replaced("test_ndarray_ext.*", lending_all, when=exchanging("nanobind")),),
}


@dataclass(frozen=True)
class Suite:
    """A suite of tests in a checkout of the user's."""

    #: The project, for people.
    project: str
    #: What it tests, as it is imported.
    framework: str
    #: Test files below the checkout; ``file.py::name`` is one test. Those that a version lacks are left out.
    files: tuple[str, ...]
    #: The other frameworks whose functions its tests call.
    others: tuple[str, ...] = ()
    #: Modules that the tests import in addition to the framework, and what installs them; the framework, if its package
    #: has another name.
    needs: Mapping[str, str] = field(default_factory=dict)
    #: Variables of the environment, where the user has not set them.
    environment: Mapping[str, str] = field(default_factory=dict)
    #: Folders of the checkout that the tests import from.
    folders: tuple[str, ...] = ()
    #: A module that the tests import and that the checkout's CMake builds, and its folder in that build.
    extension: str = ""
    built_in: str = ""
    #: Whether it needs a CUDA device.
    gpu: bool = False

    @property
    def frameworks(self) -> tuple[str, ...]:
        """The frameworks whose functions are replaced."""
        return (self.framework, *self.others, *filter(None, [self.extension]))


SUITES: dict[str, Suite] = {
    "pytorch": Suite(
        project="pytorch/pytorch",
        framework="torch",
        files=("test/test_dlpack.py",),
        others=("numpy",),
        needs={"expecttest": "expecttest", "numpy": "numpy"},
        folders=("test",),
    ),
    "cupy": Suite(
        project="cupy/cupy",
        framework="cupy",
        files=("tests/cupy_tests/core_tests/test_dlpack.py",),
        others=("numpy",),
        needs={"cupy": "cupy-cuda13x"},
        gpu=True,
    ),
    "numpy": Suite(
        project="numpy/numpy",
        framework="numpy",
        files=("numpy/_core/tests/test_dlpack.py", "numpy/core/tests/test_dlpack.py"),
    ),
    "tensorflow": Suite(
        project="tensorflow/tensorflow",
        framework="tensorflow",
        files=("tensorflow/python/dlpack/dlpack_test.py",),
        needs={"absl": "absl-py"},
    ),
    "jax": Suite(
        project="jax-ml/jax",
        framework="jax",
        files=("tests/array_interoperability_test.py", "tests/pytorch_interoperability_test.py"),
        others=("numpy", "torch", "tensorflow", "cupy"),
        needs={"absl": "absl-py"},
        environment={
            "JAX_ENABLE_X64": "1",
            # JAX's own number is 10 of each product.
            "JAX_NUM_GENERATED_CASES": "100",
            # Leaves memory of a device for the other frameworks.
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        },
    ),
    "array-api-tests": Suite(
        project="data-apis/array-api-tests",
        framework="numpy",
        files=("array_api_tests/test_dlpack.py",),
        others=("torch", "jax", "cupy"),
        needs={"hypothesis": "hypothesis", "ndindex": "ndindex"},
        # Hypothesis has a profile for CI, without deadlines and with the same examples in every run.
        environment={"ARRAY_API_TESTS_MODULE": "numpy", "CI": "true", "JAX_ENABLE_X64": "1"},
        folders=(".",),
    ),
    "nanobind": Suite(
        project="wjakob/nanobind",
        framework="numpy",
        files=("tests/test_ndarray.py",),
        others=("torch", "cupy"),
        folders=("tests",),
        extension="test_ndarray_ext",
        built_in="tests",
    ),
    "tvm-ffi": Suite(
        project="apache/tvm-ffi",
        framework="tvm_ffi",
        files=(
            "tests/python/test_tensor.py",
            "tests/python/test_container_dlpack_conversion.py",
            "tests/python/test_dlpack_exchange_api.py::test_from_dlpack_torch",
        ),
        others=("numpy", "torch"),
        needs={"tvm_ffi": "apache-tvm-ffi"},
        folders=("tests/python",),
    ),
}
