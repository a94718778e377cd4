/* What the programs share: checks that end the program, and managed tensors as dlpack.h describes them. */
#ifndef CHECK_H
#define CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "truebridge.h"

#define CHECK(condition)                                                                  \
  do {                                                                                    \
    if (!(condition)) {                                                                   \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #condition, tb_error());     \
      exit(1);                                                                            \
    }                                                                                     \
  } while (0)

#define OK(call) CHECK((call) == TB_OK)

/* As in dlpack.h. */
typedef struct dl_managed {
  void *data;
  tb_device device;
  int32_t ndim;
  tb_dtype dtype;
  int64_t *shape;
  int64_t *strides;
  uint64_t byte_offset;
  void *context;
  void (*deleter)(struct dl_managed *);
} dl_managed;

/* As in dlpack.h. */
typedef struct dl_versioned {
  uint32_t major, minor;
  void *context;
  void (*deleter)(struct dl_versioned *);
  uint64_t flags;
  void *data;
  tb_device device;
  int32_t ndim;
  tb_dtype dtype;
  int64_t *shape;
  int64_t *strides;
  uint64_t byte_offset;
} dl_versioned;

enum { DL_READ_ONLY = 1, DL_IS_COPIED = 2 };

static const tb_dtype FLOAT32 = {2, 32, 1};
static const tb_device HOST = {1, 0};

static inline void count(void *counter) { __atomic_add_fetch((int *)counter, 1, __ATOMIC_SEQ_CST); }
static inline void count_managed(dl_managed *managed) { count(managed->context); }
static inline void count_versioned(dl_versioned *managed) { count(managed->context); }

#endif
