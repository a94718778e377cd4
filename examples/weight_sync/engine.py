"""The engine: serves batches from weights that a trainer changes meanwhile.

On a GPU it replays a CUDA graph, which reads the weights at addresses that never change. Between two batches it takes
the newest version, if there is one. ``run.py`` starts it.
"""

from __future__ import annotations

import argparse
import os

import torch

import truebridge as tb


def main() -> None:
    """Serve until this process is killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names")
    parser.add_argument("--shape", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--count", type=int, default=300)
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    torch.set_default_device("cuda" if on_gpu else "cpu")
    weights = [torch.full(options.shape, -1.0) for _ in range(options.count)]
    extremes = torch.zeros(2)

    def serve() -> None:
        """Stand in for a model: the smallest and the largest of all weights."""
        extremes[0].copy_(torch.stack([weight.amin() for weight in weights]).amin())
        extremes[1].copy_(torch.stack([weight.amax() for weight in weights]).amax())

    serve()
    if on_gpu:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            serve()
        serve = graph.replay
    subscription = tb.connect(options.names).subscribe("weights", out=weights)
    print("serves", flush=True)
    while True:
        version = subscription.refresh()
        serve()
        # The answer of a batch: without it launches would queue up, and a version be served behind all of them.
        low, high = extremes.tolist()
        if version is not None:
            memory = (torch.cuda.mem_get_info()[0] >> 20) if on_gpu else 0
            files = len(os.listdir("/proc/self/fd"))
            print(f"{'whole' if low == high else 'torn'} {int(high)} {files} {memory}", flush=True)


if __name__ == "__main__":
    main()
