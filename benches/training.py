"""Cost of a training step of a PyTorch model with a layer of another framework in it, compared with its two halves.

The model has a layer of PyTorch, a dense layer of Keras or of JAX by ``tb.autograd.torch_function``, and another layer
of PyTorch; all are square, with float32 without rounding to TF32. Three steps take turns in one process:

- *whole*: forward, backward and a step of PyTorch's optimizer over all parameters.
- *PyTorch*: the same without the layer in the middle. What it would return, and its gradient, are tensors made
  beforehand.
- *layer*: only the layer in the middle, in its own framework, with the gradient of its result made beforehand, and
  the descent of its parameters.

The part is the whole step as a part of the sum of the two. Before, the gradients of the first step are compared with
those of the same model in pure PyTorch: the length of the difference, as a part of the gradient's length.

    python bench.py --training --layer jax --device cuda:0 --report out
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from benches.reports import Verdict, conclude, page
from benches.rounds import options, per_call, several
from truebridge_conformance import host

#: Rows of a batch, and widths of the layers.
BATCH = {"cpu": 1024, "cuda": 8192}
WIDTHS = {"cpu": [256, 512, 1024], "cuda": [1024, 2048, 4096]}
#: Rounds that do not count.
WARM_UP = 3
#: Seconds of a batch of steps, and the most steps in one.
TIME, MOST = 0.2, 20
#: What the optimizers multiply gradients by.
RATE = 1e-3

#: The most that gradients may differ, and on a device the most that the widest step may take, as a part of its halves.
DIFFERENCE, PART = 1e-5, 1.05


@dataclass
class Row:
    """One width: medians over the rounds in nanoseconds, and the median of the part within a round."""

    framework: str
    device: str
    batch: int
    width: int
    whole: float
    torch: float
    layer: float
    part: float
    #: The largest difference of a gradient.
    difference: float


class Layer(Protocol):
    """A dense layer of another framework with tanh, whose kernel has the shape (inputs, outputs)."""

    #: The module of PyTorch that runs it.
    module: Any

    def take(self, entered: Any, sent: Any) -> None:
        """Keep copies of a batch, and of a gradient of the result, for ``step``."""

    def step(self) -> None:
        """Take a step without PyTorch."""

    def settle(self) -> None:
        """Wait for what ``step`` has started."""


class Keras:
    """The layer of Keras, run eagerly."""

    def __init__(self, device: str, width: int) -> None:
        """Make the layer."""
        import keras
        import tensorflow as tf

        import truebridge as tb

        tf.config.experimental.enable_tensor_float_32_execution(False)
        keras.utils.set_random_seed(0)
        self.tf, self.place = tf, device.replace("cuda", "GPU")
        with tf.device(self.place):
            self.layer: Any = keras.layers.Dense(width, activation="tanh")
            self.layer.build((None, width))
        self.variables = [variable.value for variable in self.layer.trainable_variables]
        self.module = tb.autograd.torch_function(self.layer, variables=self.layer.trainable_variables)

    def take(self, entered: Any, sent: Any) -> None:  # noqa: D102
        import truebridge as tb

        self.entered, self.sent = tb.to_tensorflow([entered, sent], copy=True)

    def step(self) -> None:  # noqa: D102
        with self.tf.device(self.place):
            with self.tf.GradientTape() as tape:
                tape.watch(self.entered)
                result = self.layer(self.entered)
            _, *gradients = tape.gradient(result, [self.entered, *self.variables], output_gradients=self.sent)
            for variable, gradient in zip(self.variables, gradients, strict=True):
                variable.assign_sub(RATE * gradient)

    def settle(self) -> None:
        """Return: PyTorch waits for the device, and TensorFlow's calls return after their launches."""


class JAX:
    """The layer of JAX, compiled: a function of its parameters and a batch."""

    def __init__(self, device: str, width: int) -> None:
        """Make the layer."""
        import jax

        import truebridge as tb

        jax.config.update("jax_default_matmul_precision", "highest")
        kind, _, index = device.partition(":")
        self.jax, where = jax, jax.local_devices(backend=kind)[int(index or 0)]
        kernel = jax.random.normal(jax.random.key(0), (width, width)) * width**-0.5
        self.parameters = jax.device_put({"bias": jax.numpy.zeros(width), "kernel": kernel}, where)
        self.module = tb.autograd.torch_function(self.dense, of="jax", variables=self.parameters)
        self.descend = jax.jit(self.descent)

    def dense(self, parameters: Any, x: Any) -> Any:
        """Return what the layer makes of a batch."""
        return self.jax.numpy.tanh(x @ parameters["kernel"] + parameters["bias"])

    def descent(self, parameters: Any, entered: Any, sent: Any) -> Any:
        """Return the parameters after a step, and the gradient of the batch."""
        gradients, of_batch = self.jax.vjp(self.dense, parameters, entered)[1](sent)
        return self.jax.tree.map(lambda x, gradient: x - RATE * gradient, parameters, gradients), of_batch

    def take(self, entered: Any, sent: Any) -> None:  # noqa: D102
        import truebridge as tb

        self.entered, self.sent = tb.to_jax([entered, sent], copy=True)

    def step(self) -> None:  # noqa: D102
        self.parameters, self.last = self.descend(self.parameters, self.entered, self.sent)

    def settle(self) -> None:  # noqa: D102
        self.jax.block_until_ready(self.parameters)


#: The layers by the name of the option, with what the report calls them and the framework whose version it names.
LAYERS: dict[str, tuple[Callable[[str, int], Layer], str, str]] = {
    "keras": (Keras, "TensorFlow", "tensorflow"),
    "jax": (JAX, "JAX", "jax"),
}


class Setting:
    """The three steps for layers of one width."""

    def __init__(self, layer: Layer, device: str, batch: int, width: int) -> None:
        """Make the model and its halves, and compare the gradients."""
        import torch

        torch.manual_seed(0)
        self.torch, self.device, self.layer = torch, device, layer
        self.first, self.last = (torch.nn.Linear(width, width, device=device) for _ in range(2))
        self.model = torch.nn.Sequential(self.first, layer.module, self.last)
        self.x, self.y = (torch.rand(batch, width, device=device) for _ in range(2))
        self.difference = self._difference()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        self.own = torch.optim.SGD([*self.first.parameters(), *self.last.parameters()], lr=RATE)
        # The tensors between the halves.
        with torch.no_grad():
            entered = self.first(self.x)
            left = layer.module(entered)
        self.left = left.clone().requires_grad_()
        self.gradient = torch.rand_like(left) / left.numel()
        layer.take(entered, self.gradient)

    def _difference(self) -> float:
        bias, kernel = sorted(self.layer.module.parameters(), key=lambda parameter: parameter.ndim)

        def alone(x: Any) -> Any:
            return self.last(self.torch.tanh(self.first(x) @ kernel + bias))

        parameters = list(self.model.parameters())
        ours, own = (
            self.torch.autograd.grad(self.torch.nn.functional.mse_loss(model(self.x), self.y), parameters)
            for model in (self.model, alone)
        )
        differences = [((a - b).norm() / b.norm()).item() for a, b in zip(ours, own, strict=True)]
        return float(self.torch.tensor(differences).max())  # NaN where one is

    def whole(self) -> None:
        """Take a step of the model."""
        self.optimizer.zero_grad()
        self.torch.nn.functional.mse_loss(self.model(self.x), self.y).backward()
        self.optimizer.step()

    def alone(self) -> None:
        """Take a step of PyTorch's half."""
        self.own.zero_grad()
        self.left.grad = None
        entered = self.first(self.x)
        self.torch.nn.functional.mse_loss(self.last(self.left), self.y).backward()
        entered.backward(self.gradient)
        self.own.step()

    def batch(self, step: Callable[[], None], steps: int) -> float:
        """Return nanoseconds per step."""
        return per_call(step, steps, self.settle, self.settle)

    def settle(self) -> None:
        """Wait for the device."""
        self.layer.settle()
        if self.device != "cpu":
            self.torch.cuda.synchronize(self.device)


def main(argv: list[str]) -> int:
    """Measure, print a table, write ``bench_training.json`` and ``.md``. Return 0 when every bar is met."""
    given = options(
        argv,
        "training",
        __doc__,
        20,
        layer={"choices": LAYERS, "default": "keras", "help": "of which framework (default: keras)"},
        device={"default": "cpu", "help": "cpu or cuda:0 (default: cpu)"},
        batch={"type": int, "help": "rows of a batch (default: 1024, on a device 8192)"},
        widths={"type": several(int), "metavar": "N,...", "help": "widths (default: 256 to 1024, on a device to 4096)"},
    )
    # PyTorch before TensorFlow, which shows stubs of CUDA to libraries that are loaded later.
    import torch  # noqa: F401

    kind = given.device.partition(":")[0]
    batch, widths = given.batch or BATCH[kind], given.widths or WIDTHS[kind]
    rows = [measure(given.layer, given.device, batch, width, given.rounds) for width in widths]
    verdicts = judge(rows)
    about = host.describe("torch", LAYERS[given.layer][2])
    return conclude(given.report, "bench_training", markdown(about, rows, verdicts), about, rows, verdicts)


def measure(name: str, device: str, batch: int, width: int, rounds: int) -> Row:
    """Measure. The steps take turns in every round."""
    make, framework, _ = LAYERS[name]
    setting = Setting(make(device, width), device, batch, width)
    steps = (setting.whole, setting.alone, setting.layer.step)
    first = [min(setting.batch(step, 1) for _ in range(WARM_UP)) for step in steps]
    count = max(1, min(MOST, int(TIME * 1e9 / max(first))))
    taken = [tuple(setting.batch(step, count) for step in steps) for _ in range(rounds + WARM_UP)][WARM_UP:]
    whole, alone, layer = (statistics.median(figures) for figures in zip(*taken, strict=True))
    part = statistics.median(both / (torch + other) for both, torch, other in taken)
    return Row(framework, device, batch, width, whole, alone, layer, part, setting.difference)


def judge(rows: Sequence[Row]) -> list[Verdict]:
    """Compare with the bars. Time is judged on devices only: on a host two pools of threads share the cores."""
    worst = max(rows, key=lambda row: (math.isnan(row.difference), row.difference)).difference
    verdicts = [Verdict.at_most("difference of gradients, at most", worst, DIFFERENCE)]
    on_device = [row for row in rows if row.device.startswith("cuda")]
    if on_device:
        widest = max(on_device, key=lambda row: row.width)
        what = f"step of width {widest.width}: part of the halves, at most"
        verdicts.append(Verdict.at_most(what, widest.part, PART))
    return verdicts


def markdown(about: dict[str, Any], rows: Sequence[Row], verdicts: Sequence[Verdict]) -> str:
    """Return the report."""

    def line(row: Row) -> str:
        times = " | ".join(f"{figure / 1000:,.0f}" for figure in (row.whole, row.torch, row.layer))
        where = f"{row.device} | {row.batch} | {row.width}"
        return f"{where} | {times} | {row.part:.3f} | {row.difference:.1e}"

    framework = rows[0].framework
    what = f"A step of three layers, the one in the middle of {framework}. {about['cores']} cores."
    head = f"device|:batch|:width|:whole, µs|:PyTorch, µs|:{framework}, µs|:part|:difference"
    return page(about, what, head, map(line, rows), verdicts)
