"""What the checks of types have to know of PyTorch."""

from . import nn as nn

class Tensor:
    def detach(self) -> Tensor: ...
