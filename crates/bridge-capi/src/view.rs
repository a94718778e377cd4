//! Views of tensors at the edges of graphs: leases, bare or as managed tensors of DLPack.

use crate::external::CExternal;
use crate::pointers::{borrow, drop_raw, into_raw, non_null, write};
use crate::reader::{self, Reader, VIEWS};
use crate::status::{Status, answer};
use bridge_core::{Lease, Options, Profile, Result, Stream, transfer};
use bridge_pyo3::interpreter::AnyManaged;
use std::ffi::c_void;

/// The memory of a tb_external in use by the caller.
pub struct CView(Lease);

fn lease(external: &CExternal, stream: u64, keeps_read_only: bool) -> Result<Lease> {
    let profile = Profile::export_only("DLPack without versions")
        .with_dtypes(vec![external.edge().dtype()])
        .with_devices(vec![external.edge().device().kind])
        .with_keeps_read_only(keeps_read_only);
    // SAFETY: the caller names a stream that exists (`truebridge.h`).
    let reader = Reader::new(profile, Some(unsafe { Stream::from_handle(stream) }));
    let in_place = Options::in_place();
    let (lease, _) = transfer(&external.graph(), &reader, external.edge(), bridge_cuda::ordering(), &in_place)?;
    Ok(lease)
}

/// Returns a managed tensor over a fetched or fed tensor, ready to be read in `stream`.
pub(crate) fn managed(external: &CExternal, stream: u64, versioned: bool) -> Result<AnyManaged> {
    Ok(reader::managed(lease(external, stream, versioned)?, versioned))
}

/// Returns a DLManagedTensor (versioned 0) or a DLManagedTensorVersioned (versioned 1), which the caller owns. On a
/// CUDA device stream waits for TensorFlow's stream, on the device, and must live as long as the tensor: TensorFlow's
/// stream waits for it before the memory is reused. Stream 0 means the legacy default stream. TB_READ_ONLY for read-
/// only memory in a DLManagedTensor, which has no flag for it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_external_dlpack(
    external: *const CExternal,
    stream: u64,
    versioned: i32,
    out: *mut *mut c_void,
) -> Status {
    answer(|| {
        non_null(out, "out")?;
        // SAFETY: the caller's obligations.
        unsafe { write(out, managed(borrow(external, "external")?, stream, versioned != 0)?.as_raw(), "out") }
    })
}

/// Returns the memory for use in stream, as tb_external_info describes it. The stream is as for tb_external_dlpack.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_external_view(external: *const CExternal, stream: u64, out: *mut *mut CView) -> Status {
    answer(|| {
        non_null(out, "out")?;
        // SAFETY: the caller's obligations.
        unsafe {
            let view = CView(lease(borrow(external, "external")?, stream, true)?);
            write(out, into_raw(view), "out")
        }
    })
}

/// Records that the view is used in this stream, too. The stream must live as long as the view.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_view_used(view: *const CView, stream: u64) -> Status {
    answer(|| {
        // SAFETY: the caller's obligation.
        let CView(lease) = unsafe { borrow(view, "view") }?;
        // SAFETY: the caller names a stream that lives as long as the view (`truebridge.h`).
        unsafe {
            let stream = Stream::from_handle(stream).on_any_thread();
            VIEWS.used(lease.device(), lease.data(), stream, || None);
        }
        Ok(())
    })
}

/// Drops a view.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_view_drop(view: *mut CView) {
    // SAFETY: the caller's obligation.
    unsafe { drop_raw(view) };
}
