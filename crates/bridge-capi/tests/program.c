/* What a C program does with the library: tensors in and out, errors, and, given a TensorFlow, a session.
 *
 * Usage: program [FOLDER GRAPH], where GRAPH holds a GraphDef of y = 2 x + 1. */

#include <time.h>

#include "check.h"

static _Alignas(64) float numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* What ends on TensorFlow's threads may be released by another, a little later. */
static int comes_to(const int *counter, int expected) {
  const struct timespec millisecond = {0, 1000000};
  for (int i = 0; i < 10000 && __atomic_load_n(counter, __ATOMIC_SEQ_CST) < expected; ++i) {
    nanosleep(&millisecond, NULL);
  }
  return __atomic_load_n(counter, __ATOMIC_SEQ_CST) == expected;
}

static tb_memory plain(float *data, const int64_t *length, int *released) {
  tb_memory memory = {sizeof memory, data, length, NULL, 1, 0, FLOAT32, HOST, 0, count, released};
  return memory;
}

static void memory_is_released_once(void) {
  int64_t length = 16, backwards = -1, wild = INT64_MIN;
  int released = 0;
  tb_tensor *tensor = NULL;
  tb_memory memory = plain(numbers, &length, &released);
  OK(tb_tensor_memory(&memory, &tensor));
  CHECK(released == 0);
  tb_tensor_drop(tensor);
  CHECK(released == 1);

  memory = plain(numbers + 15, &length, &released);
  memory.strides = &backwards;
  OK(tb_tensor_memory(&memory, &tensor));
  tb_tensor_drop(tensor);
  CHECK(released == 2);

  memory.strides = &wild;
  CHECK(tb_tensor_memory(&memory, &tensor) == TB_LAYOUT && released == 3);
  memory = plain(NULL, &length, &released);
  CHECK(tb_tensor_memory(&memory, &tensor) == TB_ARGUMENT && released == 4);
  memory = plain(numbers, &length, &released);
  memory.ndim = 65;
  CHECK(tb_tensor_memory(&memory, &tensor) == TB_ARGUMENT && released == 5);
  memory = plain(numbers, NULL, &released);
  CHECK(tb_tensor_memory(&memory, &tensor) == TB_ARGUMENT && released == 6);
  memory = plain(numbers, &length, &released);
  memory.dtype.bits = 4;
  CHECK(tb_tensor_memory(&memory, &tensor) == TB_DTYPE && released == 7);
  CHECK(tb_tensor_memory(&memory, NULL) == TB_ARGUMENT && released == 8);
  CHECK(tb_tensor_memory(NULL, &tensor) == TB_ARGUMENT);
  CHECK(strcmp(tb_error(), "memory is NULL") == 0);
  memory.release = NULL;
  CHECK(tb_tensor_memory(&memory, &tensor) == TB_DTYPE && released == 8);

  /* A struct of another header: the library does not know where its owner is, which stays the caller's. */
  const size_t sizes[] = {0, sizeof memory - 1, sizeof memory + 8};
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; ++i) {
    memory = plain(numbers, &length, &released);
    memory.size = sizes[i];
    CHECK(tb_tensor_memory(&memory, &tensor) == TB_VERSION && released == 8);
    CHECK(strstr(tb_error(), "set it to sizeof(tb_memory)") != NULL);
  }
  tb_tensor_drop(NULL);
}

static void managed_tensors_are_deleted_once(void) {
  int64_t length = 16;
  int deleted = 0;
  tb_tensor *tensor = NULL;
  dl_managed managed = {numbers, HOST, 1, FLOAT32, &length, NULL, 0, &deleted, count_managed};
  OK(tb_tensor_dlpack(&managed, 0, 0, &tensor));
  CHECK(deleted == 0);
  tb_tensor_drop(tensor);
  CHECK(deleted == 1);
  managed.ndim = -1;
  CHECK(tb_tensor_dlpack(&managed, 0, 0, &tensor) == TB_PROTOCOL && deleted == 2);
  CHECK(tb_tensor_dlpack(NULL, 0, 0, &tensor) == TB_PROTOCOL);
}

static void nonsense_is_refused(void) {
  const tb_runtime *runtime = NULL;
  tb_external *external = NULL;
  tb_counts counts;
  int32_t handle[2] = {1, 0};
  CHECK(tb_runtime_loaded(1, &runtime) == TB_MISSING);
  CHECK(tb_runtime_loaded(3, &runtime) == TB_ARGUMENT);
  CHECK(tb_runtime_open("/nowhere", &runtime) == TB_MISSING);
  CHECK(tb_runtime_open(NULL, &runtime) == TB_ARGUMENT);
  CHECK(tb_runtime_version(NULL) == NULL);
  CHECK(tb_feed(NULL, NULL, 0, &external) == TB_ARGUMENT);
  CHECK(tb_take(NULL, handle, &external) == TB_ARGUMENT);
  CHECK(tb_external_put_back(NULL) == TB_ARGUMENT);
  CHECK(tb_external_handle(NULL, handle) == TB_ARGUMENT);
  CHECK(tb_external_info(NULL, NULL) == TB_ARGUMENT);
  CHECK(tb_external_dlpack(NULL, 0, 0, NULL) == TB_ARGUMENT);
  CHECK(tb_external_view(NULL, 0, NULL) == TB_ARGUMENT);
  CHECK(tb_view_used(NULL, 1) == TB_ARGUMENT);
  CHECK(tb_session_close(NULL) == TB_ARGUMENT);
  CHECK(tb_session_run(NULL, NULL, 0, NULL, 0) == TB_ARGUMENT);
  CHECK(tb_session_open(NULL, NULL, 0, NULL, 0, NULL, 0, NULL, NULL) == TB_ARGUMENT);
  CHECK(tb_python_open(NULL) == TB_ARGUMENT);
  CHECK(tb_python_tensor(&handle, NULL) == TB_ARGUMENT);
  CHECK(tb_python_close() == TB_OK);
  CHECK(tb_stats(NULL) == TB_ARGUMENT);
  OK(tb_stats(&counts));
  CHECK(counts.leased == 0 && counts.unclaimed == 0);
  CHECK(strcmp(tb_status_name(TB_COPY_NEEDED), "copy_needed") == 0 && tb_status_name(77) == NULL);
  tb_external_drop(NULL);
  tb_view_drop(NULL);
}

static tb_external *fed(const tb_runtime *runtime, float *data, int64_t rows, int copy, int *released) {
  tb_tensor *tensor = NULL;
  tb_external *external = NULL;
  tb_memory memory = plain(data, &rows, released);
  OK(tb_tensor_memory(&memory, &tensor));
  tb_status status = tb_feed(runtime, tensor, copy, &external);
  tb_tensor_drop(tensor);
  return status == TB_OK ? external : NULL;
}

static void a_session_runs_in_place(const tb_runtime *runtime, const void *graph, size_t size) {
  int released = 0;
  int64_t any = -1;
  const char *outputs[] = {"y:0", "x:0"};
  tb_input input = {"x:0", &any, 1, FLOAT32, NULL};
  tb_session *session = NULL;
  tb_external *results[2];
  tb_info info;
  tb_counts before, after;
  OK(tb_stats(&before));
  OK(tb_session_open(runtime, graph, size, &input, 1, outputs, 2, NULL, &session));

  tb_external *external = fed(runtime, numbers, 16, TB_COPY_NEVER, &released);
  CHECK(external != NULL);
  OK(tb_external_info(external, &info));
  CHECK(info.data == numbers && info.ndim == 1 && info.shape[0] == 16 && info.device.kind == 1 && info.stream == 0);
  tb_named feed = {"x:0", external};
  CHECK(tb_session_run(session, &feed, 1, results, 1) == TB_ARGUMENT);
  CHECK(tb_session_run(session, &feed, 0, results, 2) == TB_ARGUMENT);
  CHECK(tb_session_run(session, &feed, (size_t)1 << 60, results, 2) == TB_ARGUMENT);
  tb_session *none = NULL;
  CHECK(tb_session_open(runtime, graph, SIZE_MAX, &input, 1, outputs, 2, NULL, &none) == TB_ARGUMENT);
  CHECK(tb_session_open(runtime, graph, size, &input, (size_t)1 << 62, outputs, 2, NULL, &none) == TB_ARGUMENT);
  CHECK(tb_session_open(runtime, graph, size, &input, 1, outputs, (size_t)1 << 61, NULL, &none) == TB_ARGUMENT);
  OK(tb_session_run(session, &feed, 1, results, 2));
  tb_view *view = NULL;
  OK(tb_external_view(external, 0, &view));
  tb_external_drop(external);

  /* What was fed is a result as a copy. */
  OK(tb_external_info(results[1], &info));
  CHECK(info.data != numbers && memcmp(info.data, numbers, 16 * sizeof(float)) == 0);
  OK(tb_external_info(results[0], &info));
  CHECK(info.data != numbers && info.dtype.code == 2 && info.dtype.bits == 32 && !info.read_only);
  for (int i = 0; i < 16; ++i) CHECK(((float *)info.data)[i] == 2 * numbers[i] + 1);

  /* Out again, in place, beyond the end of the session. */
  dl_managed *managed = NULL;
  OK(tb_external_dlpack(results[0], 0, 0, (void **)&managed));
  OK(tb_view_used(view, 1));
  CHECK(managed->data == info.data && managed->shape[0] == 16);
  int32_t handle[2];
  tb_external *other = NULL;
  OK(tb_external_handle(results[0], handle));
  OK(tb_external_put_back(results[0]));
  OK(tb_take(runtime, handle, &results[0]));
  CHECK(tb_take(runtime, handle, &other) == TB_CONSUMED);
  tb_external_drop(results[0]);
  tb_external_drop(results[1]);
  OK(tb_session_close(session));
  CHECK(((float *)managed->data)[15] == 31);
  CHECK(released == 0);
  tb_view_drop(view);
  CHECK(comes_to(&released, 1));
  managed->deleter(managed);
  OK(tb_stats(&after));
  CHECK(after.leased - before.leased == 3 && after.released - before.released == 3);
}

static void what_is_fed_is_no_result(const tb_runtime *runtime) {
  int released = 0;
  int32_t handle[2];
  tb_external *external = fed(runtime, numbers, 4, TB_COPY_IF_NEEDED, &released), *other = NULL;
  OK(tb_external_handle(external, handle));
  /* What is fed is not a result. */
  CHECK(tb_take(runtime, handle, &other) == TB_CONSUMED);
  CHECK(tb_external_put_back(external) == TB_ARGUMENT);
  CHECK(strstr(tb_error(), "tb_external_drop") != NULL);
  int32_t still[2];
  OK(tb_external_handle(external, still));
  CHECK(still[0] == handle[0] && still[1] == handle[1] && released == 0);
  tb_external_drop(external);
  CHECK(released == 1);
  CHECK(tb_take(runtime, handle, &other) == TB_CONSUMED);
}

static void copies_are_made_or_refused(const tb_runtime *runtime) {
  int released = 0;
  tb_info info;
  CHECK(fed(runtime, numbers + 1, 8, TB_COPY_NEVER, &released) == NULL && released == 1);
  CHECK(strstr(tb_error(), "unaligned") != NULL);
  CHECK(fed(runtime, numbers, 8, 3, &released) == NULL && released == 2);
  tb_external *external = fed(runtime, numbers + 1, 8, TB_COPY_IF_NEEDED, &released);
  CHECK(external != NULL && released == 3);
  OK(tb_external_info(external, &info));
  CHECK(info.data != numbers + 1 && (uintptr_t)info.data % 64 == 0);
  CHECK(memcmp(info.data, numbers + 1, 32) == 0);
  tb_external_drop(external);
}

int main(int count, char **arguments) {
  CHECK(tb_abi() == TB_ABI);
  CHECK(strcmp(tb_error(), "") == 0);
  memory_is_released_once();
  managed_tensors_are_deleted_once();
  nonsense_is_refused();
  if (count == 3) {
    static char graph[1 << 16];
    const tb_runtime *runtime = NULL, *again = NULL;
    FILE *file = fopen(arguments[2], "rb");
    CHECK(file != NULL);
    size_t size = fread(graph, 1, sizeof graph, file);
    fclose(file);
    OK(tb_runtime_open(arguments[1], &runtime));
    OK(tb_runtime_loaded(1, &again));
    CHECK(runtime == again && strncmp(tb_runtime_version(runtime), "1.15.", 5) == 0);
    what_is_fed_is_no_result(runtime);
    copies_are_made_or_refused(runtime);
    for (int i = 0; i < 3; ++i) a_session_runs_in_place(runtime, graph, size);
    printf("with TensorFlow %s\n", tb_runtime_version(runtime));
  }
  return 0;
}
