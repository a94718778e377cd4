"""A part of a tensor, viewed as a wider dtype, begins at another address: Paddle divides the offset by the width.

The offset of a tensor counts bytes already.
"""

import paddle

memory = paddle.arange(16).astype("uint8")
part = memory[4:12]
wide = part.view("int32")
print(f"paddle {paddle.__version__}")
print("the part holds    ", part.numpy().tobytes().hex())
print("viewed as int32 it", wide.numpy().tobytes().hex(), "from offset", wide.offset, "and not", part.offset)
