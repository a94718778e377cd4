/* Tensors without a framework: plan, transfer, copies, and what is refused, in host memory. */

#include <stddef.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

static float numbers[24];

static void renumber(void) {
  for (int i = 0; i < 24; ++i) numbers[i] = (float)i;
}

/* A tensor of two dimensions over the numbers. */
static tb_tensor *made(const int64_t *shape, const int64_t *strides, int32_t read_only, int *released) {
  tb_tensor *tensor = NULL;
  tb_memory memory = {sizeof memory, numbers, shape, strides, 2, read_only, FLOAT32, HOST, 0, count, released};
  OK(tb_tensor_memory(&memory, &tensor));
  return tensor;
}

static const int64_t SHAPE[2] = {4, 6}, TRANSPOSED[2] = {6, 4}, BY_COLUMNS[2] = {1, 6};

static void a_managed_tensor_converts_in_place(void) {
  for (int versioned = 0; versioned < 2; ++versioned) {
    int deleted = 0;
    int64_t shape[2] = {4, 6}, strides[2] = {6, 1};
    dl_managed legacy = {numbers, HOST, 2, FLOAT32, shape, strides, 0, &deleted, count_managed};
    dl_versioned current = {1, 1, &deleted, count_versioned, DL_READ_ONLY, numbers, HOST, 2, FLOAT32, shape, NULL, 0};
    void *managed = versioned ? (void *)&current : (void *)&legacy;
    tb_tensor *tensor = NULL;
    dl_versioned *first = NULL, *second = NULL;
    tb_report report = {.size = sizeof report}, done = {.size = sizeof done};
    OK(tb_tensor_dlpack(managed, versioned, 0, &tensor));
    OK(tb_plan(tensor, NULL, NULL, &report));
    OK(tb_transfer(tensor, NULL, NULL, 0, (void **)&first, &done));
    OK(tb_transfer(tensor, NULL, NULL, 0, (void **)&second, NULL));
    CHECK(memcmp(&report, &done, sizeof done) == 0 && done.reason == NULL && done.bytes_copied == 0);
    CHECK(first->major == 1 && first->data == numbers && first->ndim == 2 && first->shape[1] == 6);
    CHECK(first->strides[0] == 6 && first->byte_offset == 0);
    CHECK(first->flags == (versioned ? DL_READ_ONLY : 0));
    tb_tensor_drop(tensor);
    first->deleter(first);
    CHECK(deleted == 0);
    second->deleter(second);
    CHECK(deleted == 1);
  }
}

/* Pinned memory is copied as memory of the host, for a consumer of anything. */
static void pinned_memory_is_copied_on_the_host(void) {
  tb_memory memory = {sizeof memory, numbers, SHAPE, BY_COLUMNS, 2, 0, FLOAT32, {3, 0}, 0, NULL, NULL};
  tb_target compact = {.size = sizeof compact, .strides = TB_STRIDES_COMPACT};
  tb_options always = {.size = sizeof always, .copy = TB_COPY_ALWAYS};
  tb_tensor *tensor = NULL;
  memory.shape = TRANSPOSED;
  OK(tb_tensor_memory(&memory, &tensor));
  for (int asked = 0; asked < 2; ++asked) {
    tb_report report = {.size = sizeof report}, done = {.size = sizeof done};
    dl_versioned *managed = NULL;
    OK(tb_plan(tensor, asked ? NULL : &compact, asked ? &always : NULL, &report));
    OK(tb_transfer(tensor, asked ? NULL : &compact, asked ? &always : NULL, 0, (void **)&managed, &done));
    CHECK(memcmp(&report, &done, sizeof done) == 0 && done.device.kind == 1 && done.bytes_copied == sizeof numbers);
    CHECK(((float *)managed->data)[1] == 6 && managed->strides[0] == 4);
    managed->deleter(managed);
  }
  tb_tensor_drop(tensor);
}

/* Memory that neither the host nor a GPU reads is passed on, and an error says that nothing here copies it. */
static void memory_of_another_device_is_not_copied(void) {
  tb_memory memory = {sizeof memory, numbers, SHAPE, NULL, 2, 0, FLOAT32, {8, 0}, 0, NULL, NULL};
  tb_options always = {.size = sizeof always, .copy = TB_COPY_ALWAYS};
  tb_report report = {.size = sizeof report};
  tb_tensor *tensor = NULL;
  dl_versioned *managed = NULL;
  OK(tb_tensor_memory(&memory, &tensor));
  OK(tb_transfer(tensor, NULL, NULL, 0, (void **)&managed, NULL));
  CHECK(managed->data == numbers && managed->device.kind == 8);
  managed->deleter(managed);
  CHECK(tb_transfer(tensor, NULL, &always, 0, (void **)&managed, NULL) == TB_COPY_NEEDED);
  CHECK(strstr(tb_error(), "copy it with its own framework first") != NULL);
  CHECK(tb_plan(tensor, NULL, &always, &report) == TB_COPY_NEEDED);
  tb_tensor_drop(tensor);
}

static void what_does_not_fit_is_copied(void) {
  int released = 0;
  tb_tensor *tensor = made(TRANSPOSED, BY_COLUMNS, 1, &released);
  tb_target compact = {.size = sizeof compact, .name = "a solver", .strides = TB_STRIDES_COMPACT, .ignores_read_only = 1};
  tb_report report = {.size = sizeof report}, done = {.size = sizeof done};
  dl_versioned *managed = NULL;
  OK(tb_plan(tensor, &compact, NULL, &report));
  OK(tb_transfer(tensor, &compact, NULL, 0, (void **)&managed, &done));
  CHECK(strcmp(report.reason, "strides that are not compact") == 0 && report.bytes_copied == sizeof numbers);
  CHECK(memcmp(&report, &done, sizeof done) == 0);
  CHECK(strcmp(done.copied_by, "host") == 0 && done.device.kind == 1 && done.owner == 0 && done.reader == 0);
  CHECK(managed->data != numbers && managed->flags == DL_IS_COPIED && (uintptr_t)managed->data % 64 == 0);
  for (int i = 0; i < 24; ++i) CHECK(((float *)managed->data)[i] == numbers[i % 4 * 6 + i / 4]);
  tb_tensor_drop(tensor);
  CHECK(released == 1);
  managed->deleter(managed);
}

/* More than this library's own copies are aligned to. */
static void a_copy_is_as_aligned_as_the_target_wants_it(void) {
  int released = 0;
  tb_tensor *tensor = made(SHAPE, NULL, 0, &released);
  tb_options always = {.size = sizeof always, .copy = TB_COPY_ALWAYS};
  for (size_t alignment = 1; alignment <= 1 << 20; alignment *= 2) {
    tb_target target = {.size = sizeof target, .alignment = alignment};
    dl_versioned *managed = NULL;
    OK(tb_transfer(tensor, &target, &always, 0, (void **)&managed, NULL));
    CHECK((uintptr_t)managed->data % alignment == 0 && memcmp(managed->data, numbers, sizeof numbers) == 0);
    managed->deleter(managed);
  }
  tb_target target = {.size = sizeof target, .alignment = (size_t)1 << 63};
  void *managed = NULL;
  CHECK(tb_transfer(tensor, &target, &always, 0, &managed, NULL) == TB_ARGUMENT && managed == NULL);
  tb_tensor_drop(tensor);
  CHECK(released == 1);
}

/* Counts whose bytes do not fit into an address: 0, 8 and -1 bytes, by what is left of them in 64 bits. */
static void counts_that_overflow_are_refused(void) {
  int released = 0;
  char ticket[TB_TICKET_BYTES] = "";
  tb_tensor *tensor = made(SHAPE, NULL, 0, &released);
  const tb_tensor *tensors[1] = {tensor};
  const size_t counts[] = {(size_t)1 << 60, (size_t)1 << 61, ((size_t)1 << 61) + 1, (size_t)1 << 63, SIZE_MAX};
  for (size_t i = 0; i < sizeof counts / sizeof *counts; ++i) {
    CHECK(tb_share(tensors, counts[i], NULL, 60, 0, ticket) == TB_ARGUMENT && ticket[0] == 0);
    CHECK(strstr(tb_error(), "exceed the address space") != NULL);
  }
  const size_t many[] = {(size_t)1 << 61, (size_t)1 << 62, ((size_t)1 << 62) + 1, (size_t)1 << 63, SIZE_MAX};
  for (size_t i = 0; i < sizeof many / sizeof *many; ++i) {
    const tb_dtype dtypes[1] = {FLOAT32};
    const int32_t devices[1] = {1};
    tb_report report = {.size = sizeof report};
    tb_target target = {.size = sizeof target, .dtypes = dtypes, .dtype_count = many[i]};
    CHECK(tb_plan(tensor, &target, NULL, &report) == TB_ARGUMENT && strstr(tb_error(), "dtypes") != NULL);
    target = (tb_target){.size = sizeof target, .devices = devices, .device_count = many[i]};
    CHECK(tb_plan(tensor, &target, NULL, &report) == TB_ARGUMENT && strstr(tb_error(), "devices") != NULL);
  }
  for (int d = 0; d < 3; ++d) {
    const double seconds[] = {1e19, 1e300, -1e-9};
    tb_status status = tb_share(tensors, 1, NULL, seconds[d], 0, ticket);
    CHECK(status == TB_ARGUMENT && ticket[0] == 0);
  }
  tb_tensor_drop(tensor);
  CHECK(released == 1);
}

/* Tensors that repeat an element, so that their copies would be larger than any memory. */
static void copies_beyond_memory_are_refused(void) {
  const int64_t most = INT64_MAX / 4, none[2] = {0, 0}, shape[2] = {1, most};
  int released = 0;
  char ticket[TB_TICKET_BYTES] = "";
  tb_tensor *tensor = made(shape, none, 0, &released);
  const tb_tensor *three[3] = {tensor, tensor, tensor};
  tb_options always = {.size = sizeof always, .copy = TB_COPY_ALWAYS};
  void *managed = NULL;
  CHECK(tb_transfer(tensor, NULL, &always, 0, &managed, NULL) == TB_OUT_OF_MEMORY && managed == NULL);
  CHECK(tb_share(three, 3, NULL, 60, 0, ticket) != TB_OK && ticket[0] == 0);
  tb_tensor_drop(tensor);
  CHECK(released == 1);
}

static void the_caller_asks_for_an_order(void) {
  int released = 0;
  int64_t axes[2] = {1, 0};
  tb_tensor *tensor = made(SHAPE, NULL, 0, &released);
  dl_managed *managed = NULL;
  tb_target legacy = {.size = sizeof legacy, .unversioned = 1};
  tb_options turned = {.size = sizeof turned, .copy = TB_COPY_NEVER, .axes = axes, .axis_count = 2};
  OK(tb_transfer(tensor, &legacy, &turned, 0, (void **)&managed, NULL));
  CHECK(managed->data == numbers && managed->shape[0] == 6 && managed->strides[0] == 1 && managed->strides[1] == 6);
  managed->deleter(managed);
  turned.elements = TB_ELEMENTS_ROW_MAJOR;
  CHECK(tb_transfer(tensor, &legacy, &turned, 0, (void **)&managed, NULL) == TB_COPY_NEEDED);
  turned.copy = TB_COPY_IF_NEEDED;
  OK(tb_transfer(tensor, &legacy, &turned, 0, (void **)&managed, NULL));
  for (int i = 0; i < 24; ++i) CHECK(((float *)managed->data)[i] == numbers[i % 4 * 6 + i / 4]);
  managed->deleter(managed);
  tb_options columns = {.size = sizeof columns, .elements = TB_ELEMENTS_COLUMN_MAJOR};
  OK(tb_transfer(tensor, &legacy, &columns, 0, (void **)&managed, NULL));
  CHECK(managed->strides[0] == 1 && managed->strides[1] == 4 && ((float *)managed->data)[1] == 6);
  managed->deleter(managed);
  tb_options always = {.size = sizeof always, .copy = TB_COPY_ALWAYS};
  OK(tb_transfer(tensor, &legacy, &always, 0, (void **)&managed, NULL));
  CHECK(managed->data != numbers && memcmp(managed->data, numbers, sizeof numbers) == 0);
  managed->deleter(managed);
  tb_tensor_drop(tensor);
  CHECK(released == 1);
}

static void a_target_names_what_it_takes(void) {
  int released = 0;
  void *managed = NULL;
  const tb_dtype doubles[1] = {{2, 64, 1}};
  const int32_t gpus[1] = {2};
  tb_tensor *tensor = made(SHAPE, NULL, 1, &released);
  tb_target target = {.size = sizeof target, .name = "a solver", .dtypes = doubles, .dtype_count = 1};
  CHECK(tb_transfer(tensor, &target, NULL, 0, &managed, NULL) == TB_DTYPE && strstr(tb_error(), "a solver has no dtype float32"));
  target.dtypes = NULL;
  target.devices = gpus;
  target.device_count = 1;
  CHECK(tb_transfer(tensor, &target, NULL, 0, &managed, NULL) == TB_DEVICE);
  target.devices = NULL;
  target.ignores_read_only = 1;
  CHECK(tb_transfer(tensor, &target, NULL, 0, &managed, NULL) == TB_READ_ONLY);
  target.ignores_read_only = 0;
  target.unversioned = 1;
  CHECK(tb_transfer(tensor, &target, NULL, 0, &managed, NULL) == TB_READ_ONLY);
  tb_options never = {.size = sizeof never, .copy = TB_COPY_NEVER};
  target.unversioned = 0;
  target.alignment = 1 << 20;
  CHECK(tb_plan(tensor, &target, &never, &(tb_report){.size = sizeof(tb_report)}) == TB_COPY_NEEDED);
  CHECK(strstr(tb_error(), "an unaligned address") != NULL && managed == NULL);
  CHECK(strstr(tb_error(), "allow a copy with TB_COPY_IF_NEEDED") != NULL);
  tb_device third = {1, 3}; /* There is one host. */
  tb_options there = {.size = sizeof there, .copy = TB_COPY_NEVER, .device = &third};
  tb_report report = {.size = sizeof report};
  OK(tb_plan(tensor, NULL, &there, &report));
  CHECK(report.reason == NULL && report.device.kind == 1 && report.device.index == 0);
  tb_tensor_drop(tensor);
  CHECK(released == 1);
}

static void copies_go_into_memory_that_exists(void) {
  static float into[24];
  int released = 0;
  const int64_t row[2] = {1, 6}, axes[2] = {1, 0}, doubled[2] = {3, 6};
  tb_tensor *from = made(SHAPE, NULL, 0, &released), *one_row = made(row, NULL, 0, &released), *to = NULL, *other = NULL;
  tb_memory memory = {sizeof memory, into, TRANSPOSED, NULL, 2, 0, FLOAT32, HOST, 0, count, &released};
  OK(tb_tensor_memory(&memory, &to));
  CHECK(tb_copy_into(from, to, NULL, 0) == TB_LAYOUT && into[1] == 0);
  OK(tb_copy_into(from, to, axes, 2));
  for (int i = 0; i < 24; ++i) CHECK(into[i] == numbers[i % 4 * 6 + i / 4]);
  memory.shape = SHAPE;
  OK(tb_tensor_memory(&memory, &other));
  OK(tb_copy_into(one_row, other, NULL, 0));
  for (int i = 0; i < 24; ++i) CHECK(into[i] == numbers[i % 6]);
  CHECK(tb_copy_into(to, other, axes, 2) == TB_LAYOUT && strstr(tb_error(), "share memory") != NULL);
  tb_tensor_drop(other);
  memory.read_only = 1;
  OK(tb_tensor_memory(&memory, &other));
  CHECK(tb_copy_into(from, other, NULL, 0) == TB_READ_ONLY);
  tb_tensor_drop(other);
  memory.read_only = 0;
  memory.dtype.code = 0;
  OK(tb_tensor_memory(&memory, &other));
  CHECK(tb_copy_into(from, other, NULL, 0) == TB_DTYPE);
  tb_tensor_drop(other);
  memory.dtype = FLOAT32;
  memory.shape = doubled;
  memory.strides = (const int64_t[2]){3, 1};
  OK(tb_tensor_memory(&memory, &other));
  CHECK(tb_copy_into(one_row, other, NULL, 0) == TB_LAYOUT && strstr(tb_error(), "two elements at one address") != NULL);
  tb_tensor_drop(other);
  tb_tensor_drop(from);
  tb_tensor_drop(one_row);
  tb_tensor_drop(to);
  CHECK(released == 7);
}

/* Each struct with a size, one byte too short and one too long. */
static void other_sizes_are_refused(tb_tensor *tensor) {
  for (int off = -1; off < 2; off += 2) {
    void *managed = NULL;
    tb_target target = {.size = sizeof target + (size_t)off};
    tb_options options = {.size = sizeof options + (size_t)off};
    tb_report report = {.size = sizeof report + (size_t)off}, right = {.size = sizeof right};
    tb_memory memory = {.size = sizeof memory + (size_t)off};
    CHECK(tb_tensor_info(tensor, &memory) == TB_VERSION && memory.data == NULL);
    CHECK(strstr(tb_error(), "sizeof(tb_memory)") != NULL);
    CHECK(tb_transfer(tensor, &target, NULL, 0, &managed, NULL) == TB_VERSION);
    CHECK(strstr(tb_error(), "sizeof(tb_target)") != NULL);
    CHECK(tb_transfer(tensor, NULL, &options, 0, &managed, NULL) == TB_VERSION);
    CHECK(tb_transfer(tensor, NULL, NULL, 0, &managed, &report) == TB_VERSION);
    CHECK(tb_plan(tensor, &target, NULL, &right) == TB_VERSION);
    CHECK(tb_plan(tensor, NULL, NULL, &report) == TB_VERSION && report.device.kind == 0 && managed == NULL);
  }
  tb_tensor *other = NULL;
  size_t *own = malloc(sizeof *own); /* nothing after the size is read */
  *own = sizeof *own;
  tb_report report = {.size = sizeof report};
  CHECK(tb_plan(tensor, (const tb_target *)own, NULL, &report) == TB_VERSION);
  CHECK(tb_plan(tensor, NULL, (const tb_options *)own, &report) == TB_VERSION);
  CHECK(tb_plan(tensor, NULL, NULL, (tb_report *)own) == TB_VERSION);
  CHECK(tb_tensor_info(tensor, (tb_memory *)own) == TB_VERSION);
  CHECK(tb_tensor_memory((const tb_memory *)own, &other) == TB_VERSION && other == NULL);
  free(own);
}

static void nonsense_is_refused(void) {
  int released = 0, deleted = 0;
  int64_t shape[1] = {24}, axes[65] = {0};
  void *managed = NULL;
  tb_report report = {.size = sizeof report};
  tb_tensor *tensor = made(SHAPE, NULL, 0, &released), *other = NULL;
  CHECK(tb_require(TB_ABI) == TB_OK && tb_require(TB_ABI + 1) == TB_VERSION);
  CHECK(strstr(tb_error(), "compile with the header of the library") != NULL);
  CHECK(tb_plan(NULL, NULL, NULL, &report) == TB_ARGUMENT && tb_plan(tensor, NULL, NULL, NULL) == TB_ARGUMENT);
  CHECK(tb_transfer(NULL, NULL, NULL, 0, &managed, NULL) == TB_ARGUMENT);
  CHECK(tb_transfer(tensor, NULL, NULL, 0, NULL, NULL) == TB_ARGUMENT);
  CHECK(tb_copy_into(NULL, tensor, NULL, 0) == TB_ARGUMENT && tb_copy_into(tensor, NULL, NULL, 0) == TB_ARGUMENT);
  CHECK(tb_tensor_dlpack(NULL, 1, 0, &other) == TB_PROTOCOL);
  dl_versioned newer = {2, 0, &deleted, count_versioned, 0, numbers, HOST, 1, FLOAT32, shape, NULL, 0};
  CHECK(tb_tensor_dlpack(&newer, 1, 0, &other) == TB_VERSION && deleted == 1);
  dl_versioned current = {1, 0, &deleted, count_versioned, 0, numbers, HOST, 1, FLOAT32, shape, NULL, 0};
  CHECK(tb_tensor_dlpack(&current, 1, 0, NULL) == TB_ARGUMENT && deleted == 2);
  current.ndim = 65;
  CHECK(tb_tensor_dlpack(&current, 1, 0, &other) == TB_PROTOCOL && deleted == 3);
  other_sizes_are_refused(tensor);

  for (int wrong = -1; wrong < 4; wrong += 4) {
    tb_target target = {.size = sizeof target, .strides = wrong};
    CHECK(tb_plan(tensor, &target, NULL, &report) == TB_ARGUMENT && strstr(tb_error(), "strides is") != NULL);
    tb_options options = {.size = sizeof options, .copy = wrong};
    CHECK(tb_plan(tensor, NULL, &options, &report) == TB_ARGUMENT && strstr(tb_error(), "copy is") != NULL);
    options = (tb_options){.size = sizeof options, .elements = wrong};
    CHECK(tb_plan(tensor, NULL, &options, &report) == TB_ARGUMENT && strstr(tb_error(), "elements is") != NULL);
  }
  tb_target uneven = {.size = sizeof uneven, .alignment = 48};
  CHECK(tb_plan(tensor, &uneven, NULL, &report) == TB_ARGUMENT && strstr(tb_error(), "power of two") != NULL);
  tb_options turned = {.size = sizeof turned, .axes = axes, .axis_count = 65};
  CHECK(tb_plan(tensor, NULL, &turned, &report) == TB_ARGUMENT);
  turned.axis_count = 2;
  CHECK(tb_plan(tensor, NULL, &turned, &report) == TB_ARGUMENT && strstr(tb_error(), "once") != NULL);
  CHECK(tb_copy_into(tensor, tensor, axes, 65) == TB_ARGUMENT);
  const tb_device moon = {77, 0};
  tb_options far = {.size = sizeof far, .device = &moon};
  CHECK(tb_plan(tensor, NULL, &far, &report) == TB_DEVICE);
  tb_tensor_drop(tensor);
  CHECK(released == 1);
}

static void the_host_has_no_streams(void) {
  OK(tb_used(HOST, numbers, 0x1234));
  CHECK(tb_order(HOST, 1, 2) == TB_DEVICE && strstr(tb_error(), "no streams") != NULL);
  const tb_device gpu = {2, 0};
  CHECK(tb_used(gpu, NULL, 1) == TB_ARGUMENT && tb_used(gpu, numbers, 1) == TB_ARGUMENT);
}

/* A tensor whose share was revoked: the notice comes by a socket. */
static void what_is_gone_goes_nowhere(const tb_tensor *seen) {
  const struct timespec millisecond = {0, 1000000};
  tb_report report = {.size = sizeof report};
  void *managed = NULL;
  char ticket[TB_TICKET_BYTES];
  for (int i = 0; i < 30000 && tb_plan(seen, NULL, NULL, &report) == TB_OK; ++i) nanosleep(&millisecond, NULL);
  CHECK(tb_plan(seen, NULL, NULL, &report) == TB_GONE && strstr(tb_error(), "revoked") != NULL);
  CHECK(tb_transfer(seen, NULL, NULL, 0, &managed, NULL) == TB_GONE && managed == NULL);
  CHECK(tb_copy_into(seen, seen, NULL, 0) == TB_GONE);
  CHECK(tb_share(&seen, 1, NULL, 60, TB_WRITING_USUAL, ticket) == TB_GONE);
}

static void a_ticket_opens_what_was_shared(void) {
  char folder[] = "/tmp/truebridge-verbs-XXXXXX", ticket[TB_TICKET_BYTES];
  CHECK(mkdtemp(folder) != NULL && setenv("TRUEBRIDGE_IPC", folder, 1) == 0);
  int released = 0;
  renumber();
  tb_tensor *tensors[2] = {made(SHAPE, NULL, 0, &released), made(TRANSPOSED, BY_COLUMNS, 1, &released)};
  tb_tensor *seen = NULL;
  OK(tb_share((const tb_tensor *const *)tensors, 2, "a pair", 60, TB_WRITING_NEVER, ticket));
  tb_tensor_drop(tensors[0]);
  tb_tensor_drop(tensors[1]);
  CHECK(released == 2 && strlen(ticket) < TB_TICKET_BYTES);

  tb_opened *opened = NULL;
  OK(tb_open(ticket, &opened));
  CHECK(tb_opened_count(opened) == 2 && strcmp(tb_opened_tree(opened), "a pair") == 0);
  tb_memory memory = {.size = sizeof memory};
  OK(tb_opened_tensor(opened, 1, &seen));
  OK(tb_tensor_info(seen, &memory));
  CHECK(memory.ndim == 2 && memory.shape[0] == 6 && memory.shape[1] == 4 && memory.read_only && memory.data != numbers);
  for (int i = 0; i < 6; ++i)
    for (int j = 0; j < 4; ++j) {
      const float *element = (const float *)memory.data + i * memory.strides[0] + j * memory.strides[1];
      CHECK(*element == (float)(j * 6 + i));
    }
  tb_tensor *none = NULL;
  CHECK(tb_opened_tensor(opened, 2, &none) == TB_ARGUMENT && strstr(tb_error(), "2 tensors") != NULL);
  OK(tb_revoke(ticket));
  what_is_gone_goes_nowhere(seen);
  CHECK(*(const float *)memory.data == 0);
  tb_tensor_drop(seen);
  tb_opened *again = NULL;
  CHECK(tb_open(ticket, &again) == TB_GONE && again == NULL);
  tb_opened_drop(opened);
  tb_opened_drop(NULL);

  CHECK(tb_open("ticket", &again) == TB_ARGUMENT && tb_open(NULL, &again) == TB_ARGUMENT && tb_open(ticket, NULL) == TB_ARGUMENT);
  CHECK(tb_share(NULL, 1, NULL, 60, 0, ticket) == TB_ARGUMENT && tb_share(NULL, 0, NULL, -1, 0, ticket) == TB_ARGUMENT);
  CHECK(tb_share(NULL, 0, NULL, 60, 4, ticket) == TB_ARGUMENT && tb_share(NULL, 0, NULL, 60, 0, NULL) == TB_ARGUMENT);
  CHECK(tb_opened_count(NULL) == 0 && tb_opened_tree(NULL) == NULL && tb_tensor_info(NULL, &memory) == TB_ARGUMENT);
  tb_share_close();
  CHECK(rmdir(folder) == 0);
}

int main(void) {
  tb_counts counts;
  renumber();
  a_managed_tensor_converts_in_place();
  what_does_not_fit_is_copied();
  pinned_memory_is_copied_on_the_host();
  memory_of_another_device_is_not_copied();
  a_copy_is_as_aligned_as_the_target_wants_it();
  counts_that_overflow_are_refused();
  copies_beyond_memory_are_refused();
  the_caller_asks_for_an_order();
  a_target_names_what_it_takes();
  copies_go_into_memory_that_exists();
  nonsense_is_refused();
  the_host_has_no_streams();
  a_ticket_opens_what_was_shared();
  OK(tb_stats(&counts));
  CHECK(counts.leased > 0 && counts.leased == counts.released && counts.leaked == 0);
  return 0;
}
