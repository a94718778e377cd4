"""Compiles a file with NVRTC: into PTX, or into a fatbinary with a cubin or PTX for each architecture.

``cargo xtask generate kernels`` runs it, without a GPU, in an environment with ``nvidia-cuda-nvrtc-cu12`` and
``nvidia-nvfatbin-cu12``.
"""

import argparse
import ctypes
import pathlib
from concurrent.futures import ThreadPoolExecutor


def library(package: str, name: str) -> ctypes.CDLL:
    """Loads a library from a package of NVIDIA."""
    import nvidia

    folder = next(path for root in nvidia.__path__ for path in pathlib.Path(root).glob(f"{package}/lib"))
    # NVRTC opens its built-in functions by name, and finds those that are loaded.
    for builtins in folder.glob("*-builtins.so.*"):
        ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(next(folder.glob(f"{name}.so.*"))))


def text(nvrtc: ctypes.CDLL, kind: str, program: ctypes.c_void_p) -> bytes:
    """Returns the log, the cubin or the PTX of a program, as NVRTC spells them."""
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{kind}")(program, buffer)
    return buffer.raw


def compile(nvrtc: ctypes.CDLL, source: pathlib.Path, architecture: str) -> bytes:
    """Returns the kernels for one architecture, or ends with the log of the compiler."""
    names = sorted(path.name for path in source.parent.glob("*.cuh"))
    headers = [(source.parent / name).read_bytes() for name in names]
    program = ctypes.c_void_p()
    strings = ctypes.c_char_p * len(names)
    nvrtc.nvrtcCreateProgram(
        ctypes.byref(program),
        source.read_bytes(),
        source.name.encode(),
        len(names),
        strings(*headers),
        strings(*(name.encode() for name in names)),
    )
    options = [f"--gpu-architecture={architecture}".encode(), b"-std=c++17"]
    failed = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    if failed:
        raise SystemExit(text(nvrtc, "ProgramLog", program).decode())
    return text(nvrtc, "CUBIN" if architecture.startswith("sm_") else "PTX", program)


def fatbinary(images: dict[str, bytes]) -> bytes:
    """Puts cubins and PTX into one image, compressed so that every driver reads it (LZ4)."""
    nvfatbin = library("nvfatbin", "libnvfatbin")
    image, options = ctypes.c_void_p(), (b"-64", b"-compress-all", b"-compress-mode=speed")

    def call(name: str, *arguments: object) -> None:
        if failed := getattr(nvfatbin, name)(*arguments):
            raise SystemExit(f"{name} returned {failed}")

    strings = (ctypes.c_char_p * len(options))(*options)
    call("nvFatbinCreate", ctypes.byref(image), strings, ctypes.c_size_t(len(options)))
    for architecture, code in images.items():
        kind, number = architecture.split("_")
        add = ("nvFatbinAddCubin", ()) if kind == "sm" else ("nvFatbinAddPTX", (b"",))
        call(add[0], image, code, ctypes.c_size_t(len(code)), number.encode(), b"kernels", *add[1])
    size = ctypes.c_size_t()
    call("nvFatbinSize", image, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    call("nvFatbinGet", image, buffer)
    return buffer.raw


def main() -> None:
    """Compiles for the architectures that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path, help="a file that ends with .ptx, for one architecture, or .fatbin")
    parser.add_argument("architectures", nargs="+", metavar="architecture")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    nvrtc = library("cuda_nvrtc", "libnvrtc")
    with ThreadPoolExecutor(2) as pool:
        images = list(pool.map(lambda one: compile(nvrtc, options.source, one), options.architectures))
    is_ptx = options.out.suffix == ".ptx"
    options.out.write_bytes(images[0] if is_ptx else fatbinary(dict(zip(options.architectures, images, strict=True))))


if __name__ == "__main__":
    main()
