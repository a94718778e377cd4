"""A DLPack deleter that enters Paddle hangs: Paddle calls it under the mutex of its deleters.

The first tensor views memory of NumPy, the array views the tensor, and the second tensor views a part of the array. To
drop the second drops the first, which wants the mutex that its own thread holds. No other thread is needed.
"""

import faulthandler

import numpy
import paddle

first = paddle.from_dlpack(numpy.zeros(4, "float32"))
array = numpy.from_dlpack(first)
second = paddle.from_dlpack(array[1:])
del first, array

print(f"paddle {paddle.__version__}: dropping a tensor that keeps another one", flush=True)
# After 5 seconds, shows the line that hangs, and ends the process.
faulthandler.dump_traceback_later(5, exit=True)
del second
faulthandler.cancel_dump_traceback_later()
print("it returned: this version is mended")
