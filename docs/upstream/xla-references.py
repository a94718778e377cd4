"""Threads export one array of JAX on a GPU: references to its buffer are lost, and its end aborts the process."""

import threading

import jax


def export(array: jax.Array) -> None:
    """Export the array, and drop each capsule before the next."""
    for _ in range(20_000):
        array.__dlpack__(stream=1)


shared = jax.numpy.arange(256.0)
threads = [threading.Thread(target=export, args=(shared,)) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
del shared, threads, thread
print("every reference was counted")
