"""The model of ``frozen_model.py`` in the program that has always run it: Python 3.7 with TensorFlow 1.15 itself.

Only the feeding of the session differs from the old program: ``truebridge_tf1`` takes frames from PyTorch and
returns results to it, in place::

    python3.7 examples/python37.py
"""

import argparse

import tensorflow.compat.v1 as tf
import torch
import truebridge_tf1 as tb
from frozen_model import SHAPE, Trained, report, train


def serve(model: Trained, device: str) -> None:
    """Run the frozen model on frames of PyTorch, and print where frames and results were."""
    frames = torch.rand(8, *SHAPE, device=device)
    gain, offset = (torch.from_numpy(values).to(device) for values in (model.gain, model.offset))
    config = tf.ConfigProto(device_count={"GPU": int(device != "cpu")}, gpu_options=tf.GPUOptions(allow_growth=True))
    difference = 0.0
    with tf.Graph().as_default(), tf.Session(config=config) as session:
        x = tb.external_input(tf.float32, SHAPE)
        (y,) = tf.import_graph_def(tf.GraphDef.FromString(model.graph), {"x:0": x}, ["y:0"])
        output = tb.external_output(y)
        for frame in frames:
            # An error if the frame had to be copied.
            fetched = session.run(output, {tb.handle_of(x): tb.feed(frame, copy=False)})
            result = torch.utils.dlpack.from_dlpack(tb.take(fetched))
            difference = max(difference, (result - (gain * frame + offset)).abs().max().item())
    where = f"frames of PyTorch on {frames.device}, results on {result.device}"
    print(f"served by TensorFlow {tf.__version__}: {len(frames)} {where}")
    print("read where PyTorch has them: True")
    print(f"largest difference to PyTorch's own result: {difference:.1e}")


def main() -> None:
    """Train, freeze, serve."""
    parser = argparse.ArgumentParser(description="Feed a model of TensorFlow 1.x from PyTorch, in Python 3.7.")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the frames are (default: cpu)")
    options = parser.parse_args()
    model = train()
    report(model)
    serve(model, options.device)


if __name__ == "__main__":
    main()
