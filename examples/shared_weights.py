"""Train in PyTorch, and serve the weights from another process in TensorFlow while they change.

The trainer shares the memory of its parameters once, under a name. The server opens it as tensors of TensorFlow, and
sees every step of the optimizer: no copy, no message::

    pip install . torch tensorflow && python examples/shared_weights.py
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import truebridge as tb


def serve(path: Path) -> None:
    """Answer batches with the weights of the trainer, whatever they are at the time."""
    import tensorflow as tf

    names = tb.connect(path)
    next(names.watch("weights"))
    weights = names.get("weights", "tensorflow")
    for version in names.watch("batch"):
        batch = names.get("batch", "tensorflow", version=version)
        names.put("answer", {"of": version, "y": tf.reduce_sum(batch * weights["w"], 1) + weights["b"]})


def train(names: tb.processes.Names, steps: int) -> None:
    """Train a linear model, and compare the server's predictions with its own."""
    import torch

    torch.manual_seed(0)
    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.rand(256, 8)
    y = x @ torch.arange(8.0) + 3
    shared = names.put("weights", {"w": torch.zeros(8), "b": torch.zeros(1)}, writing="shared")
    w, b = map(torch.nn.Parameter, names.get("weights", "torch").values())  # views of the shared memory
    optimizer = torch.optim.Adam([w, b], lr=0.2)
    for step in range(steps + 1):
        if step % 50 == 0:
            version = names.put("batch", x)
            answers = (names.get("answer", "torch") for _ in names.watch("answer", timeout=300))
            answer = next(answer["y"] for answer in answers if answer["of"] == version)
            torch.testing.assert_close(answer, (x @ w + b).detach(), rtol=1e-4, atol=1e-4)
            print(f"step {step}: the server's loss is {(answer - y).square().mean().item():.4f}")
        optimizer.zero_grad()
        (x @ w + b - y).square().mean().backward()
        optimizer.step()
    assert names.list()["weights"][0] == shared
    print(f"weights shared once, on {x.device}: the server saw every step")


def main() -> None:
    """Start the server, and train."""
    parser = argparse.ArgumentParser(description="Train in PyTorch, serve the weights in TensorFlow meanwhile.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--serve", type=Path, metavar="PATH", help="be the server of the names at this path")
    options = parser.parse_args()
    if options.serve:
        return serve(options.serve)
    environment = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_FORCE_GPU_ALLOW_GROWTH": "true", **os.environ}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "names"
        command = [sys.executable, __file__, "--serve", str(path)]
        # The names are there before the server looks for them.
        with tb.serve(path) as names, subprocess.Popen(command, env=environment) as server:
            try:
                train(names, options.steps)
            finally:
                server.kill()


if __name__ == "__main__":
    main()
