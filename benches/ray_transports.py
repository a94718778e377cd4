"""Tensors between the actors of Ray: this package's transports compared with Ray's.

Two nodes of Ray run on this host. An actor returns tensors that it has, another one receives them: on the same node
(*near*), and on the other one (*far*), on the last GPU. Timed is the whole call, from the driver. Ray's own transport
takes PyTorch's tensors: ``CUDA_IPC`` near on a GPU, ``NIXL`` otherwise. All take turns.

    python bench.py --ray-transports --device cuda --report out
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

from benches.reports import Verdict, conclude, page
from benches.rounds import options, several
from truebridge_conformance import host

#: Bytes of a tensor, and how many there are.
SIZES = ((1 << 10, 1), (1 << 26, 1), (1 << 30, 1), (44_000, 300))
#: The bars: PyTorch's tensors as a multiple of Ray's time, for the smallest size and the others; other frameworks' of
#: PyTorch's.
SMALLEST, TORCH, OTHERS = 1.3, 1.15, 1.25
#: Rounds that do not count.
FIRST = 3
#: An address that Ray does not replace.
ADDRESS = "127.0.0.2"


@dataclass
class Row:
    """One path: the median of a call, in milliseconds, and whether the elements were right."""

    what: str
    receiver: str
    count: int
    nbytes: int
    milliseconds: float
    right: bool


class Actor:
    """Sends tensors that it has, and receives others."""

    def __init__(self) -> None:
        """Have nothing."""
        self.size: tuple[int, int] | None = None
        self.has: dict[str, Any] = {}

    def sent(self, framework: str, count: int, nbytes: int, device: str) -> Any:
        """Return tensors of a framework, the same ones for the same size."""
        import torch

        import truebridge as tb

        if self.size != (count, nbytes):
            self.size, self.has = (count, nbytes), {}
        if framework not in self.has:
            made = [torch.full((nbytes // 4,), float(number), device=device) for number in range(count)]
            self.has[framework] = tb.convert(made, framework, copy=framework != "torch")  # type: ignore[call-overload]
        return self.has[framework]

    def received(self, tensors: Any, look: bool) -> bool:
        """Return whether the elements are right, if it shall look."""
        import truebridge as tb

        if not look:
            return True
        arrays = tb.convert(tensors, "numpy", device="cpu")
        return all((array == number).all() for number, array in enumerate(arrays))


def main(argv: list[str]) -> int:
    """Measure, print a table, write ``bench_ray_transports.json`` and ``.md``. Return 0 when every bar is met."""
    gpus = len(host.describe("torch")["gpus"])
    device = {"default": "cuda" if gpus else "cpu", "choices": ("cpu", "cuda"), "help": "default: %(default)s"}
    frameworks = {"default": ["torch", "jax"], "type": several(str), "help": "frameworks of the sender"}
    given = options(argv, "ray-transports", __doc__, 30, device=device, frameworks=frameworks)
    rows = measure(given.device, given.frameworks, gpus, given.rounds)
    verdicts, about = judge(rows), host.describe(*given.frameworks)
    return conclude(given.report, "bench_ray_transports", markdown(about, rows, verdicts), about, rows, verdicts)


def measure(device: str, frameworks: list[str], gpus: int, rounds: int) -> list[Row]:
    """Measure every path to both nodes."""
    os.environ.update(
        RAY_USAGE_STATS_ENABLED="0",
        RAY_worker_niceness="0",
        PYTHONPATH=os.pathsep.join(path or "." for path in sys.path),
    )
    import ray
    from ray.cluster_utils import Cluster

    import truebridge as tb

    names = tb.ray.register()
    each = {"num_cpus": 4, "num_gpus": int(gpus > 0), "node_ip_address": ADDRESS, "object_store_memory": 1 << 30}
    nodes = Cluster(initialize_head=True, head_node_args={**each, "include_dashboard": False, "resources": {"near": 9}})
    nodes.add_node(**each, resources={"far": 9})
    ray.init(address=nodes.address, _node_ip_address=ADDRESS, log_to_driver=False)
    kind = ray.remote(num_cpus=0, num_gpus=0.3 * (gpus > 0), enable_tensor_transport=True)(Actor)
    last = {"env_vars": {"CUDA_VISIBLE_DEVICES": str(gpus - 1), "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
    sender, near = (kind.options(resources={"near": 1}).remote() for _ in range(2))
    far = kind.options(resources={"far": 1}, runtime_env=last if gpus > 1 else None).remote()
    rows = []
    try:
        for nbytes, count in SIZES:
            for where, receiver in (("near", near), ("far", far)):
                own = "CUDA_IPC" if where == "near" and device == "cuda" else "NIXL"
                ways = [(f"Ray's {own}", "torch", own), *((name, name, names[name]) for name in frameworks)]
                rows += _row(sender, receiver, where, ways, count, nbytes, device, rounds)
                print(*(f"{row.what} {where} {row.milliseconds:.2f} ms" for row in rows[-len(ways) :]), sep=", ")
    finally:
        ray.shutdown()
        nodes.shutdown()
    return rows


def _row(
    sender: Any,
    receiver: Any,
    where: str,
    ways: list[tuple[str, str, str]],
    count: int,
    nbytes: int,
    device: str,
    rounds: int,
) -> list[Row]:
    import ray

    def call(framework: str, transport: str, look: bool) -> bool:
        method = sender.sent.options(tensor_transport=transport)
        return bool(
            ray.get(receiver.received.remote(method.remote(framework, count, nbytes, device), look), timeout=300)
        )

    right = [call(framework, transport, True) for _, framework, transport in ways]
    figures: list[list[float]] = [[] for _ in ways]
    for _ in range(FIRST + rounds):
        for (_, framework, transport), found in zip(ways, figures, strict=True):
            start = time.perf_counter_ns()
            call(framework, transport, False)
            found.append((time.perf_counter_ns() - start) / 1e6)
    medians = [statistics.median(found[FIRST:]) for found in figures]
    each = zip(ways, medians, right, strict=True)
    return [Row(what, where, count, nbytes, median, is_right) for (what, *_), median, is_right in each]


def judge(rows: list[Row]) -> list[Verdict]:
    """Return the verdicts: all elements right, PyTorch compared with Ray's, other frameworks with PyTorch."""
    verdicts = [Verdict.at_most("rows with wrong elements", sum(not row.right for row in rows), 0)]
    own: float = 0
    torch: float = 0
    for row in rows:
        what = f"{row.what}, {row.count} of {row.nbytes:,} bytes, {row.receiver}"
        if row.what.startswith("Ray's"):
            own = row.milliseconds
        elif row.what == "torch":
            torch = row.milliseconds
            verdicts.append(
                Verdict.at_most(f"{what}: of Ray's own", torch / own, SMALLEST if row.nbytes <= 1024 else TORCH)
            )
        else:
            verdicts.append(Verdict.at_most(f"{what}: of PyTorch's", row.milliseconds / torch, OTHERS))
    return verdicts


def markdown(about: dict[str, Any], rows: list[Row], verdicts: list[Verdict]) -> str:
    """Return the report."""
    import ray

    what = f"Calls between actors of Ray {ray.__version__}, medians. *near* is the sender's node, *far* another one."
    lines = [
        f"{row.what} | {row.receiver} | {row.count} | {row.nbytes:,} | {row.milliseconds:.2f} | {row.right}"
        for row in rows
    ]
    return page(about, what, "transport | receiver | :tensors | :bytes of each | :ms | right", lines, verdicts)
