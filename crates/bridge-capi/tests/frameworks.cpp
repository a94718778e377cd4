// PyTorch and TensorFlow in one C++ program, without Python and NumPy: tensors of each in the other, in place.

#define TRUEBRIDGE_WITH_TORCH
#define TRUEBRIDGE_WITH_TENSORFLOW
#include "check.hpp"

// A tensor of zeroes, which are also valid strings: TensorFlow destroys those that it deletes.
static tb::tf_tensor allocated(TF_DataType code, std::vector<int64_t> shape, size_t nbytes) {
  tb::tf_tensor made(TF_AllocateTensor(code, shape.data(), static_cast<int>(shape.size()), nbytes));
  std::memset(TF_TensorData(made.get()), 0, nbytes);
  return made;
}

static void every_dtype_converts_in_place_in_both_directions() {
  for (const tb::tf_row &row : tb::tf_dtypes()) {
    tb::tf_tensor made = allocated(row.code, {3, 5}, row.dtype.bits / 8 * 15);
    std::memset(TF_TensorData(made.get()), 1, TF_TensorByteSize(made.get()));
    const void *data = TF_TensorData(made.get());
    at::Tensor view = tb::tf_tensor_to_torch(std::move(made));
    EXPECT(view.data_ptr() == data && view.size(1) == 5 && view.is_contiguous());
    tb::tf_tensor back = tb::torch_to_tf_tensor(view);
    EXPECT(TF_TensorData(back.get()) == data && TF_TensorType(back.get()) == row.code && TF_Dim(back.get(), 0) == 3);
    view.reset();
    EXPECT(static_cast<const char *>(TF_TensorData(back.get()))[0] == 1);
  }
}

static void memory_lives_as_long_as_a_view() {
  int freed = 0;
  alignas(64) static float numbers[16] = {7};
  at::Tensor owner = at::from_blob(numbers, {4, 4}, [&](void *) { ++freed; });
  tb::tf_tensor fed = tb::torch_to_tf_tensor(owner, {TB_COPY_NEVER, TB_ELEMENTS_ANY_ORDER, {}, {}});
  EXPECT(TF_TensorData(fed.get()) == numbers);
  // Another storage in the tensor takes nothing from the view.
  owner.set_data(at::zeros({2}));
  owner.reset();
  at::Tensor row = tb::tf_tensor_to_torch(std::move(fed))[0];
  EXPECT(freed == 0 && row[0].item<float>() == 7);
  row.reset();
  EXPECT(freed == 1);
}

static void what_does_not_fit_is_copied() {
  const at::Tensor whole = at::arange(24, at::kFloat).reshape({4, 6});
  for (const at::Tensor &view : {whole.t(), whole.slice(1, 1, 4), whole[0].expand({3, 6}), whole.slice(0, 1, 2)}) {
    tb::tf_tensor copy = tb::torch_to_tf_tensor(view);
    const at::Tensor back = tb::tf_tensor_to_torch(std::move(copy));
    EXPECT(at::equal(back, view) && back.data_ptr() != view.data_ptr());
  }
  tb::options never;
  never.copy = TB_COPY_NEVER;
  thrown(TB_COPY_NEEDED, [&] { tb::torch_to_tf_tensor(whole.t(), never); });
  tb::options turned;
  turned.axes = {1, 0};
  EXPECT(at::equal(tb::tf_tensor_to_torch(tb::torch_to_tf_tensor(whole, turned)), whole.t()));
  tb::options always;
  always.copy = TB_COPY_ALWAYS;
  tb::tf_tensor made = allocated(TF_FLOAT, {4}, 16);
  const void *data = TF_TensorData(made.get());
  EXPECT(tb::tf_tensor_to_torch(std::move(made), always).data_ptr() != data);
}

static void what_torch_has_deferred_is_done() {
  const at::Tensor values = at::complex(at::ones({8}), at::full({8}, 2.0)).conj();
  EXPECT(values.is_conj());
  const at::Tensor back = tb::tf_tensor_to_torch(tb::torch_to_tf_tensor(values));
  EXPECT(at::equal(at::imag(back), at::full({8}, -2.0)));
  EXPECT(at::imag(values).is_neg());
  EXPECT(at::equal(tb::tf_tensor_to_torch(tb::torch_to_tf_tensor(at::imag(values))), at::full({8}, -2.0)));
  thrown(TB_COPY_NEEDED, [&] { tb::from_torch(values, TB_COPY_NEVER); });
}

static void tensors_without_elements_convert() {
  for (const at::Tensor &empty : {at::ones({0}), at::ones({3, 0, 2})}) {
    const at::Tensor back = tb::tf_tensor_to_torch(tb::torch_to_tf_tensor(empty));
    EXPECT(back.sizes() == empty.sizes());
  }
  const at::Tensor number = at::full({}, 3.0, at::kDouble);
  EXPECT(tb::tf_tensor_to_torch(tb::torch_to_tf_tensor(number)).item<double>() == 3);
}

static void a_refusal_says_why() {
  at::Tensor grad = at::ones({2}).requires_grad_();
  EXPECT(thrown(TB_REQUIRES_GRAD, [&] { tb::from_torch(grad); }).find("detach") != std::string::npos);
  thrown(TB_NOT_A_TENSOR, [] { tb::from_torch(at::Tensor()); });
  thrown(TB_NOT_A_TENSOR, [] { tb::from_torch(at::ones({2, 2}).to_sparse()); });
  thrown(TB_DTYPE, [] { tb::torch_to_tf_tensor(at::ones({2}, at::kComplexHalf)); });
  thrown(TB_DTYPE, [] { tb::from_tensorflow(allocated(TF_STRING, {1}, 24)); });
  thrown(TB_DTYPE, [] { tb::from_tensorflow(allocated(TF_INT4, {2}, 2)); });
  thrown(TB_ARGUMENT, [] { tb::from_tensorflow(nullptr); });
  thrown(TB_MISSING, [] { tb::torch_stream(tb::cuda(99)); });
  // Memory that must not be written.
  const float numbers[2] = {1, 2};
  const int64_t length = 2;
  tb_memory memory{};
  memory.data = const_cast<float *>(numbers);
  memory.shape = &length;
  memory.ndim = memory.read_only = 1;
  memory.dtype = {2, 32, 1};
  memory.device = tb::host;
  const tb::tensor constant(memory, 0);
  thrown(TB_READ_ONLY, [&] { tb::to_torch(constant); });
  tb::options copied;
  copied.copy = TB_COPY_ALWAYS;
  EXPECT(tb::to_torch(constant, copied)[1].item<float>() == 2);
}

static void tensors_of_a_gpu_stay_there_or_are_moved() {
  if (!at::hasCUDA()) {
    std::puts("left out: tensors of a GPU: no CUDA");
    return;
  }
  const at::Tensor x = at::arange(6, at::kFloat).to(at::kCUDA) + 1;
  const at::Tensor view = tb::to_torch(tb::from_torch(x));
  EXPECT(view.is_cuda() && view.data_ptr() == x.data_ptr() && at::equal(view, x));
  thrown(TB_DEVICE, [&] { tb::torch_to_tf_tensor(x); });
  tb::options to_host, to_device;
  to_host.device = tb::host;
  to_device.device = tb::cuda(0);
  tb::tf_tensor moved = tb::torch_to_tf_tensor(x, to_host);
  EXPECT(static_cast<const float *>(TF_TensorData(moved.get()))[5] == 6);
  EXPECT(at::equal(tb::tf_tensor_to_torch(std::move(moved), to_device), x));
}

int main() {
  tb::require();
  every_dtype_converts_in_place_in_both_directions();
  memory_lives_as_long_as_a_view();
  what_does_not_fit_is_copied();
  what_torch_has_deferred_is_done();
  tensors_without_elements_convert();
  a_refusal_says_why();
  tensors_of_a_gpu_stay_there_or_are_moved();
  const tb_counts counts = tb::stats();
  EXPECT(counts.leased > 0 && counts.leased == counts.released && counts.leaked == 0);
  std::puts("torch and tensorflow in one process");
  return 0;
}
