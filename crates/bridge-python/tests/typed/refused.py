"""What a type checker has to refuse: each line that is marked, and no other."""

import numpy as np

import truebridge as tb

x = np.zeros(3)
tb.to_torch(x, copies=True)  # refused
tb.to_torch(x, copy="yes")  # refused
tb.to_numpy(x, order="A")  # refused
tb.convert(x, "mxnet")  # refused
tb.convert(x)  # refused
tb.plan(x, 3)  # refused
tb.copy(x)  # refused
tb.copy(x, out=x, dtype="int32")  # refused
tb.to_torch(x).no_such_method()  # refused
tb.convert_tf_to_pytorch(x)  # refused
tb.convert_numpy_to_pytorch(x, to="cuda")  # refused
tb.load("x.npz")  # refused
tb.load("x.npz", "mxnet")  # refused
tb.doctor(timeout="long")  # refused
tb.doctor().findings.append(None)  # refused
tb.share(x, writing="all")  # refused
tb.open("text")  # refused
tb.processes.configure(users=1000)  # refused
tb.tensorflow.v1.Session(b"", ["x:0"], "y:0")  # refused
try:
    tb.to_torch(x)
except tb.BridgeError as error:
    if error.kind == "copyneeded":  # refused
        pass
