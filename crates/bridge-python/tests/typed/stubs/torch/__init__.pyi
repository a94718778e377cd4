"""What the checks of types have to know of PyTorch."""

class Tensor:
    def detach(self) -> Tensor: ...
