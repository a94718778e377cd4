"""Compiles a file with NVRTC into a folder: a cubin or PTX per architecture.

``cargo xtask generate kernels`` runs it in an environment with one package, ``nvidia-cuda-nvrtc-cu12``, without a GPU.
"""

import argparse
import ctypes
import pathlib
from concurrent.futures import ThreadPoolExecutor


def library() -> ctypes.CDLL:
    """Loads NVRTC from the package of NVIDIA."""
    import nvidia

    folder = next(path for root in nvidia.__path__ for path in pathlib.Path(root).glob("cuda_nvrtc/lib"))
    # NVRTC opens its built-in functions by name, and finds those that are loaded.
    ctypes.CDLL(str(next(folder.glob("libnvrtc-builtins.so.*"))), ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(next(folder.glob("libnvrtc.so.*"))))


def text(nvrtc: ctypes.CDLL, kind: str, program: ctypes.c_void_p) -> bytes:
    """Returns the log, the cubin or the PTX of a program, as NVRTC spells them."""
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{kind}")(program, buffer)
    return buffer.raw


def compile(nvrtc: ctypes.CDLL, source: pathlib.Path, architecture: str, out: pathlib.Path) -> None:
    """Writes the kernels for one architecture, or ends with the log of the compiler."""
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
    if architecture.startswith("sm_"):
        (out / f"{architecture}.cubin").write_bytes(text(nvrtc, "CUBIN", program))
    else:
        (out / f"{architecture}.ptx").write_bytes(text(nvrtc, "PTX", program))


def main() -> None:
    """Compiles for the architectures that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("architectures", nargs="+", metavar="architecture")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    nvrtc = library()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda one: compile(nvrtc, options.source, one, options.out), options.architectures))


if __name__ == "__main__":
    main()
