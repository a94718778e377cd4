"""Build the wheel: the package, and the library in it.

The library is built with cargo, or is the file that TRUEBRIDGE_TF1_LIBRARY names. No part depends on a version of
Python, so one wheel serves all: ``py3-none-linux_x86_64``.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Tuple

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py
from setuptools.command.install import install
from wheel.bdist_wheel import bdist_wheel

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent.parent


def library() -> Path:
    """Return the file of the library."""
    named = os.environ.get("TRUEBRIDGE_TF1_LIBRARY")
    if named:
        return Path(named)
    if not (ROOT / "Cargo.toml").is_file():
        raise SystemExit("the sources of the library are missing: build in the checkout, with pip 21.3 or later")
    # Alone: in one build with other packages it would get their features.
    subprocess.check_call(["cargo", "build", "--release", "--package", "truebridge-capi"], cwd=str(ROOT))
    return ROOT / os.environ.get("CARGO_TARGET_DIR", "target") / "release" / "libbridge_capi.so"


class WithLibrary(build_py):
    """The package with the library."""

    def run(self) -> None:
        """Copy both."""
        super().run()
        shutil.copyfile(str(library()), str(Path(self.build_lib) / "truebridge_tf1" / "libtruebridge_tf1.so"))


class NotPure(Distribution):
    """A package with a library in it."""

    def has_ext_modules(self) -> bool:
        """Return that it has one."""
        return True


class BesideLibraries(install):
    """The folder of packages for one platform, which older versions use only for extension modules."""

    def finalize_options(self) -> None:
        """Choose that folder."""
        super().finalize_options()
        self.install_lib = self.install_platlib


class ForEveryPython(bdist_wheel):
    """A wheel for one platform and every Python."""

    def get_tag(self) -> Tuple[str, str, str]:
        """Return the tag of the wheel."""
        return "py3", "none", "linux_x86_64"


setup(
    name="truebridge-tf1",
    version=re.findall(r'__version__ = "(.+)"', (HERE / "truebridge_tf1" / "__init__.py").read_text())[0],
    description="GPU tensors of other frameworks in the graphs of TensorFlow 1.15, in place",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="MIT OR Apache-2.0",
    python_requires=">=3.6",
    install_requires=["numpy"],
    packages=["truebridge_tf1", "truebridge_tf1._common"],
    package_data={"truebridge_tf1": ["py.typed"]},
    distclass=NotPure,
    cmdclass={"build_py": WithLibrary, "install": BesideLibraries, "bdist_wheel": ForEveryPython},
    classifiers=["Programming Language :: Python :: 3", "Programming Language :: Rust", "Typing :: Typed"],
)
