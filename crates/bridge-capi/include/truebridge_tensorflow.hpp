// Converters for TF_Tensor, in host memory. Included by truebridge.hpp.
#ifndef TRUEBRIDGE_TENSORFLOW_HPP
#define TRUEBRIDGE_TENSORFLOW_HPP

#include <tensorflow/c/tf_tensor.h>

#include "truebridge.hpp"

namespace truebridge {

struct tf_delete {
  void operator()(TF_Tensor *owned) const noexcept { TF_DeleteTensor(owned); }
};

// A TF_Tensor with its owner.
using tf_tensor = std::unique_ptr<TF_Tensor, tf_delete>;

struct tf_row {
  TF_DataType code;
  tb_dtype dtype;
};

// The dtypes that TensorFlow and DLPack share, without those of less than a byte.
inline const std::vector<tf_row> &tf_dtypes() {
  static const std::vector<tf_row> known{
      {TF_FLOAT, {2, 32, 1}},      {TF_DOUBLE, {2, 64, 1}},         {TF_INT32, {0, 32, 1}},
      {TF_UINT8, {1, 8, 1}},       {TF_INT16, {0, 16, 1}},          {TF_INT8, {0, 8, 1}},
      {TF_COMPLEX64, {5, 64, 1}},  {TF_INT64, {0, 64, 1}},          {TF_BOOL, {6, 8, 1}},
      {TF_BFLOAT16, {4, 16, 1}},   {TF_UINT16, {1, 16, 1}},         {TF_COMPLEX128, {5, 128, 1}},
      {TF_HALF, {2, 16, 1}},       {TF_UINT32, {1, 32, 1}},         {TF_UINT64, {1, 64, 1}},
      {TF_FLOAT8_E5M2, {12, 8, 1}}, {TF_FLOAT8_E4M3FN, {10, 8, 1}},
  };
  return known;
}

// Returns what TensorFlow takes in place.
inline const target &tf_target() {
  static const target known = [] {
    target made{"tensorflow", {}, {1}, TB_STRIDES_COMPACT, false, 64};
    for (const tf_row &row : tf_dtypes()) made.dtypes.push_back(row.dtype);
    return made;
  }();
  return known;
}

// Takes over a TF_Tensor in host memory.
inline tensor from_tensorflow(tf_tensor owned) {
  if (!owned) throw error(TB_ARGUMENT, "the TF_Tensor is NULL");
  const TF_DataType code = TF_TensorType(owned.get());
  for (const tf_row &row : tf_dtypes()) {
    if (row.code != code) continue;
    std::vector<int64_t> shape;
    for (int d = 0; d < TF_NumDims(owned.get()); ++d) shape.push_back(TF_Dim(owned.get(), d));
    tb_memory memory{};
    memory.data = TF_TensorData(owned.get());
    memory.shape = shape.data();
    memory.ndim = static_cast<int32_t>(shape.size());
    memory.dtype = row.dtype;
    memory.device = host;
    return tensor(memory, std::move(owned));
  }
  throw error(TB_DTYPE, "the TF_DataType " + std::to_string(code) +
                            " has no counterpart: cast or decode the tensor in TensorFlow first");
}

// Returns a TF_Tensor over the memory, in place where TensorFlow can take it.
inline tf_tensor to_tensorflow(const tensor &from, const options &requests = {}) {
  managed owned = from.transfer(tf_target(), requests);
  const dlpack::tensor &view = owned->tensor;
  size_t nbytes = view.dtype.bits / 8;
  for (int32_t d = 0; d < view.ndim; ++d) nbytes *= static_cast<size_t>(view.shape[d]);
  for (const tf_row &row : tf_dtypes()) {
    if (row.dtype.code != view.dtype.code || row.dtype.bits != view.dtype.bits) continue;
    const auto drop = [](void *, size_t, void *kept) { managed(static_cast<dlpack::managed *>(kept)).reset(); };
    void *data = static_cast<char *>(view.data) + view.byte_offset;
    // The function deletes the managed tensor also where it fails.
    dlpack::managed *kept = owned.release();
    tf_tensor made(TF_NewTensor(row.code, kept->tensor.shape, kept->tensor.ndim, data, nbytes, drop, kept));
    if (!made) throw error(TB_FRAMEWORK, "TF_NewTensor refused the tensor: check its length");
    return made;
  }
  throw error(TB_DTYPE, "TensorFlow has no such dtype");
}

}  // namespace truebridge

#endif  // TRUEBRIDGE_TENSORFLOW_HPP
