/* Tensors of a CUDA device without a framework: order, ordered release, copies and moves, judged by their values.
 *
 * Takes memory and streams from the driver, which it loads itself. Prints why it is left out where there is none. */

#include <dlfcn.h>
#include <stddef.h>
#include <time.h>

#include "check.h"

enum { COUNT = 1 << 24, ROUNDS = 50 };

typedef uint64_t address;
static int (*alloc)(address *, size_t), (*release)(address), (*fill)(address, unsigned, size_t, void *);
static int (*to_host)(void *, address, size_t), (*from_host)(address, const void *, size_t);
static int (*copy_async)(address, address, size_t, void *);
static int (*stream_create)(void **, unsigned), (*stream_sync)(void *), (*sync)(void);

#define CU(call) CHECK((call) == 0)

/* Returns why there is no device; NULL where there is one, whose primary context is current then. */
static const char *opened(void) {
  void *cuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), *context = NULL;
  int (*init)(unsigned), (*count)(int *), (*retain)(void **, int), (*current)(void *), devices = 0;
  if (cuda == NULL) return "there is no driver";
  const struct { const char *name; void *function; } names[] = {
      {"cuInit", &init}, {"cuDeviceGetCount", &count}, {"cuDevicePrimaryCtxRetain", &retain},
      {"cuCtxSetCurrent", &current}, {"cuMemAlloc_v2", &alloc}, {"cuMemFree_v2", &release},
      {"cuMemsetD32Async", &fill},
      {"cuMemcpyDtoH_v2", &to_host}, {"cuMemcpyHtoD_v2", &from_host}, {"cuStreamCreate", &stream_create},
      {"cuStreamSynchronize", &stream_sync}, {"cuCtxSynchronize", &sync}, {"cuMemcpyDtoDAsync_v2", &copy_async},
  };
  for (size_t i = 0; i < sizeof names / sizeof *names; ++i) {
    void *found = dlsym(cuda, names[i].name);
    if (found == NULL) return names[i].name;
    memcpy(names[i].function, &found, sizeof found);
  }
  if (init(0) != 0 || count(&devices) != 0 || devices == 0) return "there is no device";
  CU(retain(&context, 0));
  CU(current(context));
  return NULL;
}

static const tb_device GPU = {2, 0};

/* A managed tensor over memory of the device, whose owner works in a stream and keeps the memory. */
typedef struct owned {
  dl_versioned managed;
  int64_t shape[2];
} owned;

static void deleted(dl_versioned *managed) { free(managed->context); }

static tb_tensor *made(address data, void *stream, const int64_t shape[2]) {
  owned *kept = calloc(1, sizeof *kept);
  tb_tensor *tensor = NULL;
  dl_versioned managed = {1, 0, kept, deleted, 0, (void *)data, GPU, 2, {0, 32, 1}, kept->shape, NULL, 0};
  memcpy(kept->shape, shape, sizeof kept->shape);
  kept->managed = managed;
  OK(tb_tensor_dlpack(&kept->managed, 1, (uintptr_t)stream, &tensor));
  return tensor;
}

static address allocated(size_t nbytes) {
  address data = 0;
  CU(alloc(&data, nbytes));
  return data;
}

static int holds(address data, unsigned expected) {
  static unsigned numbers[COUNT];
  CU(sync());
  CU(to_host(numbers, data, sizeof numbers));
  for (int i = 0; i < COUNT; ++i) {
    if (numbers[i] != expected) return 0;
  }
  return 1;
}

static void *stream_of(unsigned flags) {
  void *stream = NULL;
  CU(stream_create(&stream, flags));
  return stream;
}

/* The owner writes; the reader copies after other work; the view is dropped while the copy is pending, and the owner
 * overwrites the memory. The reader must see the first values. */
static void the_reader_sees_what_was_written(int view_is_used_elsewhere) {
  void *owner = stream_of(1), *reader = stream_of(1), *other = stream_of(1);
  const int64_t shape[2] = {1, COUNT};
  const address memory = allocated(4 * (size_t)COUNT), out = allocated(4 * (size_t)COUNT), busy = allocated(4 * (size_t)COUNT);
  for (unsigned round = 1; round <= ROUNDS; ++round) {
    for (int i = 0; i < 40; ++i) CU(fill(memory, 0xdead, COUNT, owner));
    CU(fill(memory, round, COUNT, owner));
    tb_tensor *tensor = made(memory, owner, shape);
    dl_versioned *view = NULL;
    tb_report report = {.size = sizeof report};
    OK(tb_transfer(tensor, NULL, NULL, (uintptr_t)reader, (void **)&view, &report));
    CHECK(report.reason == NULL && report.owner == (uintptr_t)owner && report.reader == (uintptr_t)reader);
    CHECK((address)view->data == memory);
    tb_tensor_drop(tensor);
    void *last = reader;
    if (view_is_used_elsewhere) {
      OK(tb_used(GPU, view->data, (uintptr_t)other));
      OK(tb_order(GPU, (uintptr_t)reader, (uintptr_t)other));
      last = other;
    }
    for (int i = 0; i < 40; ++i) CU(fill(busy, 0, COUNT, last));
    CU(copy_async(out, memory, 4 * (size_t)COUNT, last));
    view->deleter(view);
    CU(fill(memory, 0xbad, COUNT, owner));
    CHECK(holds(out, round));
  }
  CU(release(memory));
  CU(release(out));
  CU(release(busy));
}

static unsigned numbers[6 * 7], back[6 * 7];

static int is_transposed(void) {
  for (int i = 0; i < 42; ++i) {
    if (back[i] != numbers[i % 6 * 7 + i / 6]) return 0;
  }
  return 1;
}

static void copies_are_made_on_the_device(void) {
  const int64_t shape[2] = {6, 7}, turned[2] = {7, 6}, axes[2] = {1, 0};
  void *owner = stream_of(1), *reader = stream_of(0);
  const address memory_of_owner = allocated(sizeof numbers), into = allocated(sizeof numbers);
  for (unsigned i = 0; i < 42; ++i) numbers[i] = i;
  CU(from_host(memory_of_owner, numbers, sizeof numbers));
  CU(sync());
  tb_tensor *tensor = made(memory_of_owner, owner, shape), *target = made(into, reader, turned), *host = NULL;
  tb_target compact = {.size = sizeof compact, .strides = TB_STRIDES_COMPACT, .alignment = 64};
  tb_options options = {.size = sizeof options, .axes = axes, .axis_count = 2};
  tb_report plan = {.size = sizeof plan}, report = {.size = sizeof report};
  dl_versioned *copy = NULL;
  OK(tb_plan(tensor, &compact, &options, &plan));
  OK(tb_transfer(tensor, &compact, &options, (uintptr_t)reader, (void **)&copy, &report));
  CHECK(strcmp(report.copied_by, "kernels") == 0 && plan.copied_by == report.copied_by && report.bytes_copied == 168);
  CHECK(copy->flags == DL_IS_COPIED && copy->device.kind == 2);
  CU(stream_sync(reader));
  CU(to_host(back, (address)copy->data, sizeof back));
  CHECK(is_transposed());
  copy->deleter(copy);

  OK(tb_copy_into(tensor, target, axes, 2));
  memset(back, 0, sizeof back);
  CU(stream_sync(reader));
  CU(to_host(back, into, sizeof back));
  CHECK(is_transposed());

  /* To the host, in a move and into memory that exists, and back. */
  options.device = &HOST;
  OK(tb_transfer(tensor, &compact, &options, 0, (void **)&copy, &report));
  CHECK(strcmp(report.reason, "another device") == 0 && report.device.kind == 1);
  memcpy(back, copy->data, sizeof back);
  CHECK(is_transposed());
  copy->deleter(copy);
  memset(back, 0, sizeof back);
  tb_memory memory = {.size = sizeof memory, .data = back, .shape = turned, .ndim = 2, .dtype = {0, 32, 1}};
  memory.device = HOST;
  OK(tb_tensor_memory(&memory, &host));
  OK(tb_copy_into(tensor, host, axes, 2));
  CHECK(is_transposed());
  options = (tb_options){.size = sizeof options, .device = &GPU};
  OK(tb_transfer(host, NULL, &options, (uintptr_t)reader, (void **)&copy, &report));
  memset(numbers, 0xff, sizeof numbers);
  CU(stream_sync(reader));
  CU(to_host(numbers, (address)copy->data, sizeof numbers));
  CHECK(copy->device.kind == 2 && memcmp(numbers, back, sizeof back) == 0);
  copy->deleter(copy);
  tb_tensor_drop(host);
  tb_tensor_drop(tensor);
  tb_tensor_drop(target);
  CU(sync());
  CU(release(memory_of_owner));
  CU(release(into));
}

static void wrong_devices_are_refused(void) {
  const int64_t shape[2] = {1, 4};
  int refused = 0;
  int64_t lengths[1] = {4};
  const address memory = allocated(16);
  tb_tensor *tensor = NULL;
  void *view = NULL;
  /* Host memory that claims to be on the device. */
  dl_versioned lies = {1, 0, &refused, count_versioned, 0, numbers, GPU, 1, {0, 32, 1}, lengths, NULL, 0};
  CHECK(tb_tensor_dlpack(&lies, 1, 0, &tensor) == TB_PROTOCOL && refused == 1);
  tensor = made(memory, stream_of(1), shape);
  const tb_device beyond = {2, 99};
  tb_options far = {.size = sizeof far, .device = &beyond};
  CHECK(tb_transfer(tensor, NULL, &far, 0, &view, NULL) != TB_OK && view == NULL);
  CHECK(tb_order(beyond, 1, 2) != TB_OK);
  tb_tensor_drop(tensor);
}

/* Memory that waits for the device is returned by a thread, a little later. */
static void everything_is_returned(void) {
  tb_counts counts = {.pending = 1};
  const struct timespec millisecond = {0, 1000000};
  CU(sync());
  for (int i = 0; i < 10000 && counts.pending > 0; ++i) {
    nanosleep(&millisecond, NULL);
    OK(tb_stats(&counts));
  }
  CHECK(counts.pending == 0 && counts.leaked == 0 && counts.leased == counts.released);
}

int main(void) {
  const char *missing = opened();
  if (missing != NULL) {
    printf("left out: no CUDA: %s\n", missing);
    return 0;
  }
  the_reader_sees_what_was_written(0);
  the_reader_sees_what_was_written(1);
  copies_are_made_on_the_device();
  wrong_devices_are_refused();
  everything_is_returned();
  puts("in order on a CUDA device");
  return 0;
}
