"""TensorFlow 1.15 in processes whose memory allocator is another one, by ``LD_PRELOAD``, as servers have it."""

from __future__ import annotations

import ctypes.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorflow.core.protobuf import saved_model_pb2

import random_graphs
import truebridge as tb
from graphs import FLOATS, HOST, aligned, compiled, line, on_host, placeholder, saved, tf, v1

pytest.importorskip("torch")


#: An allocator that aborts at any pointer that is not its own. Memory of ``new`` and of ``malloc`` differs.
SHIM = r"""
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

typedef struct { void *raw; uint32_t size[2], owner[2]; } Head;
enum { MALLOC = 0x6d616c6c, NEW = 0x6e657721, FREED = 0x66726565 };

static Head *head(void *p) { return (Head *)((char *)p - sizeof(Head)); }
static size_t size_of(Head *h) { return (size_t)h->size[1] << 32 | h->size[0]; }

static void *make(size_t align, size_t size, uint32_t owner) {
  if (align < 64) align = 64;
  if (size > SIZE_MAX / 2) return errno = ENOMEM, NULL;
  char *raw = __libc_memalign(align, size + align);
  if (!raw) return NULL;
  Head *h = head(raw + align);
  h->raw = raw, h->size[0] = size, h->size[1] = size >> 32, h->owner[0] = owner, h->owner[1] = ~owner;
  return raw + align;
}

static Head *own(void *p, uint32_t owner) {
  Head *h = head(p);
  if (h->owner[0] != owner || h->owner[1] != ~owner) {
    static const char text[] = "shim: a pointer of another allocator\n";
    if (write(2, text, sizeof text - 1)) {}
    abort();
  }
  return h;
}

static void drop(void *p, uint32_t owner) {
  if (!p) return;
  Head *h = own(p, owner);
  h->owner[0] = FREED;
  __libc_free(h->raw);
}

void *malloc(size_t n) { return make(0, n, MALLOC); }
void free(void *p) { drop(p, MALLOC); }
void *calloc(size_t n, size_t m) {
  size_t size;
  if (__builtin_mul_overflow(n, m, &size)) return errno = ENOMEM, NULL;
  void *p = make(0, size, MALLOC);
  return p ? memset(p, 0, size) : p;
}
void *realloc(void *p, size_t n) {
  if (!p) return malloc(n);
  size_t size = size_of(own(p, MALLOC));
  void *q = malloc(n);
  if (q) memcpy(q, p, size < n ? size : n), free(p);
  return q;
}
void *reallocarray(void *p, size_t n, size_t m) {
  size_t size;
  if (__builtin_mul_overflow(n, m, &size)) return errno = ENOMEM, NULL;
  return realloc(p, size);
}
void *memalign(size_t a, size_t n) { return make(a, n, MALLOC); }
void *aligned_alloc(size_t a, size_t n) { return make(a, n, MALLOC); }
void *valloc(size_t n) { return make(4096, n, MALLOC); }
void *pvalloc(size_t n) { return make(4096, (n + 4095) & ~(size_t)4095, MALLOC); }
int posix_memalign(void **out, size_t a, size_t n) {
  void *p = make(a, n, MALLOC);
  if (!p) return ENOMEM;
  *out = p;
  return 0;
}
size_t malloc_usable_size(void *p) { return p ? size_of(own(p, MALLOC)) : 0; }

#ifdef WITH_NEW
#define NEWS(name) void *name(size_t n) { void *p = make(0, n, NEW); if (!p) abort(); return p; }
#define NEWS_NOTHROW(name) void *name(size_t n, void *t) { (void)t; return make(0, n, NEW); }
#define DELETES(name) void name(void *p) { drop(p, NEW); }
#define DELETES_MORE(name) void name(void *p, size_t n) { (void)n; drop(p, NEW); }
NEWS(_Znwm) NEWS(_Znam)
NEWS_NOTHROW(_ZnwmRKSt9nothrow_t) NEWS_NOTHROW(_ZnamRKSt9nothrow_t)
DELETES(_ZdlPv) DELETES(_ZdaPv)
DELETES_MORE(_ZdlPvm) DELETES_MORE(_ZdaPvm)
DELETES_MORE(_ZdlPvRKSt9nothrow_t) DELETES_MORE(_ZdaPvRKSt9nothrow_t)
#endif
"""

#: Allocators that are installed, and those that are compiled here, by the options for it.
INSTALLED = ["jemalloc", "tcmalloc_minimal"]
COMPILED: dict[str, list[str]] = {"malloc": [], "malloc and new": ["-DWITH_NEW"]}

CODE = """
import os
import numpy
import truebridge as tb

tb.tensorflow.v1.open(os.environ["TRUEBRIDGE_TENSORFLOW1"])
for _ in range(3):
    x = numpy.arange(4096, dtype="float32")
    with tb.tensorflow.v1.Session(LINE, {"x": ("float32", [None])}, ["y", "x"]) as session:
        for _ in range(20):
            y, same = session.run({"x": x}, "numpy")
            assert y.tolist() == (2 * x + 1).tolist() and same.tolist() == x.tolist()
        # An error carries names that `__cxa_demangle` and `strdup` have made.
        try:
            session.run({"x": x.reshape(2, -1)})
        except tb.BridgeError as error:
            assert "x" in str(error)
        else:
            raise SystemExit("no error")
    try:
        tb.tensorflow.v1.Session(b"garbage", {}, ["y"])
    except tb.BridgeError:
        pass
import torch
view = tb.to_torch(y)
assert view.sum().item() == (2 * x + 1).sum()
del y, same, session
assert view[-1].item() == 2 * 4095 + 1
"""


#: A library of TensorFlow's name, which allocates with its own functions and frees with those of the process, and the
#: other way round, when it is loaded.
MIXED = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <malloc.h>
#include <stdlib.h>
#include <string.h>

typedef void *New(size_t);
typedef void *NewNothrow(size_t, const void *);
typedef void Delete(void *);
typedef void DeleteSized(void *, size_t);
New _Znwm, _Znam;
NewNothrow _ZnwmRKSt9nothrow_t, _ZnamRKSt9nothrow_t;
Delete _ZdlPv, _ZdaPv;
DeleteSized _ZdlPvm, _ZdaPvm;

__attribute__((constructor)) static void mix(void) {
  void *process = dlopen(NULL, RTLD_LAZY), *p;
  New *new = dlsym(process, "_Znwm"), *new_array = dlsym(process, "_Znam"), *allocate = dlsym(process, "malloc");
  Delete *delete = dlsym(process, "_ZdlPv"), *delete_array = dlsym(process, "_ZdaPv"), *give = dlsym(process, "free");
  give(malloc(10)), give(calloc(2, 5)), give(strdup("text")), give(memalign(128, 10)), give(aligned_alloc(64, 64));
  give(valloc(10)), give(pvalloc(10)), give(realloc(allocate(10), 20)), give(reallocarray(allocate(10), 2, 20));
  if (posix_memalign(&p, 64, 10) || malloc_usable_size(allocate(10)) < 10) abort();
  give(p), free(allocate(10)), free(strdup("text"));
  if (!new) return;
  delete(_Znwm(10)), delete_array(_Znam(10));
  delete(_ZnwmRKSt9nothrow_t(10, "")), delete_array(_ZnamRKSt9nothrow_t(10, ""));
  _ZdlPv(new(10)), _ZdaPv(new_array(10)), _ZdlPvm(new(10), 10), _ZdaPvm(new_array(10), 10);
}
"""


def library(name: str, folder: Path) -> str:
    """The allocator to be preloaded."""
    if name in INSTALLED:
        found = ctypes.util.find_library(name)
        if found is None:
            pytest.skip(f"lib{name} is not installed")
        return found
    compiled(folder / "shim.so", SHIM, "-O1", "-fno-builtin", "-w", *COMPILED[name])
    return str(folder / "shim.so")


def run(code: str, preloaded: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "LD_PRELOAD": preloaded}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)


@pytest.mark.parametrize("name", [*COMPILED, *INSTALLED])
def test_sessions_work_with_any_preloaded_allocator(name: str, tmp_path: Path) -> None:
    done = run(f"LINE = {line()!r}\n{CODE}", library(name, tmp_path))
    assert (done.returncode, done.stderr[-3000:]) == (0, "")


@pytest.mark.parametrize("name", COMPILED)
def test_all_functions_are_those_of_the_preloaded_allocator(name: str, tmp_path: Path) -> None:
    package = tmp_path / "package"
    (package / "python").mkdir(parents=True)
    for library_name in ("libtensorflow_framework.so.1", "python/_pywrap_tensorflow_internal.so"):
        compiled(package / library_name, MIXED, "-O1", "-fno-builtin", "-w", "-l:libstdc++.so.6", "-ldl")
    code = f"""
import truebridge as tb
try:
    tb.tensorflow.v1.open({str(package)!r})
except tb.BridgeError as error:
    assert "TF_Version" in str(error), error
else:
    raise SystemExit("no error")
"""
    done = run(code, library(name, tmp_path))
    assert (done.returncode, done.stderr[-3000:]) == (0, "")


# A result of TensorFlow's graphs is memory that nothing else has: no later run changes it, and it may be written.


graph = tb.tensorflow

#: What TensorFlow makes of a variable or of what is fed without a kernel that writes memory.
SHARING: dict[str, Callable[[Any], Any]] = {
    "itself": lambda x: x,
    "identity": tf.identity,
    "reshape": lambda x: tf.reshape(x, [2, 8]),
    "slice": lambda x: x[:16],
    "first rows": lambda x: tf.reshape(x, [4, 4])[1:3],
    "split": lambda x: tf.split(x, 2)[0],
    "unstack": lambda x: tf.unstack(tf.reshape(x, [2, 8]))[1],
    "bitcast": lambda x: tf.bitcast(x, tf.uint32),
    "branch": lambda x: tf.cond(tf.equal(tf.size(x), 16), lambda: tf.identity(x), lambda: x * 2),
    "expanded": lambda x: tf.squeeze(tf.expand_dims(x, 0)),
}


def variable(resource: bool) -> Any:
    initial = np.zeros(16, np.float32)
    return v1.get_variable("w", initializer=initial, use_resource=resource)


# --- sessions of 1.15


@pytest.mark.parametrize("how", SHARING)
@pytest.mark.parametrize("target", ["torch", "numpy", "tensorflow", None])
def test_a_result_of_a_session_is_not_what_was_fed(how: str, target: Any) -> None:
    x = aligned(np.arange(16, dtype=np.float32))
    built = saved(lambda: tf.identity(SHARING[how](placeholder(shape=[16])), name="y"))
    with on_host(built, {"x": FLOATS}, ["y", "x"]) as session:
        results = [tb.to_torch(y).numpy() for y in session.run({"x": x}, target, copy=False)]
    before = [y.copy() for y in results]
    x += 1
    assert all(np.array_equal(y, kept) for y, kept in zip(results, before, strict=True))
    expected = x.copy()
    results[1][:] = -1
    assert np.array_equal(x, expected)
    assert np.array_equal(results[0], before[0])


def test_a_result_is_not_the_constant_of_the_graph() -> None:
    with on_host(saved(lambda: tf.constant([1.0, 2.0, 3.0], name="y")), {}, ["y"]) as session:
        (first,) = session.run({}, "numpy")
        first[0] = 9
        assert session.run({}, "numpy")[0].tolist() == [1, 2, 3]


def test_two_results_do_not_share() -> None:
    def build() -> None:
        y = 2 * placeholder(shape=[None])
        tf.identity(y, name="y")
        tf.reshape(y, [2, 2], name="z")

    with on_host(saved(build), {"x": FLOATS}, ["y", "z", "y"]) as session:
        first, second, third = session.run({"x": np.ones(4, np.float32)}, "numpy")
    for i, result in enumerate((first, second, third)):
        result[:] = i
    assert (set(first.flat), set(second.flat), set(third.flat)) == ({0}, {1}, {2})


def test_results_of_a_run_with_copies_are_theirs_too() -> None:
    x = aligned(np.ones(16, np.float32))
    with on_host(saved(lambda: placeholder(shape=[None])), {"x": FLOATS}, ["x"]) as session:
        fed = tb.convert(x, "tensorflow1")
        for given in (x, fed):
            (result,) = session.run({"x": given}, "numpy", copy=True)
            result[:] = 5
    assert x.tolist() == [1] * 16


def test_a_result_outlives_the_state_that_keeps_what_was_fed() -> None:
    def build() -> None:
        queue = v1.FIFOQueue(4, [tf.float32], shapes=[[16]])
        queue.enqueue(placeholder(shape=[16]), name="put")
        with tf.control_dependencies([tf.group(queue.enqueue(v1.placeholder(tf.float32, [16], name="z")))]):
            tf.identity(queue.dequeue(), name="y")

    first, second = (aligned(np.full(16, i, np.float32)) for i in (1, 2))
    with on_host(saved(build), {"z": FLOATS}, ["y"]) as session:
        results = [session.run({"z": z}, "numpy")[0] for z in (first, second)]
    for result in results:
        result += 10
    assert (first[0], second[0], results[0][0], results[1][0]) == (1, 2, 11, 12)


@pytest.mark.parametrize("resource", [False, True])
@pytest.mark.parametrize("how", SHARING)
def test_a_result_is_not_the_variable_of_a_saved_model(tmp_path: Path, resource: bool, how: str) -> None:
    def build(w: Any) -> tuple[Any, ...]:
        with tf.control_dependencies([v1.assign_add(w, v1.placeholder(tf.float32, [16], name="more"))]):
            return SHARING[how](w.read_value()), tf.reduce_sum(w.read_value())

    with tf.Graph().as_default(), v1.Session(config=HOST) as own:
        w = variable(resource)
        y, total = build(w)
        own.run(v1.global_variables_initializer())
        builder = v1.saved_model.Builder(str(tmp_path / "model"))
        define = v1.saved_model.predict_signature_def
        more = tf.compat.v1.get_default_graph().get_tensor_by_name("more:0")
        signature = define({"more": more}, {"y": y, "total": total})
        builder.add_meta_graph_and_variables(own, ["serve"], {"serving_default": signature}, strip_default_attrs=True)
        builder.save()
    pb = tmp_path / "model/saved_model.pb"
    stripped = saved_model_pb2.SavedModel.FromString(pb.read_bytes())
    for node in stripped.meta_graphs[0].graph_def.node:
        node.attr.pop("debug_name", None)  # 1.15 does not know it
    pb.write_bytes(stripped.SerializeToString())
    ones = np.ones(16, np.float32)
    with tb.tensorflow.v1.Session.of_saved_model(tmp_path / "model", config=HOST) as session:
        totals, results = zip(*(session.run({"more": ones}, "torch") for _ in range(3)), strict=True)
        kept = [result.clone() for result in results]
        values = [float(result.view(tb_torch().float32).flatten()[0]) for result in results]
        assert (values, [float(total) for total in totals]) == ([1, 2, 3], [16, 32, 48])
        for result in results:
            result.zero_()
        assert float(session.run({"more": ones}, "torch")[0]) == 64
    assert all(
        bool((result == 0).all()) and not bool((old == 0).all()) for result, old in zip(results, kept, strict=True)
    )


def tb_torch() -> Any:
    return pytest.importorskip("torch")


# --- graphs of the program's own, of 2.x


@pytest.mark.parametrize("resource", [False, True])
@pytest.mark.parametrize("how", SHARING)
def test_an_output_is_the_value_of_its_run(resource: bool, how: str) -> None:
    with tf.Graph().as_default(), tf.device("CPU:0"), v1.Session(config=HOST) as session:
        w = variable(resource)
        y = graph.external_output(SHARING[how](w.read_value()))
        step = v1.assign_add(w, tf.ones(16)).op
        session.run(v1.global_variables_initializer())
        early = session.run(y)
        handles = []
        for _ in range(3):
            session.run(step)
            handles.append(session.run(y))
        results = [graph.take(handle, "numpy") for handle in [early, *handles]]
        values = [float(result.view(np.float32).flat[0]) for result in results]
        assert values == [0, 1, 2, 3]
        for result in results:
            result[...] = 0
        assert session.run(w).tolist() == [3] * 16


def test_a_reference_variable_can_be_an_output() -> None:
    with tf.Graph().as_default(), v1.Session(config=HOST) as session:
        w = variable(False)
        outputs = [graph.external_output(y) for y in (w, w._ref(), v1.assign_add(w, tf.ones(16)))]
        session.run(v1.global_variables_initializer())
        session.run(outputs[2])
        taken = [graph.take(session.run(y), "numpy") for y in outputs]
        assert [one[0] for one in taken] == [1, 1, 2]
        taken[0][:] = taken[1][:] = taken[2][:] = 9
        assert session.run(w).tolist() == [2] * 16


@pytest.mark.parametrize("how", SHARING)
def test_an_output_is_not_what_was_fed(how: str) -> None:
    x = aligned(np.arange(16, dtype=np.float32))
    with tf.Graph().as_default(), tf.device("CPU:0"), v1.Session(config=HOST) as session:
        given = graph.external_input(tf.float32, [16])
        y = graph.external_output(SHARING[how](given))
        fed = graph.feed(x, copy=False)
        result = graph.take(session.run(y, {graph.handle_of(given): fed}), "numpy")
    before = result.copy()
    x += 1
    assert np.array_equal(result, before)
    result[...] = 0
    assert x.tolist() == list(range(1, 17))


@pytest.mark.parametrize("how", SHARING)
def test_an_output_of_a_function_is_not_what_was_fed(how: str) -> None:
    x = aligned(np.arange(16, dtype=np.float32))

    @tf.function
    def function(handle: Any) -> Any:
        with tf.device("CPU:0"):
            return graph.external_output(SHARING[how](graph.external_input(tf.float32, [16], handle)))

    result = graph.take(function(graph.feed(x, copy=False)), "numpy")
    before = result.copy()
    x += 1
    assert np.array_equal(result, before)


def test_an_output_that_tensorflow_has_no_snapshot_of_is_not_what_was_fed() -> None:
    """It computes nothing in this dtype, so that the memory comes to the end of the graph as it was fed."""
    x = aligned(np.arange(16, dtype=np.uint8))
    given = x.view(tf.dtypes.experimental.float8_e5m2.as_numpy_dtype)

    def output(handle: Any) -> Any:
        with tf.device("CPU:0"):
            return graph.external_output(graph.external_input("float8_e5m2", [16], handle))

    fed = graph.feed(given, copy=False)
    results = [graph.take(tf.function(output)(fed), "numpy")]
    with tf.Graph().as_default(), v1.Session(config=HOST) as session:
        handle = graph.placeholder()
        results.append(graph.take(session.run(output(handle), {handle: fed}), "numpy"))
    x += 1
    assert all(result.view(np.uint8).tolist() == list(range(16)) for result in results)


@pytest.mark.parametrize("seed", range(50))
def test_random_graphs_return_what_a_session_of_tensorflow_returns(seed: int) -> None:
    assert random_graphs.case(seed) > 0


def test_random_graphs_on_a_gpu() -> None:
    pytest.importorskip("cupy")
    if not tf.config.list_physical_devices("GPU"):
        pytest.skip("TensorFlow has no GPU")
    assert sum(random_graphs.case(seed, cuda=True) for seed in range(100)) > 100
