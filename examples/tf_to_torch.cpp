// A frozen graph of TensorFlow on tensors of PyTorch, in C++, without Python and NumPy.
//
// Usage: tf_to_torch GRAPH [cuda], where GRAPH holds a GraphDef that computes y from x. The tensor of PyTorch is fed in
// place, and the result is a tensor of PyTorch over the memory that TensorFlow wrote. With "cuda" the tensors are on the
// GPU, and are moved to the host and back, because a session of TensorFlow's C API takes and returns host memory.
//
// See docs/c.md for how to build it.

#define TRUEBRIDGE_WITH_TORCH
#define TRUEBRIDGE_WITH_TENSORFLOW
#include <truebridge.hpp>

#include <tensorflow/c/c_api.h>

#include <fstream>
#include <iostream>
#include <iterator>

namespace tb = truebridge;

static void check(TF_Status *status) {
  if (TF_GetCode(status) != TF_OK) throw std::runtime_error(TF_Message(status));
}

// A session on a graph with the operations x and y.
class Model {
 public:
  explicit Model(const std::string &definition) {
    std::unique_ptr<TF_Buffer, void (*)(TF_Buffer *)> buffer(
        TF_NewBufferFromString(definition.data(), definition.size()), TF_DeleteBuffer);
    std::unique_ptr<TF_ImportGraphDefOptions, void (*)(TF_ImportGraphDefOptions *)> import(
        TF_NewImportGraphDefOptions(), TF_DeleteImportGraphDefOptions);
    TF_GraphImportGraphDef(graph_.get(), buffer.get(), import.get(), status_.get());
    check(status_.get());
    std::unique_ptr<TF_SessionOptions, void (*)(TF_SessionOptions *)> options(TF_NewSessionOptions(),
                                                                               TF_DeleteSessionOptions);
    // A ConfigProto with device_count {"GPU": 0}: PyTorch has the GPU to itself.
    const char on_the_host[] = "\n\7\n\3GPU\20\0";
    TF_SetConfig(options.get(), on_the_host, sizeof on_the_host - 1, status_.get());
    check(status_.get());
    session_ = TF_NewSession(graph_.get(), options.get(), status_.get());
    check(status_.get());
  }

  ~Model() { TF_DeleteSession(session_, status_.get()); }

  at::Tensor operator()(const at::Tensor &x) const {
    const tb_device device = x.is_cuda() ? tb::cuda(x.get_device()) : tb::host;
    tb::options to_host, to_device;
    to_host.device = tb::host;
    to_device.device = device;
    tb::tf_tensor fed = tb::torch_to_tf_tensor(x, to_host);
    TF_Tensor *value = fed.get(), *result = nullptr;
    const TF_Output input = operation("x"), output = operation("y");
    TF_SessionRun(session_, nullptr, &input, &value, 1, &output, &result, 1, nullptr, 0, nullptr, status_.get());
    check(status_.get());
    return tb::tf_tensor_to_torch(tb::tf_tensor(result), to_device);
  }

 private:
  TF_Output operation(const char *name) const { return {TF_GraphOperationByName(graph_.get(), name), 0}; }

  std::unique_ptr<TF_Status, void (*)(TF_Status *)> status_{TF_NewStatus(), TF_DeleteStatus};
  std::unique_ptr<TF_Graph, void (*)(TF_Graph *)> graph_{TF_NewGraph(), TF_DeleteGraph};
  TF_Session *session_ = nullptr;
};

int main(int count, char **arguments) try {
  if (count < 2) throw std::runtime_error("usage: tf_to_torch GRAPH [cuda]");
  tb::require();
  std::ifstream file(arguments[1], std::ios::binary);
  const Model model(std::string(std::istreambuf_iterator<char>(file), {}));
  const at::Tensor x = at::arange(6, at::kFloat).to(count > 2 ? at::kCUDA : at::kCPU);
  std::cout << x << "\n" << model(x) << "\n";
  return 0;
} catch (const std::exception &error) {
  std::cerr << error.what() << "\n";
  return 1;
}
