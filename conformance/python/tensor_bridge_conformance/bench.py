"""What a transfer costs the host, beside the frameworks' own way, in one run.

Each contender is called in batches. In every round all sizes and contenders of a pair take turns, so that a host that
runs faster or slower for a while does so for all of them; the medians over the rounds count, and for the ratio the
median of the ratios within a round. A call includes dropping the view that it gave.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tensor_bridge_conformance import growth, host
from tensor_bridge_conformance.growth import STEP, Call, batch

#: Bytes of the tensors: 1 KiB to 4 GiB.
SIZES = [1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 26, 1 << 30, 1 << 32]
#: Cycles of a delay: about three milliseconds.
CYCLES = 6_000_000
#: Rounds that warm caches and pools up, and do not count.
WARM_UP = 2
#: A transfer costs the same at any size when the slowest size costs at most so many times the fastest.
FLAT = 1.5

Context = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass
class Row:
    """One size of one pair: medians, of the times in nanoseconds."""

    path: str
    streams: str
    size: int
    ours: float
    native: float
    ratio: float


@dataclass
class Verdict:
    """What the rows of one pair say, against the bars."""

    path: str
    streams: str
    worst_ratio: float
    bar: float | None
    spread: float
    passed: bool


@dataclass
class Setting:
    """A pair on one arrangement of streams: how to make the tensor, both ways across, and the bar for their ratio."""

    path: str
    streams: str
    make: Callable[[int], Any]
    ours: Call
    native: Call
    bar: float | None
    #: What is entered around the measurement (the consumer's stream).
    inside: Context
    #: Called before every batch: waits for the device, and gives it work again where it shall be busy.
    before: Callable[[], Any]
    #: Takes a view back to where it came from.
    back: Call | None = None

    def parts(self, count: int) -> list[Any]:
        """As many small tensors, no two at one address."""
        if self.path.startswith("tensorflow"):
            return [self.make(1 << 10) for _ in range(count)]
        whole = self.make(-(-count * STEP // 1024) * 1024).reshape(-1, STEP // 4)
        return [whole[index] for index in range(count)]


def main(argv: list[str]) -> int:
    """Measure, print a table, write ``bench.json`` and ``bench.md``. Gives 0 when every bar is met."""
    options = _options(argv)
    settings = _settings(options.device)
    if options.only:
        settings = [setting for setting in settings if setting.path in options.only]
    if not settings:
        print("nothing to measure: torch and NumPy, or on a CUDA device torch and CuPy, have to be installed")
        return 2
    rows = [row for setting in settings for row in _measure(setting, options)]
    verdicts = [_judge(setting, rows) for setting in settings]
    grown = [row for setting in settings for row in growth.measure(setting, options)]
    about = host.describe(_FRAMEWORKS)
    table = _markdown(about, rows, verdicts) + "\n" + "\n".join(growth.markdown(grown)) + "\n"
    print(table)
    report = Path(options.report)
    report.mkdir(parents=True, exist_ok=True)
    data = {
        "schema": 1,
        "host": about,
        "rows": [asdict(row) for row in rows],
        "verdicts": [asdict(v) for v in verdicts],
        "growth": [asdict(row) for row in grown],
    }
    (report / "bench.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    (report / "bench.md").write_text(table, encoding="utf-8")
    judged = [verdict for verdict in [*verdicts, *grown] if verdict.bar is not None]
    missed = sum(not verdict.passed for verdict in judged)
    print(f"{len(judged) - missed} passed, {missed} failed")
    return 1 if missed else 0


_FRAMEWORKS = [
    {"name": "torch", "module": "torch", "distributions": ["torch"]},
    {"name": "cupy", "module": "cupy", "distributions": ["cupy-cuda13x", "cupy-cuda12x", "cupy"]},
    {"name": "numpy", "module": "numpy", "distributions": ["numpy"]},
    {"name": "tensorflow", "module": "tensorflow", "distributions": ["tensorflow", "tensorflow-cpu"]},
]


def _options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="--bench", description=__doc__)
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="default: cuda where there is one"
    )
    parser.add_argument("--rounds", type=int, default=60, help="rounds per size (default: 60)")
    parser.add_argument("--batch", type=int, default=100, help="calls per round (default: 100)")
    parser.add_argument("--max-size", type=int, default=SIZES[-1], metavar="BYTES", help="leave out larger tensors")
    parser.add_argument("--views", type=int, default=100_000, help="live views beside a transfer (default: 100000)")
    parser.add_argument("--threads", type=int, default=8, help="threads that transfer at once (default: 8)")
    parser.add_argument("--only", type=_paths, metavar="FROM:TO,...", help="measure these pairs alone")
    parser.add_argument("--report", default="conformance-report", metavar="DIR", help="where to write bench.json")
    return parser.parse_args(argv)


def _paths(line: str) -> list[str]:
    return [path.replace(":", "→") for path in line.split(",")]


def _settings(device: str) -> list[Setting]:
    settings = []
    with contextlib.suppress(ImportError):
        import torch

        if device != "cpu" and torch.cuda.is_available():
            cupy = importlib.import_module("cupy")
            settings += _cuda_settings(torch, cupy)
            with contextlib.suppress(ImportError):
                settings += _cuda_settings_of_tensorflow(torch, cupy, importlib.import_module("tensorflow"))
        if device != "cuda":
            numpy = importlib.import_module("numpy")
            settings += _cpu_settings(torch, numpy)
            with contextlib.suppress(ImportError):
                settings += _cpu_settings_of_tensorflow(torch, numpy, importlib.import_module("tensorflow"))
    return settings


def _on_host(path: str, make: Callable[[int], Any], ours: Call, native: Call, back: Call | None = None) -> Setting:
    return Setting(path, "host", make, ours, native, None, contextlib.nullcontext, lambda: None, back)


def _cpu_settings(torch: Any, numpy: Any) -> list[Setting]:
    import tensor_bridge

    return [
        _on_host(
            "torch→numpy",
            lambda size: torch.empty(_shape(size), dtype=torch.float32),
            tensor_bridge.to_numpy,
            numpy.from_dlpack,
            tensor_bridge.to_torch,
        ),
        _on_host(
            "numpy→torch",
            lambda size: numpy.empty(_shape(size), dtype=numpy.float32),
            tensor_bridge.to_torch,
            torch.from_dlpack,
            tensor_bridge.to_numpy,
        ),
    ]


def _cpu_settings_of_tensorflow(torch: Any, numpy: Any, tensorflow: Any) -> list[Setting]:
    import tensor_bridge

    dlpack = tensorflow.experimental.dlpack

    def aligned(size: int) -> Any:
        """An array where TensorFlow takes it in place."""
        memory = numpy.empty(size + 64, dtype=numpy.uint8)
        start = -memory.ctypes.data % 64
        return memory[start : start + size].view(numpy.float32).reshape(_shape(size))

    return [
        _on_host(
            "torch→tensorflow",
            lambda size: torch.empty(_shape(size), dtype=torch.float32),
            tensor_bridge.to_tensorflow,
            lambda tensor: dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(tensor)),
        ),
        _on_host(
            "tensorflow→torch",
            lambda size: tensorflow.zeros(_shape(size)),
            tensor_bridge.to_torch,
            lambda tensor: torch.utils.dlpack.from_dlpack(dlpack.to_dlpack(tensor)),
        ),
        _on_host(
            "numpy→tensorflow",
            aligned,
            tensor_bridge.to_tensorflow,
            lambda array: dlpack.from_dlpack(array.__dlpack__()),
        ),
    ]


def _cuda_settings_of_tensorflow(torch: Any, cupy: Any, tensorflow: Any) -> list[Setting]:
    import tensor_bridge

    dlpack = tensorflow.experimental.dlpack

    operand = tensorflow.fill([1 << 20], tensorflow.constant(1e6, "float64"))

    def occupy() -> None:
        """Milliseconds of work in the streams of all three."""
        torch.cuda.synchronize()
        tensorflow.math.igamma(operand, operand)
        torch.cuda._sleep(CYCLES)

    def pair(path: str, make: Callable[[int], Any], ours: Call, native: Call, bar: float) -> list[Setting]:
        # TensorFlow has a stream of its own, and the others are on the legacy default stream.
        return [
            Setting(path, "cross", make, ours, native, bar, contextlib.nullcontext, torch.cuda.synchronize),
            Setting(path, "cross, busy", make, ours, native, None, contextlib.nullcontext, occupy),
        ]

    def of_torch(size: int) -> Any:
        return torch.empty(_shape(size), dtype=torch.float32, device="cuda")

    def of_cupy(size: int) -> Any:
        return cupy.empty(_shape(size), dtype=cupy.float32)

    def of_tensorflow(size: int) -> Any:
        with tensorflow.device("GPU:0"):
            return tensorflow.zeros(_shape(size))

    # CuPy's `toDlpack` gives a versioned capsule, which TensorFlow refuses.
    pairs = [
        pair(
            "torch→tensorflow",
            of_torch,
            tensor_bridge.to_tensorflow,
            lambda tensor: dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(tensor)),
            1,
        ),
        pair(
            "cupy→tensorflow",
            of_cupy,
            tensor_bridge.to_tensorflow,
            lambda array: dlpack.from_dlpack(array.__dlpack__(stream=-1)),
            1,
        ),
        pair(
            "tensorflow→torch",
            of_tensorflow,
            tensor_bridge.to_torch,
            lambda tensor: torch.utils.dlpack.from_dlpack(dlpack.to_dlpack(tensor)),
            1 / 3,
        ),
        pair(
            "tensorflow→cupy",
            of_tensorflow,
            tensor_bridge.to_cupy,
            lambda tensor: cupy.from_dlpack(dlpack.to_dlpack(tensor)),
            1 / 2,
        ),
    ]
    return [setting for settings in pairs for setting in settings]


def _cuda_settings(torch: Any, cupy: Any) -> list[Setting]:
    import tensor_bridge

    torch_stream, cupy_stream = torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    streams: dict[str, Context] = {
        # Both frameworks start out on the legacy default stream.
        "same": contextlib.nullcontext,
        "cross": lambda: _both(torch.cuda.stream(torch_stream), cupy_stream),
    }
    settings = []
    for name, inside in streams.items():
        settings.append(
            Setting(
                "cupy→torch",
                name,
                lambda size: cupy.empty(_shape(size), dtype=cupy.float32),
                tensor_bridge.to_torch,
                torch.from_dlpack,
                1 / 4,
                inside,
                torch.cuda.synchronize,
                tensor_bridge.to_cupy,
            )
        )
        settings.append(
            Setting(
                "torch→cupy",
                name,
                lambda size: torch.empty(_shape(size), dtype=torch.float32, device="cuda"),
                tensor_bridge.to_cupy,
                cupy.from_dlpack,
                1 / 5,
                inside,
                torch.cuda.synchronize,
                tensor_bridge.to_torch,
            )
        )
    return settings


@contextlib.contextmanager
def _both(first: Any, second: Any) -> Any:
    with first, second:
        yield


def _shape(size: int) -> tuple[int, int]:
    """A float32 tensor of ``size`` bytes."""
    return size // (4 * 256), 256


def _measure(setting: Setting, options: argparse.Namespace) -> list[Row]:
    sizes = [size for size in SIZES if size <= options.max_size]
    contenders = (setting.ours, setting.native)
    with setting.inside():
        tensors = [setting.make(size) for size in sizes]
        rounds = []
        for _ in range(options.rounds + WARM_UP):
            times = []
            for tensor in tensors:
                times.append([batch(call, tensor, options.batch, setting.before) for call in contenders])
            rounds.append(times)
        del tensors, tensor
        setting.before()
    rows = []
    for index, size in enumerate(sizes):
        taken = [times[index] for times in rounds[WARM_UP:]]
        ours, native, ratio = (
            statistics.median(figures) for figures in zip(*((o, n, o / n) for o, n in taken), strict=True)
        )
        rows.append(Row(setting.path, setting.streams, size, ours, native, ratio))
    return rows


def _judge(setting: Setting, rows: list[Row]) -> Verdict:
    own = [row for row in rows if (row.path, row.streams) == (setting.path, setting.streams)]
    worst = max(row.ratio for row in own)
    spread = max(row.ours for row in own) / min(row.ours for row in own)
    passed = setting.bar is None or (worst <= setting.bar and spread <= FLAT)
    return Verdict(setting.path, setting.streams, worst, setting.bar, spread, passed)


def _markdown(about: dict[str, Any], rows: list[Row], verdicts: list[Verdict]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    where = "; ".join([*about["gpus"], about["cpu"]])
    lines = [f"{where}; Python {about['python']}; {versions}; {about['date']}", ""]
    lines += ["| path | streams | size | ours, ns | native, ns | ratio |", "|---|---|--:|--:|--:|--:|"]
    for row in rows:
        figures = f"{row.ours:,.0f} | {row.native:,.0f} | {row.ratio:.3f}"
        lines.append(f"| {row.path} | {row.streams} | {_words(row.size)} | {figures} |")
    lines += [
        "",
        "| path | streams | worst ratio | bar | slowest / fastest size | verdict |",
        "|---|---|--:|--:|--:|---|",
    ]
    for verdict in verdicts:
        bar = "none" if verdict.bar is None else f"{verdict.bar:.2f}"
        word = "no bar" if verdict.bar is None else "met" if verdict.passed else "MISSED"
        figures = f"{verdict.worst_ratio:.3f} | {bar} | {verdict.spread:.2f}"
        lines.append(f"| {verdict.path} | {verdict.streams} | {figures} | {word} |")
    return "\n".join(lines) + "\n"


def _words(size: int) -> str:
    units = ["B", "KiB", "MiB", "GiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size // 1024, units[1:]
    return f"{size} {units[0]}"
