"""The sentences that the properties rest on, word for word, as read on 2026-11-25."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sentence:
    """A sentence, and the page that it stands on. Without one, users expect the property and no text demands it."""

    text: str
    source: str = ""
    link: str = ""


SPECIFICATION = ("DLPack, Python specification", "https://dmlc.github.io/dlpack/latest/python_spec.html")
HEADER = ("dlpack.h", "https://github.com/dmlc/dlpack/blob/main/include/dlpack/dlpack.h")
_PAGES = "https://data-apis.org/array-api/latest/"
FROM_DLPACK = ("array API, from_dlpack", f"{_PAGES}API_specification/generated/array_api.from_dlpack.html")
DLPACK_METHOD = ("array API, __dlpack__", f"{_PAGES}API_specification/generated/array_api.array.__dlpack__.html")
INTERCHANGE = ("array API, data interchange", f"{_PAGES}design_topics/data_interchange.html")
INTERFACE_PAGE = (
    "CUDA Array Interface, version 3",
    "https://nvidia.github.io/numba-cuda/user/cuda_array_interface.html",
)

#: Stands where no text demands what users expect.
EXPECTATION = "no sentence: users' expectation"

CONTAINS = Sentence("an array containing the data in x", *FROM_DLPACK)
DTYPES = Sentence("Support for all dtypes in this API standard", *INTERCHANGE)
SMALL = Sentence("IEEE floating point … bfloat16 … FP8 data types", *HEADER)
LAYOUT = Sentence("DLPack describes the memory layout of dense, strided, n-dimensional arrays.", *SPECIFICATION)
STRIDES = Sentence(
    "Otherwise, a tuple of int (or long) is explicitly given for representing the number of bytes to skip to access "
    "the next element at each dimension.",
    *INTERFACE_PAGE,
)
EMPTY = Sentence(
    "If the array is of size zero, the data pointer in DLTensor should be set to either NULL or 0.", *SPECIFICATION
)
INTERFACE_EMPTY = Sentence("For zero-size arrays, use 0 here.", *INTERFACE_PAGE)
SCALAR = Sentence("When ndim == 0, shape can be set to NULL.", *HEADER)
ALIGNMENT = Sentence(
    "at the moment it is recommended to not rely on the data pointer being correctly aligned.", *HEADER
)
VIEW = Sentence("If possible, this must be zero-copy (i.e. y will be a view on x).", *SPECIFICATION)
ALWAYS_COPY = Sentence("If True, the function must always copy.", *FROM_DLPACK)
NEVER_COPY = Sentence(
    "If False, the function must never copy, and raise BufferError in case a copy is deemed necessary", *FROM_DLPACK
)
READ_ONLY = Sentence(
    f"{EXPECTATION}. DLPack has a flag “to indicate that the tensor is read only”, and the array API leaves it to the "
    "user: “A consumer that does not support read-only arrays should ignore this flag (this is preferred over raising "
    "an exception; the user is then responsible for ensuring the memory isn't modified).” A warning is enough, as "
    "torch.from_numpy makes of an array that is not writable. It says that the memory is read-only or immutable, or "
    "speaks of writing.",
    *DLPACK_METHOD,
)
BOTH = Sentence("Both x and y may continue to be used just like arrays created in other ways.", *SPECIFICATION)
DELETER = Sentence(
    "The DLManagedTensor deleter must ensure that sharing beyond Python boundaries is possible, this means that the "
    "GIL must be acquired explicitly if it uses Python objects or API.",
    *SPECIFICATION,
)
ONCE = Sentence(
    "which will be consumed immediately within from_dlpack - therefore it is consumed exactly once", *SPECIFICATION
)
UNSUPPORTED = Sentence(
    "If an array that is accessed via the interchange protocol lives on a device that the requesting (consumer) "
    "library does not support, it is recommended to raise a BufferError, unless an explicit copy is requested",
    *SPECIFICATION,
)
TO_HOST = Sentence(
    "a compliant library should offer a way for from_dlpack to return an array whose underlying memory is accessible "
    "to the Python interpreter, when the corresponding device is provided.",
    *FROM_DLPACK,
)
ENDIANNESS = Sentence(
    "An explicit error message should be raised when attempting to export an array with non-native endianness", *HEADER
)
HANDOFF = Sentence(
    "The consumer must pass the stream it will use to the producer; the producer must synchronize or wait on the "
    "stream when necessary.",
    *SPECIFICATION,
)
INTERFACE_HANDOFF = Sentence(
    "its value indicates the stream on which the Producer may have in-progress operations on the data, and which the "
    "Consumer is expected to either: Synchronize on before accessing the data, or Enqueue operations in when accessing "
    "the data.",
    *INTERFACE_PAGE,
)
RELEASE = Sentence(
    "When the borrowing framework doesn't need the tensor, it should call the deleter to notify the host that the "
    "resource is no longer needed.",
    *HEADER,
)
INTERFACE_RELEASE = Sentence(
    "then it must ensure that no computation can take place in the provided stream until its operations in its own "
    "choice of stream have taken place.",
    *INTERFACE_PAGE,
)
INTERFACE_DATA = Sentence(
    f"{EXPECTATION}. The CUDA Array Interface describes the memory, and says of its contents nothing more."
)

#: All of them.
EVERY = tuple(one for one in list(vars().values()) if isinstance(one, Sentence))

#: What a property rests on instead, where tensors are converted by the CUDA Array Interface.
BY_INTERFACE = {
    **dict.fromkeys((CONTAINS, DTYPES, SMALL, ALIGNMENT, SCALAR, VIEW, UNSUPPORTED), INTERFACE_DATA),
    LAYOUT: STRIDES,
    EMPTY: INTERFACE_EMPTY,
    HANDOFF: INTERFACE_HANDOFF,
    RELEASE: INTERFACE_RELEASE,
}
