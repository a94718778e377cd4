/* tensor-bridge: foreign memory as tensors of TensorFlow's graphs, and TensorFlow's results as tensors for others.
 *
 * A graph is fed a handle, and a run returns one: two int32 in host memory. The tensor itself stays where it is:
 *
 *     foreign memory -> tb_tensor -> tb_feed -> tb_external, whose handle is fed to a run
 *     a handle that a run returned -> tb_take -> tb_external -> tb_external_dlpack or tb_external_view
 *
 * In a graph, the operation TensorBridgeInput (handle: int32, T: type -> y: T) returns the tensor that is fed, and
 * TensorBridgeOutput (x: T -> handle: int32) returns the handle of a fetched tensor. tb_session adds them itself.
 *
 * Rules for all functions:
 *
 * - A function that can fail returns a status. It writes its outputs only with TB_OK. tb_error returns the message,
 *   which says what to do next.
 * - Any function may be called on any thread. An object must not be dropped while another thread uses it.
 * - No function waits for a device but tb_session_run, which returns when TensorFlow's run does.
 * - A function that takes ownership (of a managed tensor, of the owner of a tb_memory) takes it also on an error: the
 *   owner has been released then, or will be. Other pointers need to live no longer than the call.
 * - Lengths and strides count elements. Streams are CUDA handles: 0 means no stream, 1 the legacy default stream, 2 the
 *   per-thread default stream of the calling thread.
 */
#ifndef TENSOR_BRIDGE_H
#define TENSOR_BRIDGE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this interface. Compare it with tb_abi first: another number means another interface. */
#define TB_ABI 1

/* The most dimensions of a tensor. */
#define TB_MAX_NDIM 64

typedef enum tb_status {
  TB_OK = 0,
  TB_ARGUMENT = 1,      /* an argument is invalid */
  TB_NOT_A_TENSOR = 2,  /* the object is not a tensor that can be lent */
  TB_DTYPE = 3,         /* the target has no such dtype */
  TB_LAYOUT = 4,        /* shape, strides or offset describe no view of the memory */
  TB_DEVICE = 5,        /* on another device than asked, or on one that the target does not have */
  TB_READ_ONLY = 6,     /* read-only, and the consumer cannot keep it read-only */
  TB_COPY_NEEDED = 7,   /* a copy is needed, and forbidden or not possible here */
  TB_REQUIRES_GRAD = 8, /* it takes part in automatic differentiation */
  TB_CONSUMED = 9,      /* consumed or taken before */
  TB_PROTOCOL = 10,     /* it breaks the rules of DLPack */
  TB_VERSION = 11,      /* a version of DLPack or of a framework that is not supported */
  TB_MISSING = 12,      /* a framework or a driver is missing */
  TB_DRIVER = 13,       /* the CUDA driver reported an error */
  TB_FRAMEWORK = 14,    /* TensorFlow reported an error */
  TB_PANIC = 15,        /* a bug of this library: please report it */
  TB_REFUSED = 16,      /* the producer refuses to export the tensor */
  TB_CAPTURED = 17,     /* one of two streams is being captured into a CUDA graph and the other is not */
  TB_OUT_OF_MEMORY = 18 /* TensorFlow or the device has no memory left */
} tb_status;

/* Returns TB_ABI of the library. */
uint32_t tb_abi(void);

/* Returns the message of the last call on this thread that failed; "" before the first. Valid until the next one. */
const char *tb_error(void);

/* Returns the name of a status, such as "copy_needed". NULL for other numbers. */
const char *tb_status_name(int32_t status);

/* ---- descriptions of tensors ------------------------------------------------------------------------------------ */

/* DLDataType of dlpack.h: code, bits of a lane, lanes. */
typedef struct tb_dtype {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
} tb_dtype;

/* DLDevice of dlpack.h: kind (1 host, 2 CUDA) and number. */
typedef struct tb_device {
  int32_t kind;
  int32_t index; /* in a tb_memory, -1 means the device of the address, by the driver */
} tb_device;

/* A tensor in plain memory. */
typedef struct tb_memory {
  void *data;              /* the first element; may be NULL for a tensor without elements */
  const int64_t *shape;    /* ndim lengths */
  const int64_t *strides;  /* ndim strides, signed, in elements; NULL for a compact, row-major tensor */
  int32_t ndim;
  int32_t read_only;       /* not 0: no consumer may write to it */
  tb_dtype dtype;
  tb_device device;
  uint64_t stream;         /* the stream of pending work on the tensor; 0 for none */
  void (*release)(void *); /* called once with owner, on any thread, when the memory is no longer used; or NULL */
  void *owner;
} tb_memory;

/* Description of a tb_external, which is always compact and row-major. */
typedef struct tb_info {
  void *data;
  uint64_t stream; /* TensorFlow's stream, in which it was written; 0 for host memory */
  tb_dtype dtype;
  tb_device device;
  int32_t ndim;
  int32_t read_only;
  int64_t shape[TB_MAX_NDIM];
} tb_info;

/* ---- tensors of the caller -------------------------------------------------------------------------------------- */

/* A tensor of the caller or of another framework, which can be fed any number of times. */
typedef struct tb_tensor tb_tensor;

/* Makes one of plain memory. The legacy default stream waits for memory->stream from now on, so memory->stream may be
 * destroyed after the call. */
tb_status tb_tensor_memory(const tb_memory *memory, tb_tensor **out);

/* Makes one of a DLManagedTensor (versioned 0) or a DLManagedTensorVersioned (versioned 1). On a CUDA device the caller
 * has ordered its work before the legacy default stream. */
tb_status tb_tensor_dlpack(void *managed, int32_t versioned, tb_tensor **out);

/* NULL is allowed, here and in every other drop. A tb_external that was fed keeps the memory. */
void tb_tensor_drop(tb_tensor *tensor);

/* ---- TensorFlow ------------------------------------------------------------------------------------------------- */

/* A TensorFlow of this process, with the operations registered. It lives as long as the process. */
typedef struct tb_runtime tb_runtime;

/* Finds the TensorFlow 1.15 (series 1) or 2.x (series 2) that the process has loaded, for instance by
 * "import tensorflow". */
tb_status tb_runtime_loaded(int32_t series, const tb_runtime **out);

/* Loads the TensorFlow in this folder, such as site-packages/tensorflow, without Python. */
tb_status tb_runtime_open(const char *folder, const tb_runtime **out);

/* Returns the version, such as "1.15.5". The text lives as long as the process. */
const char *tb_runtime_version(const tb_runtime *runtime);

/* ---- the edges of graphs ---------------------------------------------------------------------------------------- */

/* A tensor at the edge of a graph: one that is fed, or one that a run fetched. */
typedef struct tb_external tb_external;

typedef enum tb_copy {
  TB_COPY_IF_NEEDED = 0,
  TB_COPY_ALWAYS = 1,
  TB_COPY_NEVER = 2
} tb_copy;

/* Makes the tensor ready to be fed, in place where TensorFlow can take it: TensorFlow's stream waits, on the device,
 * for the work on it. Copies are made in host memory only: TB_COPY_NEEDED where a device tensor needs one. */
tb_status tb_feed(const tb_runtime *runtime, const tb_tensor *tensor, int32_t copy, tb_external **out);

/* Takes the tensor that a run fetched under this handle. Each can be taken once (TB_CONSUMED). */
tb_status tb_take(const tb_runtime *runtime, const int32_t handle[2], tb_external **out);

/* Consumes a taken tensor, so that it can be taken again under its handle. TB_ARGUMENT for one that was fed, which
 * stays the caller's. */
tb_status tb_external_put_back(tb_external *external);

/* Returns the handle to feed. It is valid as long as the object lives; a run that has read it keeps the memory. */
tb_status tb_external_handle(const tb_external *external, int32_t handle[2]);

tb_status tb_external_info(const tb_external *external, tb_info *out);

void tb_external_drop(tb_external *external);

/* ---- views of them ---------------------------------------------------------------------------------------------- */

/* Returns a DLManagedTensor (versioned 0) or a DLManagedTensorVersioned (versioned 1), which the caller owns. On a CUDA
 * device, stream waits for TensorFlow's stream, on the device, and must live as long as the tensor: TensorFlow's stream
 * waits for it before the memory is reused. Stream 0 means the legacy default stream. TB_READ_ONLY for read-only memory
 * in a DLManagedTensor, which has no flag for it. */
tb_status tb_external_dlpack(const tb_external *external, uint64_t stream, int32_t versioned, void **out);

/* The memory of a tb_external in use by the caller, as tb_external_info describes it. */
typedef struct tb_view tb_view;

tb_status tb_external_view(const tb_external *external, uint64_t stream, tb_view **out);

/* Records that the view is used on this stream, too. The stream must live as long as the view. */
tb_status tb_view_used(const tb_view *view, uint64_t stream);

void tb_view_drop(tb_view *view);

/* ---- counts ----------------------------------------------------------------------------------------------------- */

typedef struct tb_counts {
  uint64_t leased;    /* views made: fed to TensorFlow, or taken from it */
  uint64_t released;  /* views returned */
  uint64_t retired;   /* of those, how many wait for the device */
  uint64_t leaked;    /* views whose memory is never reused, because the driver could not tell when it may be */
  uint64_t untaken;   /* results not taken yet */
  uint64_t reclaimed; /* results that were dropped with their session before they were taken */
} tb_counts;

tb_status tb_stats(tb_counts *out);

/* ---- sessions, without Python ----------------------------------------------------------------------------------- */

typedef struct tb_session tb_session;

/* A tensor of the GraphDef that is replaced by the tensor that is fed. */
typedef struct tb_input {
  const char *name;     /* such as "x:0" */
  const int64_t *shape; /* ndim lengths, -1 for any */
  int32_t ndim;
  tb_dtype dtype;
  const char *device;   /* such as "/device:GPU:0"; NULL lets TensorFlow choose */
} tb_input;

typedef struct tb_session_options {
  int32_t no_memory_growth;        /* not 0: TensorFlow allocates nearly the whole GPU at once; 0: as the gpu_options of
                                      config say, and without them as memory is needed */
  double memory_fraction;          /* the largest share of a GPU that it allocates; 0 for no limit */
  const uint32_t *visible_devices; /* the GPUs that it uses; NULL for all */
  size_t visible_device_count;
  const void *config;              /* a serialised ConfigProto, which wins; NULL for one with allow_soft_placement */
  size_t config_size;
} tb_session_options;

typedef struct tb_named {
  const char *name;
  const tb_external *tensor;
} tb_named;

/* Opens a session on a serialised GraphDef. options may be NULL. */
tb_status tb_session_open(const tb_runtime *runtime, const void *graph_def, size_t size, const tb_input *inputs,
                          size_t input_count, const char *const *outputs, size_t output_count,
                          const tb_session_options *options, tb_session **out);

/* Runs it. Writes the outputs of the session, in their order, to outputs, which has room for output_count; the caller
 * owns them. */
tb_status tb_session_run(const tb_session *session, const tb_named *feeds, size_t feed_count, tb_external **outputs,
                         size_t output_count);

/* Closes and drops it, also where TensorFlow reports an error. Tensors that were taken stay valid. */
tb_status tb_session_close(tb_session *session);

/* ---- Python ----------------------------------------------------------------------------------------------------- */

/* Functions of Python's C API, for capsules and for memory whose release needs the GIL. */
typedef struct tb_python {
  int (*is_initialized)(void);                                  /* Py_IsInitialized */
  int (*gil_state_ensure)(void);                                /* PyGILState_Ensure */
  void (*gil_state_release)(int);                               /* PyGILState_Release */
  void *(*gil_state_get_this_thread_state)(void);               /* PyGILState_GetThisThreadState */
  void (*err_fetch)(void **, void **, void **);                 /* PyErr_Fetch */
  void (*err_restore)(void *, void *, void *);                  /* PyErr_Restore */
  void *(*err_occurred)(void);                                  /* PyErr_Occurred */
  void (*err_write_unraisable)(void *);                         /* PyErr_WriteUnraisable */
  void *(*capsule_new)(void *, const char *, void (*)(void *)); /* PyCapsule_New */
  int (*capsule_is_valid)(void *, const char *);                /* PyCapsule_IsValid */
  void *(*capsule_get_pointer)(void *, const char *);           /* PyCapsule_GetPointer */
  int (*capsule_set_name)(void *, const char *);                /* PyCapsule_SetName */
} tb_python;

/* From now on foreign memory is released with the GIL, so tb_memory.release may be Py_DecRef. A thread that Python
 * knows takes the GIL and releases the memory at once. On other threads, such as TensorFlow's, the release is deferred
 * to the next tb_..._drop on a thread that Python knows, or to a thread of this library. Calls after the first do
 * nothing. */
tb_status tb_python_open(const tb_python *python);

/* Call it before the interpreter shuts down, without the GIL. Foreign memory that is still in use then is leaked. */
tb_status tb_python_close(void);

/* Makes a tb_tensor of a DLPack capsule, versioned or not. The caller holds the GIL. The capsule is consumed, also on
 * most errors. */
tb_status tb_python_tensor(void *capsule, tb_tensor **out);

/* Returns tb_external_dlpack as a capsule (a new reference). The caller holds the GIL. */
tb_status tb_python_capsule(const tb_external *external, uint64_t stream, int32_t versioned, void **out);

#ifdef __cplusplus
}
#endif

#endif /* TENSOR_BRIDGE_H */
