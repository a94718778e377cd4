"""What the checks of types have to know of TensorFlow."""

class Tensor:
    def numpy(self) -> object: ...
