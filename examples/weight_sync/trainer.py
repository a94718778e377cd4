"""The trainer: changes its weights step by step, and publishes each step.

``run.py`` starts it, and ``engine.py`` receives what it publishes.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import truebridge as tb


def of_torch(shape: tuple[int, ...], count: int) -> Callable[[int], Any]:
    """Return a function that trains in place: the weights stay where they are."""
    import torch

    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
    weights = [torch.zeros(shape) for _ in range(count)]

    def step(number: int) -> Any:
        for weight in weights:
            weight.fill_(number)
        return weights

    return step


def of_jax(shape: tuple[int, ...], count: int) -> Callable[[int], Any]:
    """Return a function whose steps have new arrays, as those of JAX do."""
    import jax
    import jax.numpy as jnp

    step = jax.jit(lambda number: [jnp.full(shape, number, jnp.float32) for _ in range(count)])
    return lambda number: step(float(number))


def of_tensorflow(shape: tuple[int, ...], count: int) -> Callable[[int], Any]:
    """Return a function whose steps have new tensors: TensorFlow's variables are read."""
    import tensorflow as tf

    weights = [tf.Variable(tf.zeros(shape)) for _ in range(count)]

    @tf.function
    def train(number: tf.Tensor) -> list[tf.Tensor]:
        return [weight.assign(tf.fill(shape, number)) for weight in weights]

    return lambda number: train(tf.constant(number, tf.float32))


#: What a step of each framework is. A weight has one value in all elements, the number of the step, so that the engine
#: notices a version that is not whole.
TRAINERS = {"torch": of_torch, "jax": of_jax, "tensorflow": of_tensorflow}


def main() -> None:
    """Train until this process is killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names")
    parser.add_argument("--framework", choices=TRAINERS, default="torch")
    parser.add_argument("--shape", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--first", type=int, default=1)
    options = parser.parse_args()
    step = TRAINERS[options.framework](tuple(options.shape), options.count)
    with tb.connect(options.names) as names:
        publication = names.publish("weights", step(options.first), slots=3)
        for number in itertools.count(options.first + 1):
            publication.update(step(number), timeout=60)
            print(f"step {number}", flush=True)


if __name__ == "__main__":
    main()
