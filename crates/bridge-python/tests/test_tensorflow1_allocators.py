"""TensorFlow 1.15 in processes whose memory allocator is another one, by ``LD_PRELOAD``, as servers have it."""

from __future__ import annotations

import ctypes.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from graphs import line

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

tb.tensorflow1.open(os.environ["TRUEBRIDGE_TENSORFLOW1"])
for _ in range(3):
    x = numpy.arange(4096, dtype="float32")
    with tb.tensorflow1.Session(LINE, {"x": ("float32", [None])}, ["y", "x"]) as session:
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
        tb.tensorflow1.Session(b"garbage", {}, ["y"])
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
    return compiled(folder / "shim.so", SHIM, *COMPILED[name])


def compiled(path: Path, source: str, *options: str) -> str:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    command = [compiler, "-shared", "-fPIC", "-O1", "-fno-builtin", "-w", "-x", "c", "-", "-o", str(path), *options]
    subprocess.run(command, input=source, text=True, check=True, timeout=60)
    return str(path)


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
        compiled(package / library_name, MIXED, "-l:libstdc++.so.6", "-ldl")
    code = f"""
import truebridge as tb
try:
    tb.tensorflow1.open({str(package)!r})
except tb.BridgeError as error:
    assert "TF_Version" in str(error), error
else:
    raise SystemExit("no error")
"""
    done = run(code, library(name, tmp_path))
    assert (done.returncode, done.stderr[-3000:]) == (0, "")
