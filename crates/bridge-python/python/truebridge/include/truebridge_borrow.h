/* truebridge: a tensor of any framework for the length of a call, for C code that Python calls.
 *
 *     const tb_borrow_api *api = PyCapsule_Import(TB_BORROW_CAPSULE, 0);   // once; null sets an exception
 *     if (!api || api->abi != TB_BORROW_ABI) ...
 *
 *     tb_borrowed x;
 *     if (api->borrow(tensor, &x) < 0) return NULL;    // an exception is set
 *     launch(x.stream, x.data, x.shape, x.strides);
 *     api->end(&x);
 *
 * The caller keeps the reference to the Python object until `end`, and nothing may replace the tensor's memory
 * meanwhile, as t.resize_ does. A kernel in `stream` is like an operation of the framework itself, and may still run
 * after `end`. For work in another stream the caller orders in both directions.
 *
 * A tensor that requires grad is borrowed: autograd does not see kernels. A tensor whose conjugation or negation PyTorch
 * has deferred is refused.
 */
#ifndef TRUEBRIDGE_BORROW_H
#define TRUEBRIDGE_BORROW_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TB_BORROW_CAPSULE "truebridge._core.borrow"

/* The version of this interface: another number means another interface. */
#define TB_BORROW_ABI 1

/* The most dimensions of a tensor. */
#define TB_BORROW_NDIM 64

typedef struct tb_borrowed {
  void *data;         /* the first element; may be null where there is none */
  void *kept;         /* for `end` */
  uint64_t stream;    /* the framework's current stream of the device on this thread, 1 for the legacy default stream;
                         0 for host memory, which is ready */
  int32_t device_type; /* as in dlpack.h: 1 host, 2 CUDA, … */
  int32_t device_id;
  uint8_t dtype_code; /* as in dlpack.h: 0 int, 1 unsigned int, 2 float, 4 bfloat16, 5 complex, 6 bool, … */
  uint8_t dtype_bits;
  uint16_t read_only; /* 1 where the memory must not be written to */
  int32_t ndim;
  int64_t shape[TB_BORROW_NDIM];   /* the first ndim */
  int64_t strides[TB_BORROW_NDIM]; /* in elements; may be negative or 0 */
} tb_borrowed;

typedef struct tb_borrow_api {
  uint32_t abi;
  /* Fills `out` for a tensor. Returns 0, or -1 with an exception set. The caller holds the GIL. */
  int (*borrow)(void *tensor, tb_borrowed *out);
  /* Ends the borrow. It may be called on any thread, once for each borrow that returned 0. */
  void (*end)(tb_borrowed *borrowed);
} tb_borrow_api;

#ifdef __cplusplus
}
#endif

#endif
