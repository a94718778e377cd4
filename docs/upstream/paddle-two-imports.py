"""Two tensors that Paddle imports from one address: one owner is released too early, the other never.

Paddle finds the deleter of an imported tensor by its address, and keeps one for each address. The second import
replaces the deleter of the first. The end of the first tensor then calls the deleter of the second, which is in use.
"""

import weakref

import numpy
import paddle


class Owner:
    """Keeps memory for an array."""


memory = numpy.zeros(4, "float32")
tensors = []
for name in ("first", "second"):
    owner = Owner()
    owner.__array_interface__ = memory.__array_interface__
    weakref.finalize(owner, print, f"  the owner of the {name} tensor is released").atexit = False
    tensors.append(paddle.from_dlpack(numpy.asarray(owner)))
del owner

print(f"paddle {paddle.__version__}: dropping the first tensor")
del tensors[0]
print("dropping the second tensor")
del tensors[0]
print("end of the program: an owner that is missing above has leaked")
