"""PyTorch."""

from __future__ import annotations

from typing import Any

from .table import SMALL, Example, Framework, Side


def _build(torch: Any) -> str:
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    hip = getattr(torch.version, "hip", None)
    return f"ROCm {hip}" if hip else "CPU"


def _devices(torch: Any) -> int:
    if torch.version.cuda and not torch.cuda.is_available():
        # Says why, where ``is_available`` says only that.
        torch.cuda.init()
    return int(torch.cuda.device_count()) if torch.version.cuda else 0


def _side(torch: Any, index: int | None) -> Side:
    device = torch.device("cpu") if index is None else torch.device("cuda", index)
    return Side(
        of_host=torch.from_numpy if index is None else lambda array: torch.from_numpy(array).to(device),
        to_host=(lambda x: x.numpy()) if index is None else lambda x: x.cpu().numpy(),
        capsule=torch.utils.dlpack.to_dlpack,
        of_dlpack=torch.from_dlpack,
        transposed=lambda x: x.t().contiguous(),
        wait=(lambda: None) if index is None else lambda: torch.cuda.synchronize(device),
    )


FRAMEWORK = Framework(
    label="PyTorch",
    alias="pytorch",
    tensor="torch.Tensor",
    kind=("torch", "Tensor"),
    install="https://pytorch.org/get-started names the build for the driver's version of CUDA",
    example=Example("import torch", "torch.ones(3)", "torch.Size([3])"),
    build=_build,
    devices=_devices,
    small=lambda torch, kind, index: torch.zeros(SMALL, device=torch.device(kind, index)),
    side=_side,
    settings=lambda torch: {"allocator": str(torch.cuda.get_allocator_backend())} if torch.version.cuda else {},
    unshared={"cudaMallocAsync": "leave `backend:cudaMallocAsync` out of PYTORCH_CUDA_ALLOC_CONF"},
)
