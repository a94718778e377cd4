//! Tensors of other processes: tickets.

use crate::pointers::{borrow, drop_raw, into_raw, non_null, right_size, slice, text, write};
use crate::status::{Status, answer, quietly, refused};
use crate::tensor::{CMemory, CTensor, Caller};
use bridge_core::{Adapter, Options, Result};
use bridge_ipc::{Exporter, Ipc, IpcTensor, Message, Opened, Ticket, Writing, process};
use std::ffi::{CString, c_char};
use std::ptr;
use std::time::Duration;

/// The bytes of a ticket with the 0 at its end, at most.
pub const TB_TICKET_BYTES: usize = 513;

const _: () = assert!(TB_TICKET_BYTES == bridge_ipc::MAX_TICKET + 1);

/// Who may write to the tensors of a ticket.
#[repr(C)]
#[allow(dead_code, reason = "C names the numbers")]
pub enum CWriting {
    /// private on the host, shared on a device
    Usual = 0,
    /// each process that opens it, only for itself; not on a device
    Private = 1,
    Never = 2,
    /// all processes, and all see the writes
    Shared = 3,
}

/// The values of `CWriting`, in their order.
const WRITING: [Option<Writing>; 4] = [None, Some(Writing::Private), Some(Writing::Never), Some(Writing::Shared)];

/// The tensors of a ticket, open in this process.
pub struct COpened {
    tensors: Vec<IpcTensor>,
    tree: Option<CString>,
}

/// Shares tensors with other processes of this user, for a ticket that can be opened for this many seconds. Those on
/// the host are copied once. A tensor that was opened is passed on in place if it was shared with TB_WRITING_SHARED and
/// writing is that too, or if it was shared with TB_WRITING_NEVER and writing is not TB_WRITING_SHARED. Those on a CUDA
/// device are shared in place, where their allocator allows that. tree is text for the process that opens the ticket, or
/// NULL. writing is one of tb_writing. ticket has room for TB_TICKET_BYTES.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_share(
    tensors: *const *const CTensor,
    count: usize,
    tree: *const c_char,
    seconds: f64,
    writing: i32,
    ticket: *mut c_char,
) -> Status {
    answer(|| {
        non_null(ticket, "ticket")?;
        // SAFETY: the pointers are null or what the header says.
        let (tensors, tree) = unsafe {
            let pointers = slice(tensors, count, "tensors")?;
            let tensors: Vec<&CTensor> =
                pointers.iter().map(|tensor| borrow(*tensor, "tensor")).collect::<Result<_>>()?;
            (tensors, if tree.is_null() { None } else { Some(text(tree, "tree")?.to_string()) })
        };
        let time = Duration::try_from_secs_f64(seconds);
        let time = time.map_err(|_| refused(format!("seconds must be ≥ 0, not {seconds}")))?;
        let writing = usize::try_from(writing).ok().and_then(|number| WRITING.get(number).copied());
        let writing = writing.ok_or_else(|| refused("writing is not a value of tb_writing"))?;
        let ordering = bridge_cuda::ordering();
        let callers: Vec<_> = tensors.iter().map(|tensor| Caller::of(tensor, ordering)).collect();
        let leaves: Vec<(&dyn Adapter<Tensor = CTensor>, &CTensor)> =
            callers.iter().zip(tensors).map(|(caller, tensor)| (caller as _, tensor)).collect();
        let message = Message::of(&leaves, writing, ordering, &Options::default()).map_err(|failed| failed.error)?;
        let shared = CString::new(message.share(&*process::exporter()?, time, tree)?.text()).expect("JSON has no NUL");
        let bytes = shared.as_bytes_with_nul();
        // SAFETY: a ticket has at most so many bytes, for which the caller has room.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr().cast(), ticket, bytes.len()) };
        Ok(())
    })
}

/// Ends the share of a ticket of this process now. A process that has it open keeps the memory until it drops the
/// tensors; its next transfer or copy of one of them is TB_GONE.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_revoke(ticket: *const c_char) -> Status {
    // SAFETY: the pointer is null or what the header says.
    answer(|| unsafe { with_exporter(ticket, Exporter::revoke) })
}

/// Lets a ticket of this process expire now. A process that has it open can continue to use it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_share_end(ticket: *const c_char) -> Status {
    // SAFETY: the pointer is null or what the header says.
    answer(|| unsafe { with_exporter(ticket, Exporter::end) })
}

/// Calls `body` with a ticket and the exporter of this process.
///
/// # Errors
///
/// The text is not a ticket, or this process has shared nothing; those of `body`.
///
/// # Safety
///
/// The pointer is null or points to a C string.
unsafe fn with_exporter(ticket: *const c_char, body: fn(&Exporter, &Ticket) -> Result<()>) -> Result<()> {
    // SAFETY: passed on to the caller.
    let ticket = unsafe { text(ticket, "ticket") }?.parse()?;
    let none = || refused("this process has shared nothing: pass the ticket to the process that made it");
    body(&*process::exporter_of(&ticket).ok_or_else(none)?, &ticket)
}

/// Ends all shares of this process. Call it before a process ends that has shared, or leave it to the system.
#[unsafe(no_mangle)]
pub extern "C" fn tb_share_close() {
    quietly(process::close);
}

/// Opens a ticket: its tensors lie in memory of the process that made it, which keeps it until they are dropped here.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_open(ticket: *const c_char, out: *mut *mut COpened) -> Status {
    answer(|| {
        non_null(out, "out")?;
        // SAFETY: the pointer is null or what the header says.
        let Opened { tensors, tree, .. } = bridge_ipc::open(&unsafe { text(ticket, "ticket") }?.parse()?)?;
        let tree = tree.map(|tree| CString::new(tree.replace('\0', " ")).unwrap_or_default());
        // SAFETY: `out` is not null, and the caller may be written to there.
        unsafe { write(out, into_raw(COpened { tensors, tree }), "out") }
    })
}

/// Returns the number of tensors; 0 for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_opened_count(opened: *const COpened) -> usize {
    // SAFETY: the pointer is null or what the header says.
    unsafe { opened.as_ref() }.map_or(0, |opened| opened.tensors.len())
}

/// Returns the text about the tree, or NULL. Valid until the object is dropped.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_opened_tree(opened: *const COpened) -> *const c_char {
    // SAFETY: the pointer is null or what the header says.
    let tree = unsafe { opened.as_ref() }.and_then(|opened| opened.tree.as_ref());
    tree.map_or(ptr::null(), |tree| tree.as_ptr())
}

/// Returns one of the tensors, which keeps the memory by itself. TB_GONE where the other process has ended or has
/// revoked the share, as in every later call that plans, transfers, copies, feeds or shares the tensor.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_opened_tensor(opened: *const COpened, index: usize, out: *mut *mut CTensor) -> Status {
    answer(|| {
        non_null(out, "out")?;
        // SAFETY: the pointer is null or what the header says.
        let tensors = &unsafe { borrow(opened, "opened") }?.tensors;
        let tensor = tensors
            .get(index)
            .ok_or_else(|| refused(format!("there are {} tensors: pass a smaller index", tensors.len())))?;
        // SAFETY: C has no safe code: the program orders the uses of memory that it shares.
        let tensor = CTensor::new(unsafe { Ipc::new() }.export(tensor)?);
        // SAFETY: `out` is not null, and may be written to.
        unsafe { write(out, into_raw(tensor), "out") }
    })
}

/// Drops the object. Tensors that were returned stay.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_opened_drop(opened: *mut COpened) {
    // SAFETY: the caller's obligation.
    unsafe { drop_raw(opened) };
}

/// Describes a tensor. Set out->size before the call. The shape and the strides, in elements, are valid as long as the
/// tensor; stream, release and owner are 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_tensor_info(tensor: *const CTensor, out: *mut CMemory) -> Status {
    answer(|| {
        // SAFETY: the pointers are null or what the header says.
        unsafe {
            right_size(out, "tb_memory")?;
            let exported = borrow(tensor, "tensor")?.exported();
            let (layout, read_only) = (exported.layout(), exported.buffer().access().forbids_writes());
            let memory = CMemory {
                size: size_of::<CMemory>(),
                data: exported.as_ptr(),
                shape: layout.shape().as_ptr(),
                strides: layout.strides().as_ptr(),
                ndim: layout.shape().len() as i32,
                read_only: i32::from(read_only),
                dtype: exported.dtype().into(),
                device: exported.device().into(),
                stream: 0,
                release: None,
                owner: ptr::null_mut(),
            };
            write(out, memory, "out")
        }
    })
}
