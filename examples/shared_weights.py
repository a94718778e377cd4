"""Train in PyTorch, and serve the weights from another process in TensorFlow while they change: no copies, no messages.

The trainer shares the memory of its parameters under a name. The server opens it once, as tensors of TensorFlow, and
sees every step of the optimizer. Batches and predictions cross the same way.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile

import tensor_bridge as tb

#: The steps of the optimizer, and how many lie between two questions to the server.
STEPS, BETWEEN = 200, 50


def serve(path: str) -> None:
    """Answer batches with the weights of the trainer, whatever they are at the time."""
    import tensorflow as tf

    names = tb.connect(path)
    next(names.watch("weights"))
    weights = names.get("weights", "tensorflow")
    for version in names.watch("batch"):
        batch = names.get("batch", "tensorflow", version=version)
        names.put("answer", {"of": version, "y": tf.linalg.matvec(batch, weights["w"]) + weights["b"]})


def train(path: str) -> None:
    """Train a linear model, and ask the server for predictions meanwhile."""
    import torch

    torch.manual_seed(0)
    x = torch.rand(256, 8)
    y = x @ torch.arange(8.0) + 3

    with tb.serve(path) as names:
        version = names.put("weights", {"w": torch.zeros(8), "b": torch.zeros(1)}, writing="shared")
        # The trainer's parameters are views of the shared memory, as the server's weights are.
        weights = names.get("weights", "torch")
        parameters = [torch.nn.Parameter(weights["w"]), torch.nn.Parameter(weights["b"])]
        optimizer = torch.optim.Adam(parameters, lr=0.2)
        losses: list[float] = []
        for step in range(STEPS + 1):
            if step % BETWEEN == 0:
                losses.append(asked(names, x, y))
                print(f"step {step}: the server's loss is {losses[-1]:.4f}")
            optimizer.zero_grad()
            (x @ parameters[0] + parameters[1] - y).square().mean().backward()
            optimizer.step()
        unchanged = names.list()["weights"][0] == version
        print(f"weights shared once: {unchanged}; the server saw every step: {losses == sorted(losses, reverse=True)}")
        if not unchanged or losses[-1] > losses[0] / 100:
            raise SystemExit("the server does not see what the trainer writes")


def asked(names: tb.names.Client, x: object, y: object) -> float:
    """Return the loss of the server's predictions for a batch."""
    version = names.put("batch", x)
    for _ in names.watch("answer"):
        answer = names.get("answer", "torch")
        if answer["of"] == version:
            return float((answer["y"] - y).square().mean())
    raise SystemExit("the server does not answer")


def main() -> None:
    """Start the server, and train."""
    if sys.argv[1:]:
        # The trainer ends first.
        with contextlib.suppress(ConnectionError):
            serve(sys.argv[1])
        return
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "names")
        server: subprocess.Popen[bytes] | None = None
        try:
            environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
            server = subprocess.Popen([sys.executable, __file__, path], env=environment)
            train(path)
        finally:
            if server is not None:
                server.kill()
                server.wait()


if __name__ == "__main__":
    main()
