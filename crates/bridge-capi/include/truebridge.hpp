// truebridge for C++17, in headers only: truebridge.h with owners, exceptions, and converters.
//
// truebridge.h describes the verbs. Here an object drops itself, and a function that fails throws
// truebridge::error, with the status as its kind. Define before the include:
//
// - TRUEBRIDGE_WITH_TORCH for at::Tensor: from_torch, to_torch (libtorch with versioned DLPack; tested with 2.11);
// - TRUEBRIDGE_WITH_TENSORFLOW for TF_Tensor, in host memory: from_tensorflow, to_tensorflow (2.x; tested with
//   2.21);
// - both for tf_tensor_to_torch and torch_to_tf_tensor.
#ifndef TRUEBRIDGE_HPP
#define TRUEBRIDGE_HPP

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "truebridge.h"

namespace truebridge {

// What a function throws.
class error : public std::runtime_error {
 public:
  error(tb_status kind, const std::string &text) : std::runtime_error(text), kind_(kind) {}

  tb_status kind() const noexcept { return kind_; }

  // Returns the name of the kind, such as "copy_needed".
  const char *name() const noexcept { return tb_status_name(kind_); }

 private:
  tb_status kind_;
};

// Throws unless the status is TB_OK.
inline void check(tb_status status) {
  if (status != TB_OK) throw error(status, tb_error());
}

// Checks that the library fits these headers.
inline void require() { check(tb_require(TB_ABI)); }

constexpr tb_device host{1, 0};

// Returns the CUDA device with this number.
constexpr tb_device cuda(int32_t index) { return {2, index}; }

// The structures of dlpack.h, under names that meet no other copy of that header.
namespace dlpack {

struct tensor {
  void *data;
  tb_device device;
  int32_t ndim;
  tb_dtype dtype;
  int64_t *shape;
  int64_t *strides;
  uint64_t byte_offset;
};

// DLManagedTensorVersioned
struct managed {
  uint32_t major;
  uint32_t minor;
  void *context;
  void (*deleter)(managed *);
  uint64_t flags;
  dlpack::tensor tensor;
};

static_assert(sizeof(tensor) == 48 && sizeof(managed) == 80, "as in dlpack.h 1.x, on 64 bits");

struct deleter {
  void operator()(managed *owned) const noexcept {
    if (owned->deleter != nullptr) owned->deleter(owned);
  }
};

}  // namespace dlpack

// A managed tensor of DLPack. release() passes it to a consumer.
using managed = std::unique_ptr<dlpack::managed, dlpack::deleter>;

// What a consumer takes in place: tb_target.
struct target {
  std::string name = "the consumer";
  std::vector<tb_dtype> dtypes;  // empty for any
  std::vector<int32_t> devices;  // empty for any
  tb_strides strides = TB_STRIDES_ANY;
  bool ignores_read_only = false;
  size_t alignment = 0;

  tb_target raw() const {
    tb_target raw{};
    raw.size = sizeof raw;
    raw.name = name.c_str();
    raw.dtypes = dtypes.empty() ? nullptr : dtypes.data();
    raw.dtype_count = dtypes.size();
    raw.devices = devices.empty() ? nullptr : devices.data();
    raw.device_count = devices.size();
    raw.strides = strides;
    raw.ignores_read_only = ignores_read_only;
    raw.alignment = alignment;
    return raw;
  }
};

// The caller's requests: tb_options.
struct options {
  tb_copy copy = TB_COPY_IF_NEEDED;
  tb_elements elements = TB_ELEMENTS_ANY_ORDER;
  std::optional<tb_device> device;
  std::optional<std::vector<int64_t>> axes;

  tb_options raw() const {
    // Not NULL: no axes are those of a tensor without dimensions.
    static const int64_t none = 0;
    tb_options raw{};
    raw.size = sizeof raw;
    raw.copy = copy;
    raw.elements = elements;
    raw.device = device ? &*device : nullptr;
    raw.axes = !axes ? nullptr : axes->empty() ? &none : axes->data();
    raw.axis_count = axes ? axes->size() : 0;
    return raw;
  }
};

// A tensor of any owner: tb_tensor.
class tensor {
 public:
  // Takes over a managed tensor. On a CUDA device its owner works in this stream, which outlives what is made of it.
  explicit tensor(managed owned, uint64_t stream = 0) {
    tb_tensor *raw = nullptr;
    check(tb_tensor_dlpack(owned.release(), 1, stream, &raw));
    raw_.reset(raw);
  }

  // Shares memory that owner keeps. memory.size, memory.release and memory.owner are set here.
  template <class Owner>
  tensor(tb_memory memory, Owner owner) {
    memory.size = sizeof memory;
    memory.release = [](void *kept) { delete static_cast<Owner *>(kept); };
    memory.owner = new Owner(std::move(owner));
    tb_tensor *raw = nullptr;
    check(tb_tensor_memory(&memory, &raw));
    raw_.reset(raw);
  }

  const tb_tensor *get() const noexcept { return raw_.get(); }

  // Takes over what the library has made.
  static tensor adopt(tb_tensor *raw) noexcept { return tensor(raw); }

  // Describes the tensor. The shape and the strides are valid as long as it is.
  tb_memory info() const {
    tb_memory memory{};
    memory.size = sizeof memory;
    check(tb_tensor_info(get(), &memory));
    return memory;
  }

  // Returns what transfer would do.
  tb_report plan(const target &to, const options &requests = {}) const {
    const tb_target raw = to.raw();
    const tb_options asked = requests.raw();
    tb_report report{};
    report.size = sizeof report;
    check(tb_plan(get(), &raw, &asked, &report));
    return report;
  }

  // Returns a managed tensor for a consumer in this stream, and writes to report, unless it is NULL, what was done.
  managed transfer(const target &to, const options &requests = {}, uint64_t stream = 0,
                   tb_report *report = nullptr) const {
    const tb_target raw = to.raw();
    const tb_options asked = requests.raw();
    if (report != nullptr) report->size = sizeof *report;
    void *out = nullptr;
    check(tb_transfer(get(), &raw, &asked, stream, &out, report));
    return managed(static_cast<dlpack::managed *>(out));
  }

 private:
  struct drop {
    void operator()(tb_tensor *owned) const noexcept { tb_tensor_drop(owned); }
  };
  explicit tensor(tb_tensor *raw) noexcept : raw_(raw) {}
  std::unique_ptr<tb_tensor, drop> raw_;
};

// What another process has shared: its tensors, and text about the tree that they lie in.
struct opened {
  std::vector<tensor> tensors;
  std::optional<std::string> tree;
};

// Shares tensors with other processes, and returns the text of a ticket: tb_share.
inline std::string share(const std::vector<const tensor *> &tensors, double seconds = 60,
                         tb_writing writing = TB_WRITING_USUAL, const char *tree = nullptr) {
  std::vector<const tb_tensor *> raw;
  for (const tensor *each : tensors) raw.push_back(each->get());
  char ticket[TB_TICKET_BYTES];
  check(tb_share(raw.data(), raw.size(), tree, seconds, writing, ticket));
  return ticket;
}

// Ends the share of a ticket of this process.
inline void revoke(const std::string &ticket) { check(tb_revoke(ticket.c_str())); }

// Lets a ticket of this process expire: what is open stays as it is.
inline void share_end(const std::string &ticket) { check(tb_share_end(ticket.c_str())); }

// Opens a ticket of another process, in place: tb_open.
inline opened open(const std::string &ticket) {
  tb_opened *raw = nullptr;
  check(tb_open(ticket.c_str(), &raw));
  const std::unique_ptr<tb_opened, void (*)(tb_opened *)> owned(raw, tb_opened_drop);
  opened result;
  if (const char *tree = tb_opened_tree(raw)) result.tree = tree;
  for (size_t index = 0; index < tb_opened_count(raw); ++index) {
    tb_tensor *each = nullptr;
    check(tb_opened_tensor(raw, index, &each));
    result.tensors.push_back(tensor::adopt(each));
  }
  return result;
}

// Copies the elements into a tensor that exists: tb_copy_into.
inline void copy_into(const tensor &from, const tensor &to, const std::optional<std::vector<int64_t>> &axes = {}) {
  options requests;
  requests.axes = axes;
  const tb_options raw = requests.raw();
  check(tb_copy_into(from.get(), to.get(), raw.axes, raw.axis_count));
}

// Makes the stream later wait for the stream earlier, on the device.
inline void order(tb_device device, uint64_t earlier, uint64_t later) { check(tb_order(device, earlier, later)); }

// Records that the views at this address are also used in this stream.
inline void used(tb_device device, const void *data, uint64_t stream) { check(tb_used(device, data, stream)); }

// Returns the counts of this process.
inline tb_counts stats() {
  tb_counts counts{};
  check(tb_stats(&counts));
  return counts;
}

}  // namespace truebridge

#ifdef TRUEBRIDGE_WITH_TORCH
#include "truebridge_torch.hpp"
#endif
#ifdef TRUEBRIDGE_WITH_TENSORFLOW
#include "truebridge_tensorflow.hpp"
#endif
#if defined(TRUEBRIDGE_WITH_TORCH) && defined(TRUEBRIDGE_WITH_TENSORFLOW)
namespace truebridge {

// Takes over a TF_Tensor in host memory, and returns it as a tensor of PyTorch, in place where PyTorch can take it.
// TensorFlow assumes that its tensors do not change: to write to the result while TensorFlow may still use the memory,
// pass TB_COPY_ALWAYS.
inline at::Tensor tf_tensor_to_torch(tf_tensor from, const options &requests = {}) {
  return to_torch(from_tensorflow(std::move(from)), requests);
}

// Returns a TF_Tensor over the memory of a tensor of PyTorch, which TensorFlow can take where it is compact and its
// address is divisible by 64; others are copied. A tensor of a GPU needs requests.device = host.
inline tf_tensor torch_to_tf_tensor(const at::Tensor &from, const options &requests = {}) {
  return to_tensorflow(from_torch(from, requests.copy), requests);
}

}  // namespace truebridge
#endif

#endif  // TRUEBRIDGE_HPP
