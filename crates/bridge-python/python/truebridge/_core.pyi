from collections.abc import Callable, Sequence
from os import PathLike
from types import ModuleType
from typing import Any, Literal, Protocol, TypedDict, TypeVar, final, overload

# adapters: begin imports
import cupy
import jax
import numpy.typing
import paddle
import tensorflow
import torch

# adapters: end
from typing_extensions import NotRequired, Self, Unpack

from .diagnostics.progress import Progress

__version__: str
# A capsule: see include/truebridge_borrow.h.
borrow: object
# What docstrings say of the keywords of conversions.
KEYWORDS: str
# The frameworks, in an order in which all can be imported: the variable that names the folder of one, or None for one
# that Python imports.
FRAMEWORKS: dict[str, str | None]
# Their names by the other names that people use.
ALIASES: dict[str, str]

# A name, a torch.device, a cupy.cuda.Device, a jax.Device, or what __dlpack_device__ returns.
Device = str | tuple[int, int] | Any
Order = Literal["C", "F"]
# What elements are cast to.
_CastName = Literal["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"]
T = TypeVar("T")

# A dtype of NumPy or TensorFlow.
class _Named(Protocol):
    @property
    def name(self) -> str: ...

# A dtype of PyTorch.
class _Floating(Protocol):
    @property
    def is_floating_point(self) -> bool: ...

# A name, or a framework's object: the dtype, or the class of its scalars.
CastTo = _CastName | _Named | _Floating | type[Any]
# adapters: begin target
Target = Literal[
    "torch",
    "cupy",
    "numpy",
    "jax",
    "paddle",
    "tensorflow",
    "tensorflow1",
]
# adapters: end
"""The names of the frameworks: a ``Literal``, for what a program annotates. ``typing.get_args(Target)`` lists them."""

# A container of tensors. The result holds other leaves, so what is in it has no type here.
_Tree = TypeVar("_Tree", dict[Any, Any], list[Any], tuple[Any, ...])
_Tensor = TypeVar("_Tensor", covariant=True)

class Rank(TypedDict):
    start: int
    end: int

class Profile(TypedDict):
    name: str
    dtypes: list[str]
    disabled: NotRequired[tuple[list[str], str]]
    strides: Literal["any", "non_negative", "compact"]
    rank: NotRequired[Rank]
    alignment: int
    devices: list[str]
    keeps_read_only: bool
    waits_on_export: bool
    private_functions: bool

class Stats(TypedDict):
    leased: int
    released: int
    pending: int
    leaked: int
    unclaimed: int
    reclaimed: int

@final
class Plan:
    def __new__(
        cls, reason: str | None, nbytes: int, device: str, copied_by: str | None, advice: str | None = None
    ) -> Self: ...
    @property
    def zero_copy(self) -> bool: ...
    @property
    def reason(self) -> str | None: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def copied_by(self) -> Literal["kernels", "host", "move", "producer"] | None: ...
    @property
    def device(self) -> str: ...
    @property
    def advice(self) -> str | None: ...
    def _repr_html_(self) -> str: ...

# The keywords of every conversion.
class Keywords(TypedDict, total=False):
    copy: bool | None
    device: Device | None
    order: Order | None
    permute: Sequence[int] | None
    detach: bool
    via: Literal["host"] | None
    read_only: bool
    progress: Progress

class _To(Protocol[_Tensor]):
    @overload
    def __call__(self, x: _Tree, **keywords: Unpack[Keywords]) -> _Tree: ...
    @overload
    def __call__(self, x: Any, **keywords: Unpack[Keywords]) -> _Tensor: ...

# adapters: begin functions
to_torch: _To[torch.Tensor]
to_cupy: _To[cupy.ndarray]
to_numpy: _To[numpy.typing.NDArray[Any]]
to_jax: _To[jax.Array]
to_paddle: _To[paddle.Tensor]
to_tensorflow: _To[tensorflow.Tensor]
# adapters: end

@overload
def convert(x: _Tree, target: Target | ModuleType, **keywords: Unpack[Keywords]) -> _Tree: ...

# adapters: begin overloads
@overload
def convert(x: Any, target: Literal["torch"], **keywords: Unpack[Keywords]) -> torch.Tensor: ...
@overload
def convert(x: Any, target: Literal["cupy"], **keywords: Unpack[Keywords]) -> cupy.ndarray: ...
@overload
def convert(x: Any, target: Literal["numpy"], **keywords: Unpack[Keywords]) -> numpy.typing.NDArray[Any]: ...
@overload
def convert(x: Any, target: Literal["jax"], **keywords: Unpack[Keywords]) -> jax.Array: ...
@overload
def convert(x: Any, target: Literal["paddle"], **keywords: Unpack[Keywords]) -> paddle.Tensor: ...
@overload
def convert(x: Any, target: Literal["tensorflow"], **keywords: Unpack[Keywords]) -> tensorflow.Tensor: ...
@overload
def convert(x: Any, target: Literal["tensorflow1"], **keywords: Unpack[Keywords]) -> Tensor: ...

# adapters: end
@overload
def convert(x: Any, target: ModuleType, **keywords: Unpack[Keywords]) -> Any: ...
def convert_inside(x: Any, target: str, **keywords: Unpack[Keywords]) -> Any: ...
@overload
def plan(x: _Tree, target: Target | ModuleType, **keywords: Unpack[Keywords]) -> _Tree: ...
@overload
def plan(x: Any, target: Target | ModuleType, **keywords: Unpack[Keywords]) -> Plan: ...

@final
class Loan:
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...
    @property
    def __array_interface__(self) -> dict[str, Any]: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype_name(self) -> str: ...
    @property
    def stream(self) -> int | None: ...
    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...

@overload
def lend(
    x: _Tree,
    stream: Any = None,
    *,
    copy: bool | None = None,
    device: Device | None = None,
    order: Order | None = None,
    permute: Sequence[int] | None = None,
    detach: bool = False,
    read_only: bool = False,
) -> _Tree: ...
@overload
def lend(
    x: Any,
    stream: Any = None,
    *,
    copy: bool | None = None,
    device: Device | None = None,
    order: Order | None = None,
    permute: Sequence[int] | None = None,
    detach: bool = False,
    read_only: bool = False,
) -> Loan: ...
def lend_together(
    arguments: tuple[Any, ...], stream: Any, read_only: bool
) -> tuple[tuple[Any, ...], list[Loan], tuple[int, int] | None]: ...
def copy(src: Any, *, out: T, dtype: CastTo | None = None, progress: Progress = None) -> T: ...

@final
class Copier:
    def __call__(self) -> Any: ...
    def __len__(self) -> int: ...

def copier(src: Any, *, out: Any, dtype: CastTo | None = None, check: bool = True) -> Copier: ...
def record_stream(view: Any, stream: Any) -> None: ...
def profile(target: Target) -> Profile: ...
def stats() -> Stats: ...

@final
class Feed:
    @property
    def handle(self) -> list[int]: ...

def tensorflow_operations() -> None: ...
def tensorflow_feed(x: Any, copy: bool | None) -> Feed: ...
def tensorflow_take(handle: list[int], target: Target) -> Any: ...

@final
class JAXFeed:
    @property
    def handle(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def device(self) -> str: ...
    @property
    def read_only(self) -> bool: ...

def jax_feed(x: Any) -> JAXFeed: ...
def jax_targets() -> list[tuple[str, str, Any]]: ...

@final
class Tensor:
    @property
    def handle(self) -> list[int]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def device(self) -> str: ...
    @property
    def address(self) -> int: ...
    @property
    def read_only(self) -> bool: ...

@final
class Session:
    def __new__(
        cls,
        graph_def: bytes,
        inputs: list[tuple[str, str, list[int | None] | None, str | None]],
        outputs: list[str],
        memory_growth: bool | None,
        memory_fraction: float | None,
        visible_devices: list[int] | None,
        config: bytes | None,
    ) -> Session: ...
    @staticmethod
    def of_saved_model(
        folder: str,
        signature: str,
        tags: list[str],
        memory_growth: bool | None,
        memory_fraction: float | None,
        visible_devices: list[int] | None,
        config: bytes | None,
    ) -> Session: ...
    def run(self, feeds: list[tuple[str, Tensor]], target: Target | None) -> list[Tensor]: ...
    @property
    def outputs(self) -> list[str]: ...
    @property
    def devices(self) -> list[str]: ...
    def close(self) -> None: ...

def tensorflow1_open(folder: str | None) -> tuple[str, str]: ...

@final
class Ticket:
    def __new__(cls, text: str | bytes | Ticket) -> Ticket: ...
    @property
    def text(self) -> str: ...
    @property
    def remaining(self) -> int: ...
    def __bytes__(self) -> bytes: ...
    def _repr_html_(self) -> str: ...

@final
class Names:
    def __new__(cls, path: str | PathLike[str], persistent: bool, max_bytes: int | None) -> Names: ...
    def close(self) -> None: ...

@final
class Client:
    def __new__(cls, path: str | PathLike[str]) -> Client: ...
    def put(self, name: str, tensors: list[Any], tree: str | None, keep: int, writing: str | None) -> int: ...
    def get(self, name: str, version: int | None) -> tuple[int, Ticket]: ...
    def remove(self, name: str) -> None: ...
    def list(self) -> list[tuple[str, int, str]]: ...
    def about(self) -> tuple[bool, int, int]: ...
    def watch(self, name: str, after: int) -> Watch: ...
    def close(self) -> None: ...

@final
class Watch:
    def wait(self, time: float) -> tuple[int, Ticket] | None: ...

@final
class Publication:
    def __new__(cls, client: Client, name: str, tensors: list[Any], paths: list[str], slots: int) -> Publication: ...
    def update(self, tensors: list[Any], tree: str | None, time: float) -> None: ...
    def settled(self, time: float) -> int | None: ...
    def close(self) -> None: ...
    @property
    def version(self) -> int: ...

@final
class Subscription:
    def __new__(
        cls,
        client: Client,
        name: str,
        out: list[Any],
        tree: str | None,
        paths: list[str],
        matched: Callable[[str | None], list[int]],
        dtype: CastTo | None,
    ) -> Subscription: ...
    def refresh(self) -> int | None: ...
    @property
    def version(self) -> int: ...

def ipc_share(
    tensors: list[Any], tree: str | None, expires: float, writing: str | None, copy: bool | None
) -> Ticket: ...
def ipc_open(
    ticket: Ticket | str | bytes,
    target: Target,
    copy: bool | None,
    device: Device | None,
    order: Order | None,
    permute: Sequence[int] | None,
    read_only: bool,
) -> tuple[list[Any], str | None]: ...
def ipc_empty(specs: list[tuple[str, list[int]]], target: Target, device: Device) -> list[Any]: ...
def ipc_revoke(ticket: Ticket | str | bytes, told: bool) -> None: ...
def ipc_seconds(time: float) -> float: ...
def ipc_check_name(name: str, keep: int) -> None: ...
def ipc_configure(
    folder: str | PathLike[str] | None,
    users: Sequence[int],
    connections: int | None,
    shares: int | None,
    leases: int | None,
    nbytes: int | None,
) -> None: ...
def ipc_close() -> None: ...
def ipc_transport(tensor: object, writing: object) -> Literal["passed", "handle", "files", "pool", "copy"]: ...
def ipc_held() -> tuple[int, int, int, int]: ...
def debug_set(on: bool) -> None: ...
def debug_poisoned() -> int: ...
def trace_open(limit: int) -> int: ...
def trace_read(id: int) -> tuple[int, list[dict[str, Any]]]: ...
def trace_close(id: int) -> None: ...
def trace_nvtx(libraries: list[str]) -> str | None: ...
