/*
 A plan has the error of its transfer, for memory of every kind of device, with a driver or without. A separate program:
 without a driver the library keeps memory of a GPU forever, because no stream can be waited for.
 */
#include "check.h"

int main(void) {
  const int64_t none[1] = {0};
  tb_options always = {.size = sizeof always, .copy = TB_COPY_ALWAYS};
  int planned = 0;
  for (int32_t kind = 1; kind <= 16; ++kind) {
    tb_memory memory = {.size = sizeof memory, .shape = none, .ndim = 1, .dtype = FLOAT32, .device = {kind, 0}};
    tb_report report = {.size = sizeof report};
    tb_tensor *tensor = NULL;
    dl_versioned *managed = NULL;
    if (tb_tensor_memory(&memory, &tensor) != TB_OK) continue;
    const enum tb_status plan = tb_plan(tensor, NULL, &always, &report);
    CHECK(plan == tb_transfer(tensor, NULL, &always, 0, (void **)&managed, NULL));
    if (managed != NULL) managed->deleter(managed);
    tb_tensor_drop(tensor);
    ++planned;
  }
  CHECK(planned > 3);
  return 0;
}
