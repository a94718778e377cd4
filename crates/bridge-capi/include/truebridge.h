/* truebridge: tensors of every framework in each other, in place. Written by `cargo xtask generate header`.
 *
 * Memory with an owner becomes a tb_tensor. From there:
 *
 *     tb_tensor -> tb_plan, tb_transfer -> a managed tensor of DLPack for a consumer
 *     tb_tensor -> tb_copy_into -> the memory of another tb_tensor
 *     tb_tensor -> tb_feed -> tb_external, whose handle is fed to a run of a graph of TensorFlow
 *     a handle that a run returned -> tb_take -> tb_external -> tb_external_dlpack or tb_external_view
 *
 * In a graph, the operation TruebridgeInput (handle: int32, T: type -> y: T) returns the tensor that is fed, and
 * TruebridgeOutput (x: T -> handle: int32) returns the handle of a fetched tensor. tb_session adds them itself.
 *
 * Rules for all functions:
 *
 * - A function that can fail returns a status. It writes its outputs only with TB_OK. tb_error returns the message,
 *   which says what to do next. Nothing unwinds into the caller.
 * - Any function may be called on any thread. An object must not be dropped while another thread uses it.
 * - Only tb_session_run, and functions that bring a tensor of a device to the host, wait for a device.
 * - A function that takes ownership (of a managed tensor, of the owner of a tb_memory) takes it also on an error: the
 *   owner has been released then, or will be. Other pointers need to live no longer than the call.
 * - A NULL where none is allowed is TB_ARGUMENT. A struct whose first field is size needs it set to its sizeof: another
 *   size is TB_VERSION, and no other field is read then, so the owner of a tb_memory remains the caller's.
 * - Lengths and strides count elements. Streams are CUDA handles: 0 means no stream, or the legacy default stream where
 *   there must be one, 1 the legacy default stream, 2 the per-thread default stream of the calling thread.
 */

#ifndef TRUEBRIDGE_H
#define TRUEBRIDGE_H

#include <stddef.h>
#include <stdint.h>

/* The version of this interface. Another number means another interface: tb_require compares it with the library. */
#define TB_ABI 3

/* The most dimensions of a tensor. */
#define TB_MAX_NDIM 64

/* The bytes of a ticket with the 0 at its end, at most. */
#define TB_TICKET_BYTES 513

/* Results of functions. Their numbers never change. */
typedef enum tb_status {
  TB_OK = 0,
  /* an argument is invalid */
  TB_ARGUMENT = 1,
  /* the object is not a tensor that can be exported */
  TB_NOT_A_TENSOR = 2,
  /* the target has no such dtype */
  TB_DTYPE = 3,
  /* shape, strides or offset describe no view of the memory */
  TB_LAYOUT = 4,
  /* on another device than asked, or on one that the target does not have */
  TB_DEVICE = 5,
  /* read-only, and the consumer cannot keep it read-only */
  TB_READ_ONLY = 6,
  /* a copy is needed, and forbidden or not possible here */
  TB_COPY_NEEDED = 7,
  /* it takes part in automatic differentiation */
  TB_REQUIRES_GRAD = 8,
  /* consumed or taken before */
  TB_CONSUMED = 9,
  /* it breaks the rules of DLPack */
  TB_PROTOCOL = 10,
  /* a version of this interface, of DLPack or of a framework that is not supported */
  TB_VERSION = 11,
  /* a framework or a driver is missing */
  TB_MISSING = 12,
  /* the CUDA driver reported an error */
  TB_DRIVER = 13,
  /* TensorFlow reported an error */
  TB_FRAMEWORK = 14,
  /* a bug of this library: please report it */
  TB_PANIC = 15,
  /* the producer refuses to export the tensor */
  TB_REFUSED = 16,
  /* one of two streams is being captured into a CUDA graph and the other is not */
  TB_CAPTURED = 17,
  /* TensorFlow or the device has no memory left */
  TB_OUT_OF_MEMORY = 18,
  /* another process is of another user, or the ticket is not the right one */
  TB_DENIED = 19,
  /* another process has ended or has taken its memory back */
  TB_GONE = 20,
  /* another process allows no more, or does not answer in time */
  TB_BUSY = 21,
} tb_status;

/* Whether a copy is made. */
typedef enum tb_copy {
  TB_COPY_IF_NEEDED = 0,
  TB_COPY_ALWAYS = 1,
  TB_COPY_NEVER = 2,
} tb_copy;

/* The order of the elements of a result in memory. */
typedef enum tb_elements {
  TB_ELEMENTS_ANY_ORDER = 0,
  /* the last index runs fastest, without gaps */
  TB_ELEMENTS_ROW_MAJOR = 1,
  /* the first index runs fastest, without gaps */
  TB_ELEMENTS_COLUMN_MAJOR = 2,
} tb_elements;

/* The strides that a consumer takes. */
typedef enum tb_strides {
  TB_STRIDES_ANY = 0,
  TB_STRIDES_NON_NEGATIVE = 1,
  /* compact, row-major tensors only */
  TB_STRIDES_COMPACT = 2,
} tb_strides;

/* Who may write to the tensors of a ticket. */
typedef enum tb_writing {
  /* private on the host, shared on a device */
  TB_WRITING_USUAL = 0,
  /* each process that opens it, only for itself; not on a device */
  TB_WRITING_PRIVATE = 1,
  TB_WRITING_NEVER = 2,
  /* all processes, and all see the writes */
  TB_WRITING_SHARED = 3,
} tb_writing;

/* A tensor at the edge of a graph: one that is fed, or one that a run fetched. */
typedef struct tb_external tb_external;

/* The tensors of a ticket, open in this process. */
typedef struct tb_opened tb_opened;

/* A TensorFlow of this process, with the operations registered. It lives as long as the process. */
typedef struct tb_runtime tb_runtime;

/* A session, without Python. */
typedef struct tb_session tb_session;

/* A tensor of the caller or of another framework, which can be fed and transferred any number of times. */
typedef struct tb_tensor tb_tensor;

/* The memory of a tb_external in use by the caller. */
typedef struct tb_view tb_view;

/* DLDataType of dlpack.h. */
typedef struct tb_dtype {
  /* kind of number */
  uint8_t code;
  /* bits of a lane */
  uint8_t bits;
  /* must be 1 */
  uint16_t lanes;
} tb_dtype;

/* DLDevice of dlpack.h. */
typedef struct tb_device {
  /* 1 host, 2 CUDA, 3 pinned, 13 managed */
  int32_t kind;
  /* in a tb_memory, -1 means the device of the address, by the driver; there is one host, whatever its number */
  int32_t index;
} tb_device;

/* Description of a tb_external, which is always compact and row-major. */
typedef struct tb_info {
  void *data;
  /* TensorFlow's stream, in which it was written; 0 for host memory */
  uint64_t stream;
  struct tb_dtype dtype;
  struct tb_device device;
  int32_t ndim;
  int32_t read_only;
  int64_t shape[TB_MAX_NDIM];
} tb_info;

/* A `PyObject *`. */
typedef void *tb_object;

/*
 The functions of Python's C API that are called for capsules and for memory whose release needs the GIL, all of the
 limited API.
 */
typedef struct tb_python {
  /* `Py_IsInitialized` */
  int (*is_initialized)(void);
  /* `PyGILState_Ensure` */
  int (*gil_state_ensure)(void);
  /* `PyGILState_Release` */
  void (*gil_state_release)(int);
  /* `PyGILState_GetThisThreadState` */
  void *(*gil_state_get_this_thread_state)(void);
  /* `PyErr_Fetch` */
  void (*err_fetch)(tb_object*, tb_object*, tb_object*);
  /* `PyErr_Restore` */
  void (*err_restore)(tb_object, tb_object, tb_object);
  /* `PyErr_Occurred` */
  tb_object (*err_occurred)(void);
  /* `PyErr_WriteUnraisable` */
  void (*err_write_unraisable)(tb_object);
  /* `PyCapsule_New` */
  tb_object (*capsule_new)(void*, const char*, void(*)(tb_object));
  /* `PyCapsule_IsValid` */
  int (*capsule_is_valid)(tb_object, const char*);
  /* `PyCapsule_GetPointer` */
  void *(*capsule_get_pointer)(tb_object, const char*);
  /* `PyCapsule_SetName` */
  int (*capsule_set_name)(tb_object, const char*);
} tb_python;

/* A tensor of the GraphDef that is replaced by the fed tensor. */
typedef struct tb_input {
  /* such as "x:0" */
  const char *name;
  /* ndim lengths, -1 for any */
  const int64_t *shape;
  int32_t ndim;
  struct tb_dtype dtype;
  /* such as "/device:GPU:0"; NULL lets TensorFlow choose */
  const char *device;
} tb_input;

/* How a session is opened. */
typedef struct tb_session_options {
  /*
   not 0: TensorFlow allocates nearly the whole GPU at once; 0: as the gpu_options of config say, and without them
   as memory is needed
   */
  int32_t no_memory_growth;
  /* the largest share of a GPU that it may allocate; 0 for no limit */
  double memory_fraction;
  /* the GPUs that it uses; NULL for all */
  const uint32_t *visible_devices;
  size_t visible_device_count;
  /* a serialised ConfigProto, which wins; NULL for one with allow_soft_placement */
  const void *config;
  size_t config_size;
} tb_session_options;

/* A tensor that is fed. */
typedef struct tb_named {
  const char *name;
  const struct tb_external *tensor;
} tb_named;

/* Counts of the whole process. */
typedef struct tb_counts {
  /* views made */
  uint64_t leased;
  /* views returned */
  uint64_t released;
  /* how many of those wait for the device */
  uint64_t pending;
  /* views whose memory is never reused, because the driver could not tell when it may be */
  uint64_t leaked;
  /* results of graphs that were not taken yet */
  uint64_t unclaimed;
  /* results that were dropped with their session before they were taken */
  uint64_t reclaimed;
} tb_counts;

/* A tensor in plain memory. */
typedef struct tb_memory {
  /* sizeof(tb_memory), set by the caller */
  size_t size;
  /* the first element; may be NULL for a tensor without elements */
  void *data;
  /* ndim lengths */
  const int64_t *shape;
  /* ndim strides, signed, in elements; NULL for a compact, row-major tensor */
  const int64_t *strides;
  int32_t ndim;
  /* not 0: no consumer may write to it */
  int32_t read_only;
  struct tb_dtype dtype;
  struct tb_device device;
  /* the stream of pending work on the tensor; 0 for none */
  uint64_t stream;
  /* called once with owner, on any thread, when the memory is no longer used; or NULL */
  void (*release)(void*);
  void *owner;
} tb_memory;

/* What a consumer takes in place. Zeroes mean anything; a NULL for the whole struct means the same. */
typedef struct tb_target {
  /* sizeof(tb_target) */
  size_t size;
  /* the consumer, for messages; or NULL */
  const char *name;
  /* its dtypes; NULL for any */
  const struct tb_dtype *dtypes;
  size_t dtype_count;
  /* the kinds of its devices (DLDeviceType); NULL for any */
  const int32_t *devices;
  size_t device_count;
  /* one of tb_strides */
  int32_t strides;
  /* not 0: it would write to read-only memory, which is refused (TB_READ_ONLY) */
  int32_t ignores_read_only;
  /*
   the alignment of the first element, in bytes, beyond that of the element: a power of two up to 2^30; 0 for any
   address
   */
  size_t alignment;
  /* not 0: it takes a DLManagedTensor, not a DLManagedTensorVersioned. That one has no flag for read-only memory */
  int32_t unversioned;
} tb_target;

/* The caller's requests. Zeroes mean none; a NULL for the whole struct means the same. */
typedef struct tb_options {
  /* sizeof(tb_options) */
  size_t size;
  /* one of tb_copy */
  int32_t copy;
  /* one of tb_elements */
  int32_t elements;
  /* the device of the result: a tensor that is elsewhere is moved; NULL for where it is */
  const struct tb_device *device;
  /* dimension d of the result is dimension axes[d] of the tensor; NULL for all as they are */
  const int64_t *axes;
  size_t axis_count;
} tb_options;

/* How a tensor is transferred. */
typedef struct tb_report {
  /* sizeof(tb_report), set by the caller */
  size_t size;
  /* why it is copied, such as "negative strides"; NULL in place. The text lives as long as the process. */
  const char *reason;
  /* who copies: "kernels", "host", "move", "producer", "consumer"; NULL in place */
  const char *copied_by;
  /* bytes that are copied; 0 in place */
  uint64_t bytes_copied;
  /* the stream of the owner, and the reader's, which waits for it; both 0 where none has to wait. tb_plan writes 0. */
  uint64_t owner;
  uint64_t reader;
  /* the device of the result */
  struct tb_device device;
} tb_report;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/* Returns the version of the interface of the library: its TB_ABI. */
uint32_t tb_abi(void);

/*
 Checks that the library has the interface of the header that the program was compiled with: pass TB_ABI. Call it
 first. TB_VERSION for another number.
 */
enum tb_status tb_require(uint32_t abi);

/*
 Finds the TensorFlow 1.15 (series 1) or 2.x (series 2) that the process has loaded, for instance by "import
 tensorflow".
 */
enum tb_status tb_runtime_loaded(int32_t series, const struct tb_runtime **out);

/* Loads the TensorFlow in this folder, such as site-packages/tensorflow, without Python. */
enum tb_status tb_runtime_open(const char *folder, const struct tb_runtime **out);

/* Returns the version, such as "1.15.5"; NULL for NULL. The text lives as long as the process. */
const char *tb_runtime_version(const struct tb_runtime *runtime);

/*
 Makes a tensor ready to be fed, in place where TensorFlow can take it: TensorFlow's stream waits, on the device, for
 the work on it. A copy is made on the device of the tensor. copy is one of tb_copy.
 */
enum tb_status tb_feed(const struct tb_runtime *runtime,
                       const struct tb_tensor *tensor,
                       int32_t copy,
                       struct tb_external **out);

/*
 Takes the tensor that a run fetched under this handle, two numbers. Each can be taken once (TB_CONSUMED). Nothing else
 has its memory: it is in place where a kernel has computed it, and otherwise a copy on its device. Put the operation
 Snapshot before TruebridgeOutput: without it, a reference variable, or a write to what was fed, changes what is
 recorded until it is taken.
 */
enum tb_status tb_take(const struct tb_runtime *runtime, const int32_t *handle, struct tb_external **out);

/*
 Consumes a taken tensor, so that it can be taken again under its handle. TB_ARGUMENT for one that was fed, which
 stays the caller's.
 */
enum tb_status tb_external_put_back(struct tb_external *external);

/*
 Writes the two numbers to feed. They are valid as long as the object lives; a run that has read them keeps the
 memory.
 */
enum tb_status tb_external_handle(const struct tb_external *external, int32_t *handle);

/* Describes a tensor at the edge of a graph. */
enum tb_status tb_external_info(const struct tb_external *external, struct tb_info *out);

/* Drops a tensor at the edge of a graph. */
void tb_external_drop(struct tb_external *external);

/*
 From now on imported memory is released with the GIL, so tb_memory.release may be Py_DecRef. A thread that Python
 knows takes the GIL and releases the memory at once. On other threads, such as TensorFlow's, the release is deferred
 to the next drop of an object here on a thread that Python knows, or to a thread of this library. Calls after the
 first do nothing. TB_ARGUMENT where a function is NULL.
 */
enum tb_status tb_python_open(const struct tb_python *python);

/* Call it before the interpreter shuts down, without the GIL. Imported memory that is still in use then is leaked. */
enum tb_status tb_python_close(void);

/*
 Makes a tensor of a DLPack capsule, versioned or not, as tb_tensor_dlpack does for the legacy default stream. The
 caller holds the GIL. The capsule is consumed, also on most errors.
 */
enum tb_status tb_python_tensor(tb_object capsule, struct tb_tensor **out);

/* Returns tb_external_dlpack as a capsule (a new reference). The caller holds the GIL. */
enum tb_status tb_python_capsule(const struct tb_external *external,
                                 uint64_t stream,
                                 int32_t versioned,
                                 tb_object *out);

/* Opens a session on a serialised GraphDef. with may be NULL. */
enum tb_status tb_session_open(const struct tb_runtime *runtime,
                               const void *graph_def,
                               size_t size,
                               const struct tb_input *inputs,
                               size_t input_count,
                               const char *const *outputs,
                               size_t output_count,
                               const struct tb_session_options *with,
                               struct tb_session **out);

/*
 Runs a session. Writes its outputs, in their order, to outputs, which has room for output_count; the caller owns
 them. Nothing else has their memory. Returns when TensorFlow's run does.
 */
enum tb_status tb_session_run(const struct tb_session *session,
                              const struct tb_named *feeds,
                              size_t feed_count,
                              struct tb_external **outputs,
                              size_t output_count);

/* Closes and drops a session, also where TensorFlow reports an error. Tensors that were taken stay valid. */
enum tb_status tb_session_close(struct tb_session *session);

/* Returns the counts of this process. */
enum tb_status tb_stats(struct tb_counts *out);

/* Returns the message of the last call on this thread that failed; "" before the first. Valid until the next one. */
const char *tb_error(void);

/* Returns the name of a status, such as "copy_needed"; NULL for other numbers. */
const char *tb_status_name(int32_t status);

/*
 Makes work that is submitted to the stream later from now on wait, on the device, for all work that is in the stream
 earlier now. No host thread waits.
 */
enum tb_status tb_order(struct tb_device device, uint64_t earlier, uint64_t later);

/*
 Records that the views at this address, and what is made of them, are also used in this stream: the owner waits for
 it, too, before the memory is reused. data is any address in the view, such as that of its first element. The stream
 must live as long as the view. TB_ARGUMENT where this library has made no view of the address. Host memory needs no
 record.
 */
enum tb_status tb_used(struct tb_device device, const void *data, uint64_t stream);

/*
 Makes a tensor of plain memory. The legacy default stream waits for memory->stream from now on, so memory->stream
 may be destroyed after the call. The owner is taken over, also on an error other than TB_VERSION, the
 status for another memory->size.
 */
enum tb_status tb_tensor_memory(const struct tb_memory *memory, struct tb_tensor **out);

/*
 Makes a tensor of a DLManagedTensor (versioned 0) or a DLManagedTensorVersioned (versioned 1), which is taken over,
 also on an error. On a CUDA device stream is that of the owner: it holds the last writes, or waits for them, and
 must live as long as the tensor and everything that is made of it. 0 means the legacy default stream. In host memory
 it means nothing.
 */
enum tb_status tb_tensor_dlpack(void *managed, int32_t versioned, uint64_t stream, struct tb_tensor **out);

/* Drops a tensor. NULL is allowed, here and in every other drop. What was made of the tensor keeps the memory. */
void tb_tensor_drop(struct tb_tensor *tensor);

/*
 Shares tensors with other processes of this user, for a ticket that can be opened for this many seconds. Those on
 the host are copied once. A tensor that was opened is passed on in place if it was shared with TB_WRITING_SHARED and
 writing is that too, or if it was shared with TB_WRITING_NEVER and writing is not TB_WRITING_SHARED. Those on a CUDA
 device are shared in place, where their allocator allows that. tree is text for the process that opens the ticket, or
 NULL. writing is one of tb_writing. ticket has room for TB_TICKET_BYTES.
 */
enum tb_status tb_share(const struct tb_tensor *const *tensors,
                        size_t count,
                        const char *tree,
                        double seconds,
                        int32_t writing,
                        char *ticket);

/*
 Ends the share of a ticket of this process now. A process that has it open keeps the memory until it drops the
 tensors; its next transfer or copy of one of them is TB_GONE.
 */
enum tb_status tb_revoke(const char *ticket);

/* Lets a ticket of this process expire now. A process that has it open can continue to use it. */
enum tb_status tb_share_end(const char *ticket);

/* Ends all shares of this process. Call it before a process ends that has shared, or leave it to the system. */
void tb_share_close(void);

/* Opens a ticket: its tensors lie in memory of the process that made it, which keeps it until they are dropped here. */
enum tb_status tb_open(const char *ticket, struct tb_opened **out);

/* Returns the number of tensors; 0 for NULL. */
size_t tb_opened_count(const struct tb_opened *opened);

/* Returns the text about the tree, or NULL. Valid until the object is dropped. */
const char *tb_opened_tree(const struct tb_opened *opened);

/*
 Returns one of the tensors, which keeps the memory by itself. TB_GONE where the other process has ended or has
 revoked the share, as in every later call that plans, transfers, copies, feeds or shares the tensor.
 */
enum tb_status tb_opened_tensor(const struct tb_opened *opened, size_t index, struct tb_tensor **out);

/* Drops the object. Tensors that were returned stay. */
void tb_opened_drop(struct tb_opened *opened);

/*
 Describes a tensor. Set out->size before the call. The shape and the strides, in elements, are valid as long as the
 tensor; stream, release and owner are 0.
 */
enum tb_status tb_tensor_info(const struct tb_tensor *tensor, struct tb_memory *out);

/*
 Writes to report what tb_transfer with the same arguments would do, and returns the error that it would return.
 target and options may be NULL.
 */
enum tb_status tb_plan(const struct tb_tensor *tensor,
                       const struct tb_target *target,
                       const struct tb_options *options,
                       struct tb_report *report);

/*
 Makes a managed tensor for a consumer that reads and writes in stream: over the memory of the tensor where the
 consumer takes it, else over a copy, which is made on the device. Any work that is submitted to stream afterwards
 waits, on the device, for the owner. The deleter of the managed tensor makes the owner's stream wait for stream, and
 then returns the memory. So both streams must live as long as the managed tensor. Stream 0 means the legacy default
 stream; a result in host memory needs none. A result on the host, of a tensor that is moved there, is complete when
 the function returns; no other transfer waits. target, options and report may be NULL.
 */
enum tb_status tb_transfer(const struct tb_tensor *tensor,
                           const struct tb_target *target,
                           const struct tb_options *options,
                           uint64_t stream,
                           void **out,
                           struct tb_report *report);

/*
 Copies the elements of one tensor into another that exists, of the same dtype, on any two devices and with any
 strides. Dimension d of from is taken to be axes[d] before; axes may be NULL. Dimensions of length 1 are repeated,
 and so are those that from lacks at the front. The copy runs in the stream of to, after the work in the stream of
 from, which then waits for the copy. Where to is in host memory, the elements are there when the function returns.
 */
enum tb_status tb_copy_into(const struct tb_tensor *from,
                            const struct tb_tensor *to,
                            const int64_t *axes,
                            size_t axis_count);

/*
 Returns a DLManagedTensor (versioned 0) or a DLManagedTensorVersioned (versioned 1), which the caller owns. On a
 CUDA device stream waits for TensorFlow's stream, on the device, and must live as long as the tensor: TensorFlow's
 stream waits for it before the memory is reused. Stream 0 means the legacy default stream. TB_READ_ONLY for read-
 only memory in a DLManagedTensor, which has no flag for it.
 */
enum tb_status tb_external_dlpack(const struct tb_external *external, uint64_t stream, int32_t versioned, void **out);

/* Returns the memory for use in stream, as tb_external_info describes it. The stream is as for tb_external_dlpack. */
enum tb_status tb_external_view(const struct tb_external *external, uint64_t stream, struct tb_view **out);

/* Records that the view is used in this stream, too. The stream must live as long as the view. */
enum tb_status tb_view_used(const struct tb_view *view, uint64_t stream);

/* Drops a view. */
void tb_view_drop(struct tb_view *view);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* TRUEBRIDGE_H */
