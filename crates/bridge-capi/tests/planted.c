/* Faults that the sanitizers must find.
 *
 * Usage: planted leak|late|beyond */

#include "check.h"

/* A tensor of 6 by 4 float32: the transpose of 4 by 6. */
static tb_tensor *transposed(float *numbers) {
  static const int64_t shape[2] = {6, 4}, strides[2] = {1, 6};
  tb_tensor *tensor = NULL;
  tb_memory memory = {.size = sizeof memory, .data = numbers, .shape = shape, .strides = strides, .ndim = 2};
  memory.dtype = FLOAT32;
  memory.device = HOST;
  OK(tb_tensor_memory(&memory, &tensor));
  return tensor;
}

static dl_versioned *copied(float *numbers) {
  tb_options always = {.size = sizeof always, .copy = TB_COPY_ALWAYS, .elements = TB_ELEMENTS_ROW_MAJOR};
  tb_tensor *tensor = transposed(numbers);
  dl_versioned *managed = NULL;
  OK(tb_transfer(tensor, NULL, &always, 0, (void **)&managed, NULL));
  tb_tensor_drop(tensor);
  return managed;
}

int main(int count, char **arguments) {
  CHECK(count == 2);
  float *numbers = calloc(24, sizeof *numbers), *few = calloc(23, sizeof *few);
  float sum = 0;
  if (strcmp(arguments[1], "leak") == 0) {
    /* Several: the address of one may still be in a register. */
    for (int i = 0; i < 16; ++i) sum += *(float *)copied(numbers)->data;
  } else if (strcmp(arguments[1], "late") == 0) {
    dl_versioned *managed = copied(numbers);
    const float *data = managed->data;
    managed->deleter(managed);
    sum += data[3];
  } else {
    dl_versioned *managed = copied(few);
    managed->deleter(managed);
  }
  free(numbers);
  free(few);
  return sum != 0;
}
