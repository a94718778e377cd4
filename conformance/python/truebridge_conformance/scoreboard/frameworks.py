"""The frameworks: a row for each, or for each kind of device. A row has lines of Python: programs are made of them.

In a line ``$t`` is the tensor, ``$on`` the device, ``$v`` a value, and ``$capsule`` a capsule of the producer's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

HOST, GPU = "cpu", "cuda"

#: Protocols. A capsule is one that the producer's own function makes.
DLPACK, CAPSULE, INTERFACE = "dlpack", "capsule", "interface"


@dataclass(frozen=True, eq=False)
class Framework:
    """How a framework's tensors are made, read and taken."""

    name: str
    label: str
    #: The modules that are installed where it is, and its distributions.
    modules: tuple[str, ...]
    distributions: tuple[str, ...]
    on: tuple[str, ...]
    imports: tuple[str, ...]
    #: A tensor of float32 with the elements 0 to 11 in three rows.
    made: str
    #: A tensor of 256 elements ``$v``: one block of threads.
    full: str
    #: Four ones of the dtype ``name``, and what has to be imported for that.
    typed: str
    #: Its elements as a list of Python, as an array of NumPy, and the name of its dtype.
    list: str
    array: str
    dtype: str = "$t.dtype.name"
    shape: str = "tuple($t.shape)"
    typed_imports: tuple[str, ...] = ()
    #: Its address, where it says it.
    pointer: str | None = None
    #: Statement: write ``$v`` to all elements, where tensors change.
    fill: str | None = None
    #: Whether it writes to every tensor that it has taken: some of NumPy's are read-only.
    changes_all: bool = False
    #: Other tensors by what is special to them, from the tensor ``$t`` of ``made``: strides, or a read-only one.
    special: Mapping[str, str] = field(default_factory=dict)
    #: Tensors whose memory is aligned to 64 bytes, where ``full`` is not.
    aligned: str | None = None
    #: How long it takes to start, compared with the others.
    starts: int = 0
    #: What its tensors export, by protocol: an expression for a capsule, else the tensor itself.
    exports: Mapping[str, str] = field(default_factory=dict)
    #: Its documented functions for tensors of others, by protocol, the preferred first.
    takes: Mapping[str, str] = field(default_factory=dict)
    #: The same with ``copy=$v``, and with the host as the device.
    takes_copy: str | None = None
    takes_to_host: str | None = None
    #: The same calls by truebridge. ``ours_ordered`` names the stream, where the others do not.
    ours: str = ""
    ours_copy: str | None = None
    ours_to_host: str | None = None
    ours_ordered: str | None = None
    #: On a GPU: a context with its own stream, what is defined once for the statements, and these: ``slow`` keeps
    #: the stream busy for some 40 ms, ``write`` makes the elements of ``x`` be ``$v``, ``copied`` makes ``z`` a copy of
    #: ``y``. All of them return at once. Where there is no ``slow``, the two others take as long.
    stream: str | None = None
    before: tuple[str, ...] = ()
    slow: str | None = None
    write: str | None = None
    copied: str = "z = y + 0"
    #: Whether a tensor is on a GPU, where the framework may do without one and say nothing.
    placed: str = ""
    #: Statement: the host waits for the work on ``x``.
    wait: str = ""


NUMPY = "import numpy as np"
ML_DTYPES = ("import ml_dtypes",)
STRIDED = {"transposed": "$t.T", "stepped": "$t[:, ::2]", "offset": "$t[1:]"}
NAMED = "getattr(ml_dtypes, name, name)"

SPIN = (
    'spin = cupy.RawKernel(\'extern "C" __global__ void f() { long long t = clock64(); '
    'while (clock64() - t < 80000000); }\', "f")'
)

FRAMEWORKS = (
    Framework(
        name="torch",
        label="PyTorch",
        modules=("torch",),
        distributions=("torch",),
        on=(HOST, GPU),
        imports=("import torch",),
        made='torch.arange(12.0, device="$on").reshape(3, 4)',
        full='torch.full((256,), $v, device="$on")',
        typed='torch.ones(4, dtype=getattr(torch, name), device="$on")',
        list="$t.tolist()",
        array="$t.cpu().numpy()",
        dtype="str($t.dtype)[6:]",
        pointer="$t.data_ptr()",
        changes_all=True,
        fill="$t.fill_($v)",
        special={
            **STRIDED,
            "broadcast": "$t[:1].expand(3, 4)",
            "empty": 'torch.empty((0, 3), device="$on")',
            "scalar": 'torch.tensor(7.0, device="$on")',
            "deferred": 'torch.tensor([1 + 2j, 3 + 4j], device="$on").conj().imag',
        },
        exports={DLPACK: "$t", INTERFACE: "$t", CAPSULE: "torch.utils.dlpack.to_dlpack($t)"},
        takes={DLPACK: "torch.from_dlpack($t)", INTERFACE: 'torch.as_tensor($t, device="cuda")'},
        takes_copy="torch.from_dlpack($t, copy=$v)",
        takes_to_host='torch.from_dlpack($t, device="cpu")',
        ours="tb.to_torch($t)",
        ours_copy="tb.to_torch($t, copy=$v)",
        ours_to_host='tb.to_torch($t, device="cpu")',
        stream="torch.cuda.stream(torch.cuda.Stream())",
        slow="torch.cuda._sleep(80_000_000)",
        write="x.fill_($v)",
        wait="torch.cuda.synchronize()",
    ),
    Framework(
        name="jax",
        label="JAX",
        modules=("jax",),
        distributions=("jax",),
        on=(HOST, GPU),
        imports=("import jax", "import jax.numpy as jnp"),
        made='jnp.arange(12, dtype="float32").reshape(3, 4)',
        full='jnp.full(256, $v, "float32")',
        typed="jnp.ones(4, name)",
        typed_imports=('jax.config.update("jax_enable_x64", True)',),
        list="$t.tolist()",
        array="jax.device_get($t)",
        pointer="$t.unsafe_buffer_pointer()",
        special={
            "empty": 'jnp.zeros((0, 3), "float32")',
            "scalar": 'jnp.array(7.0, "float32")',
            "read-only": 'jnp.zeros(256, "float32")',
        },
        exports={DLPACK: "$t", INTERFACE: "$t", CAPSULE: "$t.__dlpack__()"},
        takes={DLPACK: "jax.dlpack.from_dlpack($t)", INTERFACE: "jnp.asarray($t)"},
        takes_copy="jax.dlpack.from_dlpack($t, copy=$v)",
        takes_to_host='jax.dlpack.from_dlpack($t, device=jax.devices("cpu")[0])',
        ours="tb.to_jax($t)",
        ours_copy="tb.to_jax($t, copy=$v)",
        ours_to_host='tb.to_jax($t, device="cpu")',
        before=(
            'work, w = jax.jit(lambda w: w @ w), jnp.full((8192, 8192), 1 / 8192, "float32")',
            "work(w).block_until_ready()",
        ),
        slow="for _ in range(20): w = work(w)",
        write='x = jnp.full(256, $v, "float32")',
        placed='$t.device.platform == "gpu"',
        starts=1,
        wait="jax.block_until_ready(x)",
    ),
    Framework(
        name="cupy",
        label="CuPy",
        modules=("cupy",),
        distributions=("cupy-cuda13x", "cupy-cuda12x", "cupy"),
        on=(GPU,),
        imports=("import cupy",),
        made='cupy.arange(12, dtype="float32").reshape(3, 4)',
        full='cupy.full(256, $v, "float32")',
        typed=f"cupy.ones(4, {NAMED})",
        typed_imports=ML_DTYPES,
        list="$t.tolist()",
        array="$t.get()",
        pointer="$t.data.ptr",
        changes_all=True,
        fill="$t.fill($v)",
        special={
            **STRIDED,
            "negative": "$t[::-1]",
            "broadcast": "cupy.broadcast_to($t[0], (3, 4))",
            "empty": 'cupy.empty((0, 3), "float32")',
            "scalar": 'cupy.array(7.0, "float32")',
        },
        exports={DLPACK: "$t", INTERFACE: "$t", CAPSULE: "$t.__dlpack__()"},
        takes={DLPACK: "cupy.from_dlpack($t)", INTERFACE: "cupy.asarray($t)"},
        takes_copy="cupy.from_dlpack($t, copy=$v)",
        ours="tb.to_cupy($t)",
        ours_copy="tb.to_cupy($t, copy=$v)",
        stream="cupy.cuda.Stream(non_blocking=True)",
        before=(SPIN,),
        slow="spin((1,), (1,), ())",
        write="x.fill($v)",
        wait="cupy.cuda.Device().synchronize()",
    ),
    Framework(
        name="numpy",
        label="NumPy",
        modules=("numpy",),
        distributions=("numpy",),
        on=(HOST,),
        imports=(NUMPY,),
        made='np.arange(12, dtype="float32").reshape(3, 4)',
        full='np.full(256, $v, "float32")',
        typed=f"np.ones(4, {NAMED})",
        typed_imports=ML_DTYPES,
        list="$t.tolist()",
        array="$t",
        pointer="$t.ctypes.data",
        fill="$t.fill($v)",
        special={
            **STRIDED,
            "negative": "$t[::-1]",
            "broadcast": "np.lib.stride_tricks.as_strided($t, strides=(0, 4))",
            "empty": 'np.empty((0, 3), "float32")',
            "scalar": 'np.array(7.0, "float32")',
            "read-only": 'np.zeros(256, "float32"); x.flags.writeable = False',
            "byte order": 'np.arange(4, dtype=">f4")',
        },
        aligned='np.zeros(272, "float32"); x = x[-x.ctypes.data % 64 // 4 :][:256]',
        exports={DLPACK: "$t", CAPSULE: "$t.__dlpack__()"},
        takes={DLPACK: "np.from_dlpack($t)"},
        takes_copy="np.from_dlpack($t, copy=$v)",
        takes_to_host='np.from_dlpack($t, device="cpu")',
        ours="tb.to_numpy($t)",
        ours_copy="tb.to_numpy($t, copy=$v)",
        ours_to_host='tb.to_numpy($t, device="cpu")',
    ),
    Framework(
        name="warp",
        label="Warp",
        modules=("warp",),
        distributions=("warp-lang",),
        on=(HOST, GPU),
        imports=(NUMPY, "import warp as wp", "wp.init()"),
        made='wp.array(np.arange(12.0).reshape(3, 4), dtype=wp.float32, device="$on")',
        full='wp.full(256, $v, dtype=wp.float32, device="$on")',
        typed='wp.ones(4, dtype=getattr(wp, name), device="$on")',
        list="$t.numpy().tolist()",
        array="$t.numpy()",
        dtype="$t.dtype.__name__",
        pointer="$t.ptr",
        changes_all=True,
        fill="$t.fill_($v)",
        special={**STRIDED, "transposed": "$t.transpose()", "empty": 'wp.zeros((0, 3), device="$on")'},
        exports={DLPACK: "$t", INTERFACE: "$t", CAPSULE: "wp.to_dlpack($t)"},
        takes={DLPACK: "wp.from_dlpack($t)", INTERFACE: 'wp.array($t, copy=False, device="cuda")'},
        ours="wp.from_dlpack(tb.lend($t))",
        ours_ordered="wp.from_dlpack(tb.lend($t, stream=wp.get_stream()))",
        stream='wp.ScopedStream(wp.Stream("cuda"))',
        before=(
            "@wp.kernel",
            "def spin(a: wp.array(dtype=float)):",
            "    for _ in range(800000): a[0] = wp.sin(a[0])",
            'a = wp.ones(1, device="cuda")',
        ),
        slow='wp.launch(spin, 1, [a], device="cuda")',
        write="x.fill_($v)",
        copied="z = wp.clone(y)",
        wait="wp.synchronize()",
    ),
    Framework(
        name="numba",
        label="Numba",
        modules=("numba",),
        distributions=("numba-cuda", "numba"),
        on=(GPU,),
        imports=(NUMPY, "from numba import cuda"),
        made='cuda.to_device(np.arange(12, dtype="float32").reshape(3, 4))',
        full='cuda.to_device(np.full(256, $v, "float32"))',
        typed=f"cuda.to_device(np.ones(4, {NAMED}))",
        typed_imports=ML_DTYPES,
        list="$t.copy_to_host().tolist()",
        array="$t.copy_to_host()",
        pointer='$t.__cuda_array_interface__["data"][0]',
        fill='$t.copy_to_device(np.full(256, $v, "float32"))',
        special={"stepped": "$t[:, ::2]", "offset": "$t[1:]", "empty": 'cuda.device_array((0, 3), "float32")'},
        exports={INTERFACE: "$t"},
        takes={INTERFACE: "cuda.as_cuda_array($t)"},
        ours="cuda.as_cuda_array(tb.lend($t))",
        ours_ordered="cuda.as_cuda_array(tb.lend($t, stream=s))",
        before=(
            "@cuda.jit",
            "def late(out, a):",
            "    v = 0.0",
            "    for _ in range(8000000): v = v * 0.5 + 1.0",
            "    out[cuda.grid(1)] = a[cuda.grid(1)] + 0 * v",
            "s = cuda.stream()",
        ),
        write='late[1, 256, s](x, cuda.to_device(np.full(256, $v, "float32"))); x = x.bind(s)',
        copied='z = cuda.device_array(256, "float32", stream=s); late[1, 256, s](z, y)',
        wait="cuda.synchronize()",
    ),
    Framework(
        name="tvm-ffi",
        label="tvm-ffi",
        modules=("tvm_ffi",),
        distributions=("apache-tvm-ffi",),
        on=(HOST,),
        imports=(NUMPY, "import tvm_ffi"),
        made='tvm_ffi.from_dlpack(np.arange(12, dtype="float32").reshape(3, 4))',
        full='tvm_ffi.from_dlpack(np.full(256, $v, "float32"))',
        typed=f"tvm_ffi.from_dlpack(np.ones(4, {NAMED}))",
        typed_imports=ML_DTYPES,
        list="np.from_dlpack($t).tolist()",
        array="np.from_dlpack($t)",
        dtype="str($t.dtype)",
        pointer="$t.data_ptr()",
        fill="np.from_dlpack($t).fill($v)",
        special={
            **{
                name: 'tvm_ffi.from_dlpack(np.arange(12, dtype="float32").reshape(3, 4)' + view + ")"
                for name, view in {"transposed": ".T", "stepped": "[:, ::2]", "offset": "[1:]"}.items()
            },
            "negative": 'tvm_ffi.from_dlpack(np.arange(12, dtype="float32").reshape(3, 4)[::-1])',
            "empty": 'tvm_ffi.from_dlpack(np.empty((0, 3), "float32"))',
            "scalar": 'tvm_ffi.from_dlpack(np.array(7.0, "float32"))',
        },
        aligned='np.zeros(272, "float32"); x = tvm_ffi.from_dlpack(x[-x.ctypes.data % 64 // 4 :][:256])',
        exports={DLPACK: "$t", CAPSULE: "$t.__dlpack__()"},
        takes={DLPACK: "tvm_ffi.from_dlpack($t)"},
        ours="tvm_ffi.from_dlpack(tb.lend($t))",
    ),
    Framework(
        name="tvm-ffi",
        label="tvm-ffi",
        modules=("tvm_ffi", "cupy"),
        distributions=("apache-tvm-ffi",),
        on=(GPU,),
        imports=("import cupy", "import tvm_ffi"),
        made='tvm_ffi.from_dlpack(cupy.arange(12, dtype="float32").reshape(3, 4))',
        full='tvm_ffi.from_dlpack(cupy.full(256, $v, "float32"))',
        typed=f"tvm_ffi.from_dlpack(cupy.ones(4, {NAMED}))",
        typed_imports=ML_DTYPES,
        list="cupy.from_dlpack($t).tolist()",
        array="$t.get()",
        dtype="str($t.dtype)",
        pointer="$t.data_ptr()",
        fill="cupy.from_dlpack($t).fill($v)",
        special={
            **{
                name: 'tvm_ffi.from_dlpack(cupy.arange(12, dtype="float32").reshape(3, 4)' + view + ")"
                for name, view in {"transposed": ".T", "stepped": "[:, ::2]", "offset": "[1:]"}.items()
            },
            "empty": 'tvm_ffi.from_dlpack(cupy.empty((0, 3), "float32"))',
            "scalar": 'tvm_ffi.from_dlpack(cupy.array(7.0, "float32"))',
        },
        exports={DLPACK: "$t", CAPSULE: "$t.__dlpack__()"},
        takes={DLPACK: "tvm_ffi.from_dlpack($t)"},
        ours="tvm_ffi.from_dlpack(tb.lend($t, stream=cupy.cuda.get_current_stream()))",
        stream='cupy.cuda.Stream(non_blocking=True) as s, tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 0), s.ptr)',
        before=(SPIN,),
        slow="spin((1,), (1,), ())",
        write="cupy.from_dlpack(x).fill($v)",
        copied="z = cupy.from_dlpack(y) + 0",
        wait="cupy.cuda.Device().synchronize()",
    ),
    Framework(
        name="onnxruntime",
        label="ONNX Runtime",
        modules=("onnxruntime",),
        distributions=("onnxruntime-gpu", "onnxruntime"),
        on=(HOST,),
        imports=(NUMPY, "from onnxruntime import OrtValue"),
        made='OrtValue.ortvalue_from_numpy(np.arange(12, dtype="float32").reshape(3, 4))',
        full='OrtValue.ortvalue_from_numpy(np.full(256, $v, "float32"))',
        typed=f"OrtValue.ortvalue_from_numpy(np.ones(4, {NAMED}))",
        typed_imports=ML_DTYPES,
        list="$t.numpy().tolist()",
        array="$t.numpy()",
        dtype="$t.numpy().dtype.name",
        shape="tuple($t.shape())",
        pointer="$t.data_ptr()",
        fill='$t.update_inplace(np.full(256, $v, "float32"))',
        special={
            "empty": 'OrtValue.ortvalue_from_numpy(np.empty((0, 3), "float32"))',
            "scalar": 'OrtValue.ortvalue_from_numpy(np.array(7.0, "float32"))',
        },
        aligned='np.zeros(272, "float32"); x = OrtValue.ortvalue_from_numpy(x[-x.ctypes.data % 64 // 4 :][:256])',
        exports={DLPACK: "$t", CAPSULE: "$t.__dlpack__()"},
        takes={DLPACK: "OrtValue.from_dlpack($t)"},
        ours="tb.to_onnxruntime($t)",
        ours_copy="tb.to_onnxruntime($t, copy=$v)",
    ),
    # The last: what is imported after it may find its stubs of CUDA's libraries.
    Framework(
        name="tensorflow",
        label="TensorFlow",
        modules=("tensorflow",),
        distributions=("tensorflow",),
        on=(HOST, GPU),
        imports=("import tensorflow as tf",),
        made="tf.constant([[0.0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]])",
        full="tf.fill([256], $v)",
        typed="tf.cast(tf.ones(4), name)",
        list="$t.numpy().tolist()",
        array="$t.numpy()",
        special={
            "empty": "tf.zeros((0, 3))",
            "scalar": "tf.constant(7.0)",
            "read-only": "tf.zeros(256)",
        },
        exports={DLPACK: "$t", CAPSULE: "tf.experimental.dlpack.to_dlpack($t)"},
        takes={CAPSULE: "tf.experimental.dlpack.from_dlpack($capsule)"},
        ours="tb.to_tensorflow($t)",
        ours_copy="tb.to_tensorflow($t, copy=$v)",
        ours_to_host='tb.to_tensorflow($t, device="cpu")',
        # Numbers of Python would be copied to the GPU, for which the host waits.
        before=("w, numbers = tf.fill((8192, 8192), 1 / 8192), tf.unstack(tf.range(1000.0))",),
        slow="for _ in range(20): w = w @ w",
        write="x = tf.fill([256], numbers[$v])",
        copied="z = tf.raw_ops.DeepCopy(x=y)",
        placed='"GPU" in $t.device',
        starts=2,
        wait="tf.test.experimental.sync_devices()",
    ),
)

#: What stands before the import of a framework on a GPU: its symbols stay out of the scope of the others.
APART = {"tensorflow": 'import sys; sys.modules["tensorflow.python.pywrap_dlopen_global_flags"] = None'}

#: What is set for each run, in the order of the page: memory as it is needed, and few threads.
ENVIRONMENT = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
}

#: The same for programs on the host: they see no GPU.
ON_THE_HOST = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}


def rows(on: str) -> list[Framework]:
    """Return the frameworks that have tensors on a kind of device."""
    return [row for row in FRAMEWORKS if on in row.on]


def labels() -> dict[str, str]:
    """Return what the frameworks are called, by name."""
    return {row.name: row.label for row in FRAMEWORKS}
