"""What the checks of types have to know of CuPy."""

class ndarray:
    def get(self) -> object: ...
