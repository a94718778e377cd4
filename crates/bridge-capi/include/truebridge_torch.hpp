// Converters for at::Tensor. Included by truebridge.hpp.
#ifndef TRUEBRIDGE_TORCH_HPP
#define TRUEBRIDGE_TORCH_HPP

#include <ATen/DLConvertor.h>
#include <dlfcn.h>

#include "truebridge.hpp"

namespace truebridge {

static_assert(sizeof(DLManagedTensorVersioned) == sizeof(dlpack::managed), "as in PyTorch's dlpack.h");

// Returns what PyTorch takes in place.
inline const target &torch_target() {
  static const target known{
      "torch",
      {{6, 8, 1},  {0, 8, 1},  {0, 16, 1}, {0, 32, 1}, {0, 64, 1},  {1, 8, 1},  {1, 16, 1},
       {1, 32, 1}, {1, 64, 1}, {2, 16, 1}, {2, 32, 1}, {2, 64, 1},  {4, 16, 1}, {5, 32, 1},
       {5, 64, 1}, {5, 128, 1}, {10, 8, 1}, {11, 8, 1}, {12, 8, 1}, {13, 8, 1}, {14, 8, 1}},
      {1, 2},
      TB_STRIDES_NON_NEGATIVE,
      true,  // PyTorch has no read-only tensors
      1};
  return known;
}

// Returns PyTorch's current stream of a device: 0 on the host.
inline uint64_t torch_stream(tb_device device) {
  if (device.kind != 2) return 0;
  using current = int32_t (*)(int32_t, void **);
  static const auto function = reinterpret_cast<current>(dlsym(RTLD_DEFAULT, "aoti_torch_get_current_cuda_stream"));
  void *stream = nullptr;
  if (function == nullptr || function(device.index, &stream) != 0) {
    throw error(TB_MISSING, "libtorch has no current CUDA stream in this process: link libtorch_cuda");
  }
  return reinterpret_cast<uintptr_t>(stream);
}

// Shares a tensor of PyTorch, whose work is in PyTorch's current stream. A deferred conjugation or negation is done by
// PyTorch, in a copy, unless copy is TB_COPY_NEVER.
inline tensor from_torch(const at::Tensor &shared, tb_copy copy = TB_COPY_IF_NEEDED) {
  if (!shared.defined()) throw error(TB_NOT_A_TENSOR, "the tensor is undefined: pass one with elements");
  if (shared.layout() != at::kStrided || shared.is_quantized()) {
    throw error(TB_NOT_A_TENSOR, "the tensor has no strided memory: call to_dense() or dequantize() first");
  }
  if (shared.requires_grad()) throw error(TB_REQUIRES_GRAD, "the tensor requires grad: call detach() first");
  if (copy == TB_COPY_NEVER && (shared.is_conj() || shared.is_neg())) {
    throw error(TB_COPY_NEEDED, "a conjugation or negation is deferred: call resolve_conj() and resolve_neg() first");
  }
  // A separate tensor over the same storage: operations such as set_data() give the original another storage.
  const at::Tensor held = shared.detach().resolve_conj().resolve_neg();
  try {
    managed owned(reinterpret_cast<dlpack::managed *>(at::toDLPackVersioned(held)));
    const uint64_t stream = torch_stream(owned->tensor.device);
    return tensor(std::move(owned), stream);
  } catch (const c10::Error &refused) {
    throw error(TB_NOT_A_TENSOR, refused.what_without_backtrace());
  }
}

// Returns a tensor of PyTorch over the memory, in place where PyTorch can take it, for PyTorch's current stream. The
// owner waits for that stream when the last view is dropped: for work in other streams call used first.
inline at::Tensor to_torch(const tensor &from, const options &requests = {}) {
  const tb_device device = from.plan(torch_target(), requests).device;
  managed owned = from.transfer(torch_target(), requests, torch_stream(device));
  try {
    at::Tensor view = at::fromDLPackVersioned(reinterpret_cast<DLManagedTensorVersioned *>(owned.get()));
    owned.release();
    return view;
  } catch (const c10::Error &refused) {
    throw error(TB_FRAMEWORK, refused.what_without_backtrace());
  }
}

}  // namespace truebridge

#endif  // TRUEBRIDGE_TORCH_HPP
