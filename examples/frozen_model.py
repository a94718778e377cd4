"""A model of TensorFlow 1.x, trained and frozen as in its day, now works on tensors of PyTorch.

The model corrects the frames of a camera: every pixel has its own gain and offset, found by gradient descent on
frames of an evenly lit wall. Training and freezing need a TensorFlow with the interface of version 1, which is in
TensorFlow 2 as well. Serving needs the folder of TensorFlow 1.15, but not its Python, and copies no frame::

    python examples/frozen_model.py

After ``cargo xtask setup`` the example finds TensorFlow 1.15 by itself; an argument names another folder. On a GPU the
frames stay there. On a GPU that is newer than TensorFlow 1.15 the first run is slow: TensorFlow compiles its kernels.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

#: Rows and columns of a frame.
SHAPE = (240, 320)
#: Where ``cargo xtask setup`` puts TensorFlow 1.15.
FETCHED = Path(__file__).resolve().parents[1] / "target/tensorflow1/tensorflow_core"


class Trained(NamedTuple):
    """A model, and facts of its training."""

    #: A serialised ``GraphDef`` without variables, from ``x:0`` to ``y:0``.
    graph: bytes
    gain: Any
    offset: Any
    #: The mean squared error before and after the training.
    losses: tuple[float, float]


def train(steps: int = 400) -> Trained:
    """Train and freeze the model, on the CPU. What is in here might be as old as TensorFlow 1.x."""
    import tensorflow.compat.v1 as tf

    tf.logging.set_verbosity(tf.logging.ERROR)
    random = np.random.RandomState(1)
    gain, offset = random.uniform(0.8, 1.25, SHAPE), random.uniform(-0.1, 0.1, SHAPE)
    on_cpu = tf.ConfigProto(device_count={"GPU": 0})
    with tf.Graph().as_default() as graph, tf.Session(config=on_cpu) as session:
        x = tf.placeholder(tf.float32, SHAPE, name="x")
        light = tf.placeholder(tf.float32, [])
        w = tf.get_variable("w", SHAPE, initializer=tf.ones_initializer())
        b = tf.get_variable("b", SHAPE, initializer=tf.zeros_initializer())
        y = tf.add(w * x, b, name="y")
        error = tf.square(y - light)
        loss = tf.reduce_mean(error)
        step = tf.train.GradientDescentOptimizer(0.2).minimize(tf.reduce_sum(error))
        session.run(tf.global_variables_initializer())

        def frame() -> dict[Any, Any]:
            level = random.uniform(0.1, 1)
            return {x: (level - offset) / gain + random.normal(0, 1e-3, SHAPE), light: level}

        def mean_loss() -> float:
            return float(np.mean([session.run(loss, frame()) for _ in range(16)]))

        before = mean_loss()
        for _ in range(steps):
            session.run(step, frame())
        after = mean_loss()
        frozen = tf.graph_util.convert_variables_to_constants(session, graph.as_graph_def(), ["y"])
        gain, offset = session.run([w, b])
    return Trained(frozen.SerializeToString(), gain, offset, (before, after))


def serve(model: Trained, folder: str | None, device: str) -> None:
    """Run the frozen model on frames of PyTorch, and print where frames and results were."""
    import tensorflow.compat.v1 as tf
    import torch

    import truebridge as tb

    version = tb.tensorflow.v1.open(folder)
    frames = torch.rand(8, *SHAPE, device=device)
    gain, offset = (torch.from_numpy(values).to(device) for values in (model.gain, model.offset))
    config = tf.ConfigProto(device_count={"GPU": int(device != "cpu")})
    results, kept, in_place, difference = [], [], [], 0.0
    with tb.tensorflow.v1.Session(model.graph, {"x:0": ("float32", SHAPE)}, ["y:0"], config=config) as session:
        for frame in frames:
            fed = tb.convert(frame, "tensorflow1")
            (result,) = session.run({"x:0": fed})
            y = tb.to_torch(result)
            results.append(y)
            kept.append(fed.address == frame.data_ptr())
            in_place.append(y.data_ptr() == result.address)
    for frame, y in zip(frames, results, strict=True):
        difference = max(difference, (y - (gain * frame + offset)).abs().max().item())
    print(f"served by TensorFlow {version}: {len(results)} frames of PyTorch on {frames.device}, results on {y.device}")
    print(f"read where PyTorch has them: {all(kept)}; results where TensorFlow has them: {all(in_place)}")
    print(f"largest difference to PyTorch's own result: {difference:.1e}")


def report(model: Trained) -> None:
    """Print how the training went."""
    import tensorflow as tf

    before, after = model.losses
    print(f"trained by TensorFlow {tf.__version__}: loss {before:.2e} before, {after:.2e} after")
    print(f"frozen: {len(model.graph)} bytes")


def main() -> None:
    """Train, freeze, serve."""
    parser = argparse.ArgumentParser(description="Train and freeze a model of TensorFlow 1.x, feed it from PyTorch.")
    folder = "the folder of TensorFlow 1.15 (default: TRUEBRIDGE_TENSORFLOW1, then what cargo xtask setup fetched)"
    fetched = str(FETCHED) if FETCHED.is_dir() and not os.environ.get("TRUEBRIDGE_TENSORFLOW1") else None
    parser.add_argument("tensorflow1", nargs="?", default=fetched, help=folder)
    device = "where the frames are (default: cuda if there is one)"
    parser.add_argument("--device", choices=["cpu", "cuda"], help=device)
    options = parser.parse_args()
    # PyTorch comes before TensorFlow 2, which shows its own stubs of CUDA to libraries that are loaded later.
    import torch

    model = train()
    report(model)
    serve(model, options.tensorflow1, options.device or ("cuda" if torch.cuda.is_available() else "cpu"))


if __name__ == "__main__":
    main()
