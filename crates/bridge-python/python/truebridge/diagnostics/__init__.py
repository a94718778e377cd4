"""What this package can do here, what it costs, and what it does: ``doctor``, ``bench``, ``trace`` and ``debug``."""

import importlib
from typing import TYPE_CHECKING

__all__ = ["bench", "debug", "doctor", "trace"]

if TYPE_CHECKING:
    from . import bench, debug, doctor, trace
else:

    def __getattr__(name: str) -> object:
        """Import the module at its first use."""
        if name in __all__:
            return importlib.import_module(f".{name}", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)

    def __dir__() -> list[str]:
        return [*__all__]
