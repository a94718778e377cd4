/* tensor-bridge: tensors of TensorFlow's graphs over the memory of others, and the other way round.
 *
 * What is fed to a graph and fetched from it is a handle, two int32 in host memory. The tensor itself stays where it
 * is:
 *
 *     other memory -> tb_tensor -> tb_feed -> tb_external, whose handle a run is fed
 *     a handle that a run has given -> tb_take -> tb_external -> tb_external_dlpack or tb_external_view
 *
 * In a graph, the operation TensorBridgeInput (handle: int32, T: type -> y: T) stands for what is fed, and
 * TensorBridgeOutput (x: T -> handle: int32) for what is taken. tb_session builds them itself.
 *
 * Rules for all of it:
 *
 * - Every function that can fail gives a status. Outputs are written only with TB_OK. tb_error has the words, which say
 *   what to do next.
 * - Every function may be called on any thread. One object is not dropped while another thread uses it.
 * - Nothing here waits for a device, but for tb_session_run, which returns when TensorFlow's run does.
 * - What is handed over (a managed tensor, the owner of a tb_memory) is handed over by the call, also where it fails:
 *   it has been released then, or will be. Pointers that are only looked at need to live no longer than the call.
 * - Lengths and strides count elements. Streams are handles of CUDA: 0 means that there is none, 1 is the legacy
 *   default stream, 2 that of the calling thread.
 */
#ifndef TENSOR_BRIDGE_H
#define TENSOR_BRIDGE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this interface. Ask tb_abi first: another number means another interface. */
#define TB_ABI 1

/* More dimensions than this have no counterpart. */
#define TB_MAX_NDIM 64

typedef enum tb_status {
  TB_OK = 0,
  TB_ARGUMENT = 1,      /* an argument means nothing here */
  TB_NOT_A_TENSOR = 2,  /* the object is no tensor that can be lent */
  TB_DTYPE = 3,         /* the target has no such dtype */
  TB_LAYOUT = 4,        /* shape, strides or offset describe no view of the memory */
  TB_DEVICE = 5,        /* on another device than asked, or on one that the target does not have */
  TB_READ_ONLY = 6,     /* read-only, and whoever takes it could not keep it so */
  TB_COPY_NEEDED = 7,   /* a copy is needed, and forbidden or not possible here */
  TB_REQUIRES_GRAD = 8, /* it takes part in automatic differentiation */
  TB_CONSUMED = 9,      /* used up or taken before */
  TB_PROTOCOL = 10,     /* it breaks the rules of DLPack */
  TB_VERSION = 11,      /* a version of DLPack or of a framework that is not supported */
  TB_MISSING = 12,      /* a framework or a driver is missing */
  TB_DRIVER = 13,       /* the CUDA driver reported an error */
  TB_FRAMEWORK = 14,    /* TensorFlow reported an error */
  TB_PANIC = 15,        /* a fault of this library: please report it */
  TB_REFUSED = 16,      /* the producer refuses to hand the tensor out */
  TB_CAPTURED = 17,     /* one of two streams is being captured into a CUDA graph and the other is not */
  TB_OUT_OF_MEMORY = 18 /* TensorFlow or the device has no memory left */
} tb_status;

/* TB_ABI of the library. */
uint32_t tb_abi(void);

/* What the last call on this thread that failed has reported; "" before the first. Valid until the next that fails. */
const char *tb_error(void);

/* The status in one word, such as "copy_needed". NULL for a number that is none. */
const char *tb_status_name(int32_t status);

/* ---- what tensors are ------------------------------------------------------------------------------------------- */

/* As DLDataType of dlpack.h: code, bits of a lane, lanes. */
typedef struct tb_dtype {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
} tb_dtype;

/* As DLDevice of dlpack.h: kind (1 host, 2 CUDA) and number. */
typedef struct tb_device {
  int32_t kind;
  int32_t index; /* in a tb_memory, -1 asks the driver where the address is */
} tb_device;

/* A tensor in plain memory. */
typedef struct tb_memory {
  void *data;              /* the first element; it may be NULL where there is none */
  const int64_t *shape;    /* ndim lengths */
  const int64_t *strides;  /* ndim strides, signed, in elements; NULL for a compact, row-major tensor */
  int32_t ndim;
  int32_t read_only;       /* not 0: nobody may write to it */
  tb_dtype dtype;
  tb_device device;
  uint64_t stream;         /* the work on the tensor is in this stream; 0 where there is none under way */
  void (*release)(void *); /* called once with owner, on any thread, when the memory is needed no more; or NULL */
  void *owner;
} tb_memory;

/* What is known of a tb_external, which is always compact and row-major. */
typedef struct tb_info {
  void *data;
  uint64_t stream; /* TensorFlow's stream, in which it was written; 0 for host memory */
  tb_dtype dtype;
  tb_device device;
  int32_t ndim;
  int32_t read_only;
  int64_t shape[TB_MAX_NDIM];
} tb_info;

/* ---- tensors of others ------------------------------------------------------------------------------------------ */

/* A tensor of another framework, to be fed any number of times. */
typedef struct tb_tensor tb_tensor;

/* From plain memory. The legacy default stream is made to wait for memory->stream at once, so that this stream need not
 * outlive the call. */
tb_status tb_tensor_memory(const tb_memory *memory, tb_tensor **out);

/* From a DLManagedTensor (versioned 0) or a DLManagedTensorVersioned (versioned 1). On a CUDA device its work has been
 * ordered before the legacy default stream. */
tb_status tb_tensor_dlpack(void *managed, int32_t versioned, tb_tensor **out);

/* NULL is no fault, here and in every other function for dropping. What was fed keeps the memory. */
void tb_tensor_drop(tb_tensor *tensor);

/* ---- TensorFlow ------------------------------------------------------------------------------------------------- */

/* A TensorFlow of this process, with the operations registered. It lives as long as the process. */
typedef struct tb_runtime tb_runtime;

/* The TensorFlow 1.15 (series 1) or 2.x (series 2) that the process has loaded, by "import tensorflow" for one. */
tb_status tb_runtime_loaded(int32_t series, const tb_runtime **out);

/* The TensorFlow in this folder, such as site-packages/tensorflow, without Python. */
tb_status tb_runtime_open(const char *folder, const tb_runtime **out);

/* Such as "1.15.5"; it lives as long as the process. */
const char *tb_runtime_version(const tb_runtime *runtime);

/* ---- the edges of graphs ---------------------------------------------------------------------------------------- */

/* A tensor at the edge of a graph: one that is fed, or one that a run gave. */
typedef struct tb_external tb_external;

typedef enum tb_copy {
  TB_COPY_IF_NEEDED = 0,
  TB_COPY_ALWAYS = 1,
  TB_COPY_NEVER = 2
} tb_copy;

/* Feeds the tensor, in place where TensorFlow can take it so: TensorFlow's stream waits, on the device, for the work on
 * it. Copies are made in host memory only; TB_COPY_NEEDED where one is needed on a device. */
tb_status tb_feed(const tb_runtime *runtime, const tb_tensor *tensor, int32_t copy, tb_external **out);

/* Takes what a run has given under this handle. Each can be taken once (TB_CONSUMED). */
tb_status tb_take(const tb_runtime *runtime, const int32_t handle[2], tb_external **out);

/* What was taken can be taken again under its handle. The object is gone then. TB_ARGUMENT for one that was fed, which
 * stays the caller's. */
tb_status tb_external_put_back(tb_external *external);

/* What a run is fed. It is good as long as the object lives; a run that has read it keeps the memory itself. */
tb_status tb_external_handle(const tb_external *external, int32_t handle[2]);

tb_status tb_external_info(const tb_external *external, tb_info *out);

void tb_external_drop(tb_external *external);

/* ---- views of them, for others ---------------------------------------------------------------------------------- */

/* As a DLManagedTensor (versioned 0) or a DLManagedTensorVersioned (versioned 1), which the caller owns. On a CUDA
 * device this stream waits for TensorFlow's, on the device, and has to live as long as the tensor: TensorFlow's stream
 * waits for it before the memory is used again. Stream 0 stands for the legacy default stream. TB_READ_ONLY for
 * read-only memory in a DLManagedTensor, which cannot say so. */
tb_status tb_external_dlpack(const tb_external *external, uint64_t stream, int32_t versioned, void **out);

/* The memory of a tb_external in somebody's use, as tb_external_info describes it. */
typedef struct tb_view tb_view;

tb_status tb_external_view(const tb_external *external, uint64_t stream, tb_view **out);

/* The view is used on this stream as well, which has to live as long as the view. */
tb_status tb_view_used(const tb_view *view, uint64_t stream);

void tb_view_drop(tb_view *view);

/* ---- counts ----------------------------------------------------------------------------------------------------- */

typedef struct tb_counts {
  uint64_t leased;    /* views made: fed to TensorFlow, or taken from it */
  uint64_t released;  /* views given back */
  uint64_t retired;   /* of those, how many still wait for the device */
  uint64_t leaked;    /* of how many the memory is never used again, because the device could not tell when */
  uint64_t untaken;   /* results that wait to be taken */
  uint64_t reclaimed; /* results that were never taken and went with their session */
} tb_counts;

tb_status tb_stats(tb_counts *out);

/* ---- sessions, without Python ----------------------------------------------------------------------------------- */

typedef struct tb_session tb_session;

/* A tensor of the GraphDef that is replaced by what is fed. */
typedef struct tb_input {
  const char *name;     /* such as "x:0" */
  const int64_t *shape; /* ndim lengths, -1 where any will do */
  int32_t ndim;
  tb_dtype dtype;
  const char *device;   /* such as "/device:GPU:0"; NULL leaves it to TensorFlow */
} tb_input;

typedef struct tb_session_options {
  int32_t no_memory_growth;        /* not 0: TensorFlow takes nearly the whole GPU at once; else that is for config to
                                      say if it has gpu_options, and if not, memory is taken as it is needed */
  double memory_fraction;          /* the most that it takes of a GPU; 0 for no limit */
  const uint32_t *visible_devices; /* the GPUs that it uses; NULL for all */
  size_t visible_device_count;
  const void *config;              /* a serialised ConfigProto, which wins; NULL for one with allow_soft_placement */
  size_t config_size;
} tb_session_options;

typedef struct tb_named {
  const char *name;
  const tb_external *tensor;
} tb_named;

/* A session on a serialised GraphDef. options may be NULL. */
tb_status tb_session_open(const tb_runtime *runtime, const void *graph_def, size_t size, const tb_input *inputs,
                          size_t input_count, const char *const *outputs, size_t output_count,
                          const tb_session_options *options, tb_session **out);

/* Runs it. outputs has room for as many as the session has, and gets them in their order; the caller owns them. */
tb_status tb_session_run(const tb_session *session, const tb_named *feeds, size_t feed_count, tb_external **outputs,
                         size_t output_count);

/* Closes it, also where TensorFlow reports an error. What was taken stays valid. */
tb_status tb_session_close(tb_session *session);

/* ---- Python ----------------------------------------------------------------------------------------------------- */

/* Functions of the interpreter, by their names in Python's C API: for capsules, and for memory that objects own. */
typedef struct tb_python {
  int (*gil_state_ensure)(void);        /* PyGILState_Ensure */
  void (*gil_state_release)(int);       /* PyGILState_Release */
  int (*gil_state_check)(void);         /* PyGILState_Check */
  void *(*capsule_new)(void *, const char *, void (*)(void *));
  int (*capsule_is_valid)(void *, const char *);
  void *(*capsule_get_pointer)(void *, const char *);
  int (*capsule_set_name)(void *, const char *);
} tb_python;

/* From now on memory of others is released with the GIL: at once where a tb_..._drop is called with it, otherwise by
 * the next of these calls or on a thread of this library's, never on TensorFlow's. So tb_memory.release may be
 * Py_DecRef. The first call counts. */
tb_status tb_python_open(const tb_python *python);

/* Before the interpreter shuts down, and without the GIL: whatever is not released yet is left to the end of the
 * process. */
tb_status tb_python_close(void);

/* From a DLPack capsule of either kind, with the GIL. The capsule is used up, also on most errors. */
tb_status tb_python_tensor(void *capsule, tb_tensor **out);

/* tb_external_dlpack as a capsule (a new reference), with the GIL. */
tb_status tb_python_capsule(const tb_external *external, uint64_t stream, int32_t versioned, void **out);

#ifdef __cplusplus
}
#endif

#endif /* TENSOR_BRIDGE_H */
