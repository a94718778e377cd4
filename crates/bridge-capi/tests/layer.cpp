// The C++ layer without a framework: owners, exceptions, and the verbs.

#include "check.hpp"

static const tb_dtype FLOAT32{2, 32, 1};

// A tensor over numbers that it shares.
static tb::tensor shared(std::shared_ptr<std::vector<float>> numbers, std::vector<int64_t> shape) {
  tb_memory memory{};
  memory.data = numbers->data();
  memory.shape = shape.data();
  memory.ndim = static_cast<int32_t>(shape.size());
  memory.dtype = FLOAT32;
  memory.device = tb::host;
  return tb::tensor(memory, std::move(numbers));
}

int main() {
  tb::require();
  auto numbers = std::make_shared<std::vector<float>>(std::vector<float>{0, 1, 2, 3, 4, 5});
  {
    // An owner is kept by every view, also beyond the tensor.
    tb::managed view;
    {
      tb::tensor tensor = shared(numbers, {2, 3});
      EXPECT(numbers.use_count() == 2);
      tb_report report{};
      view = tensor.transfer({}, {}, 0, &report);
      EXPECT(report.reason == nullptr && report.bytes_copied == 0 && tensor.plan({}).reason == nullptr);
    }
    EXPECT(view->tensor.data == numbers->data() && view->tensor.shape[1] == 3 && numbers.use_count() == 2);
    tb::tensor again(std::move(view));
    EXPECT(numbers.use_count() == 2);
  }
  EXPECT(numbers.use_count() == 1);

  // A permutation, and a copy for a target that takes row-major tensors only.
  tb::tensor tensor = shared(numbers, {2, 3});
  tb::target rows{"rows", {FLOAT32}, {1}, TB_STRIDES_COMPACT, false, 64};
  tb::options turned;
  turned.axes = {1, 0};
  tb::managed copy = tensor.transfer(rows, turned);
  const float *copied = static_cast<const float *>(copy->tensor.data);
  EXPECT(copied[0] == 0 && copied[1] == 3 && copied[2] == 1 && copied[5] == 5);

  // Into memory that exists.
  auto into = std::make_shared<std::vector<float>>(6);
  tb::copy_into(tensor, shared(into, {3, 2}), {{1, 0}});
  EXPECT(std::memcmp(into->data(), copied, 24) == 0);

  // A tensor without dimensions has no axes.
  tb::options none;
  none.axes.emplace();
  EXPECT(shared(into, {}).transfer({}, none)->tensor.ndim == 0);
  EXPECT(thrown(TB_ARGUMENT, [&] { tensor.plan({}, none); }).find("once") != std::string::npos);

  turned.copy = TB_COPY_NEVER;
  EXPECT(thrown(TB_COPY_NEEDED, [&] { tensor.transfer(rows, turned); }).find("rows cannot take") == 0);
  rows.dtypes = {{2, 64, 1}};
  thrown(TB_DTYPE, [&] { tensor.transfer(rows); });
  thrown(TB_LAYOUT, [&] { tb::copy_into(tensor, shared(into, {3, 2})); });
  thrown(TB_DEVICE, [&] { tb::order(tb::host, 1, 2); });
  thrown(TB_PROTOCOL, [&] { tb::tensor nothing{tb::managed()}; });
  // The owner of refused memory is dropped.
  thrown(TB_LAYOUT, [&] { shared(into, {int64_t(1) << 62, 1 << 10}); });
  // To another process, and from one.
  {
    const tb::tensor row = shared(into, {6}), matrix = shared(into, {2, 3});
    const std::string ticket = tb::share({&row, &matrix}, 60, TB_WRITING_NEVER, "a pair");
    const tb::opened opened = tb::open(ticket);
    EXPECT(opened.tensors.size() == 2 && opened.tree == "a pair");
    const tb_memory seen = opened.tensors[1].info();
    EXPECT(seen.ndim == 2 && seen.shape[1] == 3 && seen.data != into->data());
    EXPECT(std::memcmp(seen.data, into->data(), 24) == 0);
    tb::revoke(ticket);
    thrown(TB_GONE, [&] { tb::open(ticket); });
    thrown(TB_ARGUMENT, [] { tb::open("ticket"); });
    const std::string other = tb::share({&row});
    const tb::opened kept = tb::open(other);
    tb::share_end(other);
    thrown(TB_GONE, [&] { tb::open(other); });
    tb::revoke(tb::share({&kept.tensors[0]}));
    thrown(TB_ARGUMENT, [] { tb::share_end("ticket"); });
  }
  tb_share_close();

  copy.reset();
  tensor = shared(into, {6});
  const tb_counts counts = tb::stats();
  EXPECT(numbers.use_count() == 1 && into.use_count() == 2 && counts.leased == counts.released);
  return 0;
}
