"""Bad input gets a typed error that says what to do next, and the process lives on."""

from __future__ import annotations

import functools
import importlib.util
import io
import json
import pickle
import subprocess
import sys
import tempfile
import typing
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import truebridge as tb

torch: Any = pytest.importorskip("torch")


def fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(3)


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def csr() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.eye(3).to_sparse_csr()


REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "number": (lambda: 3, TypeError, "int is not a tensor"),
    "list": (lambda: [1, 2], TypeError, "list is not a tensor"),
    "numpy scalar": (lambda: object(), TypeError, "not a tensor"),
    "requires grad": (lambda: torch.ones(3, requires_grad=True), BufferError, "detach"),
    "sparse": (lambda: torch.eye(3).to_sparse(), TypeError, "to_dense"),
    "sparse rows": (csr, TypeError, "to_dense"),
    "meta": (lambda: torch.ones(3, device="meta"), TypeError, "meta"),
    "fake": (fake, TypeError, "plain tensor"),
    "nested": (nested, TypeError, "to_padded_tensor"),
    "quantised": (
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        TypeError,
        "dequantize",
    ),
    "quantised bits": (lambda: torch.ones(3, dtype=torch.uint8).view(torch.quint8), TypeError, r"view\(torch.uint8\)"),
    "bits": (lambda: torch.ones(4, dtype=torch.uint8).view(torch.bits16), TypeError, r"view\(torch.uint8\)"),
    "65 dimensions": (lambda: torch.zeros([1] * 65), BufferError, "65 dimensions has more than 64"),
    "zero tensor": (lambda: torch._efficientzerotensor((3,)), TypeError, "has no memory "),
    "functionalised": (lambda: torch._to_functional_tensor(torch.ones(3)), TypeError, "has no memory "),
    "masked": (lambda: np.ma.masked_array([1.0, 2.0], [0, 1]), TypeError, "filled"),
    "strings": (lambda: np.array(["a"]), TypeError, "counterpart"),
    "objects": (lambda: np.array([object()]), TypeError, "counterpart"),
    "dates": (lambda: np.array(["2026-01-01"], "datetime64[D]"), TypeError, "counterpart"),
    "byte order": (lambda: np.ones(3, ">f4"), TypeError, "newbyteorder"),
    "long double": (lambda: np.ones(3, np.longdouble), TypeError, "counterpart"),
}


OVERWRITTEN = "overwritten by a subsequent run. Stack trace: here. To prevent overwriting, clone the tensor"


def output() -> Any:
    """Return a tensor as PyTorch leaves an output of a CUDA graph that a later run has overwritten."""
    tensor = torch.ones(4)
    torch._C._set_storage_access_error_msg(tensor, OVERWRITTEN)
    return tensor


def view_of_an_output() -> Any:
    """Return another tensor over the storage of such an output."""
    tensor = torch.ones(4)
    torch._C._set_storage_data_ptr_access_error_msg(tensor.untyped_storage()._cdata, OVERWRITTEN)
    return tensor[1:]


@pytest.mark.parametrize("make", [output, view_of_an_output])
def test_memory_that_pytorch_gives_no_access_to_is_refused_in_its_words(
    make: Callable[[], Any], capfd: pytest.CaptureFixture[str]
) -> None:
    tensor = make()
    for call in (
        lambda: tb.to_numpy(tensor),
        lambda: tb.to_torch([tensor], copy=True),
        lambda: tb.plan(tensor, "numpy"),
        lambda: tb.lend(tensor),
        lambda: tb.share(tensor),
        lambda: tb.copy(tensor, out=np.zeros(4, np.float32)),
        lambda: tb.copy(np.zeros(4, np.float32), out=tensor),
    ):
        with pytest.raises(tb.BridgeRuntimeError) as caught:
            call()
        assert f"torch gives no access to the memory of this tensor: {OVERWRITTEN}" in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_a_view_is_not_reused_once_pytorch_gives_no_access_to_its_memory() -> None:
    tensor = torch.ones(4)
    views = [tb.to_numpy(tensor) for _ in range(3)]
    torch._C._set_storage_data_ptr_access_error_msg(tensor.untyped_storage()._cdata, OVERWRITTEN)
    with pytest.raises(tb.BridgeRuntimeError, match="overwritten"):
        tb.to_numpy(tensor)
    assert views[0].tolist() == [1] * 4


@pytest.mark.parametrize("name", [f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8)])
def test_dtypes_of_less_than_a_byte_are_refused(name: str) -> None:
    """PyTorch exports them as int8 and uint8."""
    if not hasattr(torch, name):
        pytest.skip("this version does not have it")
    bytes_ = torch.arange(4, dtype=torch.uint8)
    narrow = bytes_.view(getattr(torch, name))
    for call in (
        lambda: tb.to_numpy(narrow),
        lambda: tb.to_torch(narrow),
        lambda: tb.to_numpy({"a": [narrow]}, copy=True),
        lambda: tb.plan(narrow, "numpy"),
        lambda: tb.share(narrow),
        lambda: tb.copy(narrow, out=bytes_),
        lambda: tb.copy(np.zeros(4, np.int8), out=narrow),
    ):
        with pytest.raises(tb.BridgeDTypeError, match=rf"torch\.{name} has no .*view\(torch\.u?int8\)"):
            call()
    assert tb.to_numpy(narrow.view(torch.uint8)).tolist() == [0, 1, 2, 3]


def distributed() -> Any:
    """Return a DTensor, in a group of only this process."""
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        return distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Replicate()])
    finally:
        torch.distributed.destroy_process_group()


def collective() -> Any:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return AsyncCollectiveTensor(torch.ones(2))


def jagged() -> Any:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


def masked() -> Any:
    return torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False]))


SUBCLASSES: dict[str, tuple[Callable[[], Any], str]] = {
    "DTensor": (distributed, r"\.full_tensor\(\).*\.to_local\(\)"),
    "AsyncCollectiveTensor": (collective, r"\.wait\(\)"),
    "NestedTensor": (jagged, r"\.values\(\)"),
    "MaskedTensor": (masked, r"\.get_data\(\)"),
}


@pytest.mark.parametrize("name", SUBCLASSES)
@pytest.mark.filterwarnings("ignore")
def test_subclasses_of_torch_are_refused_with_the_call_for_their_memory(name: str) -> None:
    make, advice = SUBCLASSES[name]
    tensor = make()
    target = torch.ones(2)
    for call in (tb.to_numpy, tb.to_torch, tb.share, tb.lend, lambda x: tb.copy(x, out=target)):
        with pytest.raises(tb.BridgeTypeError, match=f"^{name} has no memory: call {advice}"):
            call(tensor)
    with pytest.raises(tb.BridgeTypeError, match=f"the target: {name} has no memory: "):
        tb.copy(target, out=tensor)


def at(name: str, data: bytes) -> Any:
    """Load a file with these bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_bytes(data)
        return tb.load(path, "numpy")


def ticket(**others: Any) -> Any:
    """Open a ticket with other fields."""
    return tb.open(json.dumps({**json.loads(tb.share(np.ones(3)).text), **others}), "numpy")


def named(use: Callable[[Any], Any]) -> Any:
    """Use a server of names."""
    with tempfile.TemporaryDirectory() as folder, tb.serve(Path(folder, "names")) as names:
        return use(names)


def twice(mode: Any) -> Any:
    with mode, mode:
        pass


def closed(names: Any) -> Any:
    publication = names.publish("x", np.ones(3))
    publication.close()
    publication.update()


def archive(*members: tuple[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, data in members:
            made.writestr(name, data)
    return file.getvalue()


class Beyond:
    __array_interface__: ClassVar = {"version": 3, "typestr": "<f4", "shape": (9,), "data": bytearray(8)}


ONES: Any = np.ones(3)

TOLD: dict[str, tuple[Callable[[], object], str, str]] = {
    "a map": (lambda: tb.to_torch(map(abs, [])), "not_a_tensor", "pass list(x), a list of tensors"),
    "a file": (lambda: tb.to_torch(sys.__stderr__), "not_a_tensor", "truebridge.load(path, target)"),
    "a dataset": (lambda: tb.to_numpy(torch.utils.data.TensorDataset(torch.ones(2))), "not_a_tensor", "pass x.tensors"),
    "a class as the target": (lambda: tb.convert(ONES, torch.Tensor), "argument", "the target is a class"),
    "ONNX Runtime": (lambda: tb.convert(ONES, "onnxruntime"), "argument", "call to_onnxruntime(x)"),
    "a device as the target": (lambda: tb.convert(ONES, "cuda"), "argument", "named by device=; choose one of"),
    "a dtype as the target": (lambda: tb.convert(ONES, "float32"), "argument", "keeps the dtype; choose one of"),
    "half a character": (lambda: tb.convert(ONES, "\ud800"), "argument", "holds half of a surrogate pair"),
    "a container of views": (lambda: tb.record_stream([torch.ones(3)], 1), "argument", "record each of its tensors"),
    "a stream below zero": (lambda: tb.record_stream(torch.ones(3), -3), "argument", "-3 is not a CUDA stream"),
    "a path as a session": (lambda: tb.to_onnxruntime(ONES, "model.onnx"), "argument", "session is a str: pass"),
    "an interface beyond its buffer": (lambda: tb.to_torch(Beyond()), "protocol", "reaches beyond its buffer"),
    "an empty file": (lambda: at("x.npy", b""), "file", "the file is empty"),
    "a format of tomorrow": (lambda: at("x.npy", b"\x93NUMPY\x09\x00" + bytes(99)), "file", "save it as version 1.0"),
    "half a header": (lambda: at("x.npy", b"\x93NUMPY\x01\x00\x76\x00{'d"), "file", "the header is malformed"),
    "another format": (lambda: at("x.npz", b"hello " * 9), "file", "truncated, malformed or of another format"),
    "an archive of PyTorch": (lambda: at("x.npz", archive(("x/data.pkl", b""))), "file", "torch.load reads"),
    "two members of one name": (
        lambda: at("x.npz", archive(("x.npy", b""), ("x.npy", b""))),
        "file",
        "two members have",
    ),
    "writing='rw'": (lambda: tb.share(ONES, writing="rw"), "argument", 'writing is "private", "never" or'),
    "a share for ages": (lambda: tb.share(ONES, expires=9.9e18), "argument", "pass a shorter time"),
    "an isolated share in place": (lambda: tb.share(ONES, isolated=True, copy=False), "argument", "leave copy=False"),
    "a word for leases": (lambda: tb.revoke("x", leases="no"), "argument", "pass True or False"),
    "one user": (lambda: tb.processes.configure(users=3), "argument", "users must be several numbers"),
    "a token of three letters": (lambda: ticket(token="abc"), "argument", "a token is 32 hexadecimal digits"),
    "a socket next to the program": (lambda: ticket(socket="x.sock"), "argument", "not an absolute path"),
    "a long ticket": (lambda: ticket(about="x" * 999), "argument", "it is longer than 512 bytes"),
    "a long path of names": (lambda: tb.serve("/tmp/" + "x" * 200), "argument", "a path of at most"),
    "a file as names": (lambda: tb.serve(__file__), "argument", "another file has this path: name another"),
    "no name": (lambda: named(lambda names: names.put("", ONES)), "argument", "is not a name: one has 1 to"),
    "a number as a name": (lambda: named(lambda names: names.put(3, ONES)), "argument", "a name must be a str"),
    "a name that is not there": (lambda: named(lambda names: names.get("x", "numpy")), "gone", "put tensors under it"),
    "a tree as a name": (lambda: named(lambda names: names.publish([ONES], "w")), "argument", "the name comes first"),
    "an update after the end": (lambda: named(closed), "gone", "publish again"),
    "a trace in itself": (lambda: twice(tb.trace()), "argument", "call trace() again for another"),
    "a debug mode in itself": (lambda: twice(tb.debug()), "argument", "call debug() again for another"),
    "a number as a function": (lambda: tb.autograd.torch_function(3), "argument", "an object of type int is not"),
}
if importlib.util.find_spec("tensorflow") is not None:
    TOLD |= {
        "a text as a handle": (lambda: tb.tensorflow.take("x", "numpy"), "argument", "is not a handle"),
        "a pickled module": (lambda: pickle.dumps(tb.autograd.torch_function(len)), "argument", "its state_dict()"),
    }
if importlib.util.find_spec("jax") is not None:
    wrapped: Any = functools.partial(tb.autograd.torch_function, len, of="jax")
    TOLD["a text in a tree"] = (lambda: wrapped(variables={"w": "x"}), "not_a_tensor", "expected jax.Array")


@pytest.mark.parametrize("name", TOLD)
def test_a_mistake_has_an_error_that_names_it(name: str) -> None:
    mistake, kind, text = TOLD[name]
    with pytest.raises(tb.BridgeError) as caught:
        mistake()
    assert (caught.value.kind, text in str(caught.value)) == (kind, True), caught.value


@pytest.mark.parametrize("target", ["torch", "numpy"])
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_converted_is_refused(case: str, target: str) -> None:
    make, builtin, words = REFUSED[case]
    for call in (tb.convert, tb.plan):
        with pytest.raises(tb.BridgeError, match=words) as caught:
            call(make(), target)
        assert isinstance(caught.value, builtin)


def test_arguments_are_checked() -> None:
    tensor = torch.ones(3)
    with pytest.raises(tb.BridgeValueError, match="choose one of " + ", ".join(typing.get_args(tb.Target))):
        tb.convert(tensor, "caffe")
    with pytest.raises(tb.BridgeValueError, match="not on cuda:1") as caught:
        tb.to_numpy(tensor, device="cuda:1")
    assert caught.value.kind == "device"
    with pytest.raises(tb.BridgeValueError, match="is not a device"):
        tb.to_numpy(tensor, device="over there")
    with pytest.raises(tb.BridgeValueError, match="copy is 'yes': pass True, False, or None"):
        tb.to_numpy(tensor, copy="yes")
    with pytest.raises(TypeError):
        tb.to_numpy(tensor, None)
    assert tb.to_numpy(tensor, device="cpu").tolist() == [1, 1, 1]


def test_record_stream_wants_a_stream() -> None:
    class Event:
        ptr = 7

    array = tb.to_numpy(torch.ones(3))
    tb.record_stream(array, 1)
    capsule = torch.ones(3).__dlpack__()
    with pytest.raises(tb.BridgeValueError, match="consumes"):
        tb.record_stream(capsule, 1)
    assert tb.to_numpy(capsule).shape == (3,)
    with pytest.raises(tb.BridgeValueError, match="not a CUDA stream"):
        tb.record_stream(array, Event())
    with pytest.raises(tb.BridgeValueError, match="not a CUDA stream"):
        tb.record_stream(array, "stream")
    with pytest.raises(tb.BridgeTypeError):
        tb.record_stream(3, 1)


def test_what_is_no_ordinary_error_stays_what_it_is() -> None:
    class Producer:
        def __init__(self, error: BaseException) -> None:
            self.error = error

        def __dlpack_device__(self) -> tuple[int, int]:
            raise self.error

        def __dlpack__(self) -> object:
            raise AssertionError("never reached")

    for error in (KeyboardInterrupt(), SystemExit(3), MemoryError("full")):
        with pytest.raises(type(error)) as caught:
            tb.to_numpy(Producer(error))
        assert caught.value is error


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_the_first_look_does_not_depend_on_the_default_device(device: str, program: Any) -> None:
    done = program(
        f"""
import torch, numpy, truebridge as tb
torch.set_default_device({device!r})
assert "float64" in tb.profile("torch")["dtypes"]
assert tb.to_torch(numpy.ones(3)).tolist() == [1, 1, 1]
"""
    )
    assert done.returncode == 0, done.stderr


def test_memory_that_pytorch_has_not_is_an_error_as_elsewhere(program: Any) -> None:
    done = program(
        """
        import resource, numpy as np, torch, truebridge as tb
        big = np.zeros(1 << 26, np.uint8)
        tb.to_torch(big[:4][::-1])
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (20 << 20),) * 2)
        try:
            tb.to_torch(big[::-1])
        except tb.BridgeMemoryError as error:
            print(error.kind == "out_of_memory", "can't allocate memory" in str(error))
        """
    )
    assert (done.returncode, done.stdout) == (0, "True True\n"), done.stderr


def test_a_broken_framework_is_no_mere_producer(program: Any) -> None:
    done = program(
        """
import torch, truebridge as tb
def broken():
    raise OSError("broken")
torch.cuda.device_count = broken
z = torch.tensor([1 + 2j]).conj().imag
try:
    tb.to_numpy(z)
except tb.BridgeRuntimeError as error:
    assert "broken" in str(error), error
else:
    raise SystemExit("no error")
"""
    )
    assert done.returncode == 0, done.stderr


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("module", "package"),
    [("torch", "torch"), ("numpy", "numpy"), ("cupy", "cupy-cuda13x"), ("tensorflow", "tensorflow")],
)
def test_a_missing_framework_is_named(module: str, package: str) -> None:
    other = "numpy" if module != "numpy" else "torch"
    done = run(
        f"""
import sys
sys.modules[{module!r}] = None
import {other}, truebridge as tb
try:
    tb.convert({other}.ones(3), {module!r})
except tb.BridgeImportError as error:
    assert isinstance(error, ImportError)
    assert "pip install {package}" in str(error), error
else:
    raise SystemExit("no error")
"""
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
def test_cupy_without_a_gpu() -> None:
    done = run(
        """
import os
os.environ["CUDA_VISIBLE_DEVICES"] = ""
import numpy, truebridge as tb
try:
    tb.to_cupy(numpy.ones(3))
except tb.BridgeImportError as error:
    assert "no CUDA device" in str(error), error
else:
    raise SystemExit("no error")
"""
    )
    assert done.returncode == 0, done.stderr


def test_errors_are_bridge_errors_and_built_ins() -> None:
    pairs = [
        (tb.BridgeTypeError, TypeError),
        (tb.BridgeValueError, ValueError),
        (tb.BridgeBufferError, BufferError),
        (tb.BridgeImportError, ImportError),
        (tb.BridgeRuntimeError, RuntimeError),
    ]
    for error, builtin in pairs:
        assert issubclass(error, tb.BridgeError)
        assert issubclass(error, builtin)


def test_what_cannot_be_exported_is_a_buffer_error() -> None:
    """The array API wants one of ``from_dlpack``."""
    for array in (np.zeros(2, "datetime64[s]"), np.zeros(2, ">f4")):
        with pytest.raises(BufferError) as caught:
            tb.to_numpy(array)
        assert isinstance(caught.value, tb.BridgeTypeError | tb.BridgeValueError)


# Limits of the system that are reached in the middle of a call: each is an error that names the limit.


#: Runs in a child for each case, all at once: where a server of names gets no answer, it waits for five seconds.
DESCRIPTORS = """
import itertools, os, resource, sys, tempfile, traceback

def result(what, left, loaded):
    import numpy as np, truebridge as tb
    if loaded:
        tb.processes
    folder = tempfile.mkdtemp()
    os.environ["TRUEBRIDGE_IPC"] = folder + "/ipc"
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    files = []
    while True:
        try:
            files.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            break
    for file in files[:left]:
        os.close(file)
    try:
        made = tb.share(np.ones(3)) if what == "share" else tb.serve(folder + "/names")
    except tb.BridgeError as error:
        assert isinstance(error, MemoryError) and error.kind == "out_of_memory", repr(error)
        assert "ulimit -n" in str(error), error
        return "refused"
    return "made"

cases = list(itertools.product(("share", "serve"), range(6), (True, False)))
children = []
for case in cases:
    children.append(os.fork())
    if children[-1] == 0:
        try:
            print(case[1], result(*case), flush=True)
        except BaseException:
            print(case, traceback.format_exc(), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
assert [os.waitpid(child, 0)[1] for child in children] == [0] * len(cases)
"""


def test_without_descriptors_the_limit_is_named(program: Any) -> None:
    done = program(DESCRIPTORS)
    # Libraries may complain of files that they cannot open.
    assert done.returncode == 0, done.stderr
    results = [tuple(line.split()) for line in done.stdout.splitlines()]
    # How many it takes depends on the system, but none is too few and ten would do.
    assert len(results) == 24 and ("0", "made") not in results, results


def test_a_limit_of_file_sizes_is_named(program: Any) -> None:
    done = program("""
        import resource
        import numpy as np, truebridge as tb
        tb.share(np.ones(3))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        try:
            tb.share(np.ones(1 << 20))
        except tb.BridgeMemoryError as error:
            assert error.kind == "out_of_memory" and "ulimit -f" in str(error), error
            print("refused")
    """)
    assert (done.stdout, done.stderr) == ("refused\n", "")


def test_memory_of_the_host_that_runs_out_in_pytorch_is_a_memory_error(program: Any) -> None:
    done = program("""
        import numpy as np, torch, truebridge as tb
        # No machine has that much.
        array = np.lib.stride_tricks.as_strided(np.zeros(1), (1 << 44,), (0,))
        for call in (tb.to_torch, tb.to_numpy):
            try:
                call(array, copy=True)
            except MemoryError as error:
                print(getattr(error, "kind", None), type(error.__cause__).__name__)
        try:
            tb.to_torch({"a": [array]}, copy=True)
        except tb.BridgeMemoryError as error:
            print(str(error)[:12], error.kind)
    """)
    assert done.stderr == ""
    assert done.stdout == "out_of_memory RuntimeError\nNone NoneType\ntree['a'][0] out_of_memory\n"


#: Opens a ticket in another process.
OPENED = """
import os, shutil, subprocess, sys, tempfile, time
import numpy as np, truebridge as tb
folder = tempfile.mkdtemp()
os.environ["TRUEBRIDGE_IPC"] = folder + "/ipc"
OPEN = "import sys, truebridge as tb; print(tb.open(sys.argv[1], 'numpy')[0])"
def opened(ticket):
    done = subprocess.run([sys.executable, "-c", OPEN, ticket.text], capture_output=True, text=True)
    return done.stdout.strip() or done.stderr[-300:]
first = tb.share(np.ones(3))
assert opened(first) == "1.0", opened(first)
"""

SOCKETS = {
    "folder": "shutil.rmtree(folder + '/ipc')",
    "socket": "[os.remove(entry) for entry in os.scandir(folder + '/ipc')]",
    "descriptors": "os.closerange(3, 4096)",
    "descriptors of others": """
os.closerange(3, 4096)
others = [open(f"{folder}/{number}", "w+b") for number in range(16)]
""",
}


def test_a_ticket_of_a_socket_that_was_removed_is_revoked(program: Any) -> None:
    done = program(f"""{OPENED}{SOCKETS["folder"]}
second = tb.share(np.full(3, 2.0))
assert tb.processes.held()["shares"] == 2
tb.revoke(first)
assert tb.processes.held()["shares"] == 1
tb.revoke(second, leases=False)
""")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("what", SOCKETS)
def test_a_socket_that_the_program_took_away_is_made_again(what: str, program: Any) -> None:
    done = program(f"""{OPENED}{SOCKETS[what]}
second = tb.share(np.full(3, 2.0))
assert opened(second) == "2.0", opened(second)
tb.revoke(second)
third = tb.share(np.full(3, 3.0))
assert opened(third) == "3.0", opened(third)
tb._core.ipc_close()
for entry in os.scandir(folder):
    assert entry.is_dir() or entry.stat().st_size == 0, "nothing was written to a file of the program"
""")
    assert (done.returncode, done.stderr) == (0, "")
