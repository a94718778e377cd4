"""Random graphs with state, whose results are compared with those of TensorFlow's own session.

For TensorFlow 2.x with ``truebridge``, and for 1.15 with ``truebridge_tf1`` (so it is Python 3.7). For many:
``python random_graphs.py 1000 SEED``, and with TensorFlow 2.x on a GPU ``… cuda``, where CuPy's arrays are fed.
"""

# ruff: noqa: B905, UP006, UP031, UP035

import random
import sys
from contextlib import ExitStack
from typing import Any, Callable, Dict, List

import numpy as np

COUNT = 8

#: Operations on a vector. Most of them share its memory.
OPERATIONS = {
    "identity": lambda tf, x: tf.identity(x),
    "reshape": lambda tf, x: tf.reshape(tf.reshape(x, [2, -1]), [COUNT]),
    "expand": lambda tf, x: tf.squeeze(tf.expand_dims(x, 1)),
    "bitcast": lambda tf, x: tf.bitcast(tf.bitcast(x, tf.int32), tf.float32),
    "branch": lambda tf, x: tf.cond(tf.reduce_sum(x) < 1e9, lambda: tf.identity(x), lambda: x + 1),
    "gradient": lambda tf, x: tf.stop_gradient(x),
    "one": lambda tf, x: tf.add_n([x]),
    # No negation: the optimiser of 2.21 makes -v of -reshape(-v).
    "double": lambda tf, x: 2 * x,
    "more": lambda tf, x: x + 3,
}

#: Those that end a chain: a part of the vector.
PARTS = {
    "slice": lambda tf, x: tf.reshape(x, [4, 2])[0:4],
    "first": lambda tf, x: tf.split(x, 2)[0],
    "second": lambda tf, x: tf.split(x, 2)[1],
    "row": lambda tf, x: tf.unstack(tf.reshape(x, [2, 4]))[1],
}


class Case:
    """One graph: variables of both kinds, a queue, a constant, what is fed; chains of operations on them; and steps."""

    def __init__(self, tf: Any, bridge: Any, taken: Callable[[Any], Any], seed: int, cuda: bool = False) -> None:
        """Build it. ``taken`` takes a handle as an array of NumPy, or of CuPy."""
        self.tf, self.bridge, self.taken, self.random, self.cuda = tf, bridge, taken, random.Random(seed), cuda
        self.v1 = tf.compat.v1
        self.graph = tf.Graph()
        device = "/device:GPU:0" if cuda else "/device:CPU:0"
        with self.graph.as_default(), tf.device(device), self.v1.variable_scope("s", use_resource=False):
            self.build()

    def build(self) -> None:
        tf, choose = self.tf, self.random
        get, start = self.v1.get_variable, np.arange(COUNT, dtype=np.float32)
        kinds = [choose.random() < 0.7 for _ in range(choose.randint(1, 3))]
        variables = [get("v%d" % i, initializer=start + i, use_resource=not ref) for i, ref in enumerate(kinds)]
        self.x = self.bridge.external_input(tf.float32, [COUNT])
        self.plain = self.v1.placeholder(tf.float32, [COUNT])
        # What is fed: in place to the bridge, and as NumPy's to TensorFlow's own session.
        self.steps: List[Dict[bool, Any]] = []
        for variable in variables:
            for how in (self.v1.assign, self.v1.assign_add, self.v1.assign_sub):
                given = choose.choice(["x", "constant"])
                step = {
                    ours: how(
                        variable, (x + 1 if how is self.v1.assign else x) if given == "x" else tf.ones([COUNT])
                    ).op
                    for ours, x in ((True, self.x), (False, self.plain))
                }
                self.steps.append(step)
        sources = [variable.read_value() for variable in variables] + [tf.constant(start, name="constant")]
        sources += [variable._ref() for variable, ref in zip(variables, kinds) if ref]
        self.outputs: List[Dict[bool, Any]] = []
        chosen = [choose.randrange(len(sources) + 1) for _ in range(choose.randint(1, 4))]
        for source in chosen:
            chain = [choose.choice(sorted(OPERATIONS)) for _ in range(choose.randint(0, 3))]
            chain += choose.sample(sorted(PARTS), choose.randint(0, 1))
            pair = {}
            for ours, x in ((True, self.x), (False, self.plain)):
                y = x if source == len(sources) else sources[source]
                for name in chain:
                    y = {**OPERATIONS, **PARTS}[name](tf, y)
                pair[ours] = y
            self.outputs.append(pair)
        for pair in self.outputs:
            pair[True] = self.bridge.external_output(pair[True])

    def check(self) -> int:
        """Run it in two sessions, and return how many results were compared."""
        choose, results, kept = self.random, [], []
        hidden, choice = {"GPU": 0}, {"inter_op_parallelism_threads": 1, "allow_soft_placement": True}
        configs = [self.v1.ConfigProto(device_count=count, **choice) for count in (hidden, {} if self.cuda else hidden)]
        with self.graph.as_default():
            initialise = self.v1.global_variables_initializer()
        with ExitStack() as opened:
            own, ours = (opened.enter_context(self.v1.Session(graph=self.graph, config=one)) for one in configs)
            own.run(initialise)
            ours.run(initialise)
            memory, settle = self.memory()
            unclaimed: List[Any] = []
            for _ in range(choose.randint(3, 6)):
                memory[:] = choose.randrange(100)
                fed = self.bridge.feed(memory, copy=False)
                given = {self.bridge.handle_of(self.x): fed}, {self.plain: memory.get() if self.cuda else memory.copy()}
                if choose.random() < 0.6:
                    step = choose.choice(self.steps)
                    ours.run(step[True], given[0])
                    own.run(step[False], given[1])
                handles = ours.run([pair[True] for pair in self.outputs], given[0])
                expected = [np.array(y) for y in own.run([pair[False] for pair in self.outputs], given[1])]
                unclaimed += list(zip(handles, expected))
                # Some are taken after later runs.
                while unclaimed and choose.random() < 0.8:
                    handle, value = unclaimed.pop(choose.randrange(len(unclaimed)))
                    result = self.taken(handle)
                    assert result.tolist() == value.tolist(), (result, value)
                    results.append(result)
                    kept.append(result.copy())
                    if choose.random() < 0.5:
                        which = choose.randrange(len(results))
                        results[which][...] = kept[which][...] = -choose.randrange(1000)
                for result, copy in zip(results, kept):
                    assert result.tolist() == copy.tolist(), (result, copy)
                assert set(memory.tolist()) == {float(memory[0])}
                del fed
                settle()
            for handle, value in unclaimed:
                assert self.taken(handle).tolist() == value.tolist()
        memory += 1
        for result, copy in zip(results, kept):
            assert result.tolist() == copy.tolist()
        return len(results)

    def memory(self) -> Any:
        """Return what is fed, and what to call before it is written to again."""
        if not self.cuda:
            return aligned(), lambda: None
        cupy = __import__("cupy")
        return cupy.zeros(COUNT, "float32"), cupy.cuda.Device().synchronize


def aligned() -> Any:
    """Numbers where TensorFlow takes them in place."""
    memory = np.zeros(4 * COUNT + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + 4 * COUNT].view(np.float32)


def case(seed: int, cuda: bool = False) -> int:
    """Check one graph in the TensorFlow of this Python."""
    import tensorflow as tf

    if tf.__version__.startswith("1."):
        import truebridge_tf1 as bridge

        return Case(tf, bridge, lambda handle: bridge.take(handle).numpy(), seed).check()
    import truebridge

    graphs = truebridge.tensorflow
    target = "cupy" if cuda else "numpy"
    return Case(tf, graphs, lambda handle: graphs.take(handle, target), seed, cuda).check()


if __name__ == "__main__":
    first = int(sys.argv[2])
    compared = 0
    for number in range(int(sys.argv[1])):
        try:
            compared += case(first + number, "cuda" in sys.argv)
        except BaseException:
            print("seed", first + number, flush=True)
            raise
    print(sys.argv[1], "graphs,", compared, "results")
