"""Two tensors that Paddle imports from one address: one owner is released too early, the other never.

Paddle finds the deleter of an imported tensor by its address, and keeps one for each address. The second import replaces
the deleter of the first. The end of the first tensor then calls the deleter of the second, which is still in use.
"""

import numpy
import paddle


class Owner:
    """Keeps memory for an array, and says when it is released."""

    def __init__(self, name: str, memory: numpy.ndarray) -> None:
        self.name, self.memory, self.__array_interface__ = name, memory, memory.__array_interface__

    def __del__(self) -> None:
        print(f"  the owner of the {self.name} tensor is released")


def main() -> None:
    memory = numpy.zeros(4, "float32")
    first, second = (paddle.from_dlpack(numpy.asarray(Owner(name, memory))) for name in ("first", "second"))
    print(f"paddle {paddle.__version__}: dropping the first tensor")
    del first
    print("dropping the second tensor")
    del second
    print("end of the program: an owner that is missing above has leaked")


if __name__ == "__main__":
    main()
