//! Views of tensors at the edges of graphs: leases, bare or as managed tensors of DLPack.

use crate::external::CExternal;
use crate::pointers::{borrow, drop_raw, into_raw, non_null, write};
use crate::status::{Status, answer, refused};
use bridge_core::dlpack::wrap;
use bridge_core::{
    Adapter, Consumer, Device, DeviceKind, Lease, Lent, Options, Profile, Result, Stream, Strides, Views, transfer,
};
use bridge_interpreter::AnyManaged;
use std::ffi::c_void;
use std::sync::{Arc, LazyLock};

/// `tb_view`
pub struct CView(Lease);

/// An adapter for the caller, who reads and writes in one stream and takes every lease as it is.
struct Reader {
    profile: Profile,
    stream: Stream,
}

/// The views of all readers, which are looked up by address.
static VIEWS: LazyLock<Views> = LazyLock::new(Views::default);

impl Reader {
    /// Returns a reader for tensors of this dtype and device.
    fn of(external: &CExternal, stream: u64, keeps_read_only: bool) -> Self {
        let profile = Profile {
            name: "DLPack without versions".into(),
            dtypes: vec![external.edge().dtype()],
            strides: Strides::Any,
            alignment: 0,
            devices: vec![external.edge().device().kind],
            keeps_read_only,
            waits_on_export: false,
            private_functions: false,
        };
        Self { profile, stream: Stream::from_handle(stream) }
    }
}

/// The part that outlives the view.
struct InStream(Stream);

impl Consumer for InStream {
    fn current_stream(&self, device: Device) -> Result<Option<Stream>> {
        Ok((device.kind == DeviceKind::CUDA).then_some(self.0))
    }

    fn views(&self) -> &Views {
        &VIEWS
    }
}

impl Adapter for Reader {
    type Tensor = Lease;

    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        Arc::new(InStream(self.stream))
    }

    fn export(&self, _: &Lease) -> Result<Lent> {
        Err(refused("a view cannot be lent again: lend the tensor that it was made of"))
    }

    fn import(&self, lease: Lease) -> Result<Lease> {
        Ok(lease)
    }

    fn compact(&self, _: &Lease) -> Result<Lease> {
        Err(refused("a view cannot be lent again: lend the tensor that it was made of"))
    }
}

fn lease(external: &CExternal, stream: u64, keeps_read_only: bool) -> Result<Lease> {
    let reader = Reader::of(external, stream, keeps_read_only);
    let in_place = Options { copy: Some(false), ..Options::default() };
    let (lease, _) = transfer(&external.graph(), &reader, external.edge(), bridge_copy::ordering(), &in_place)?;
    Ok(lease)
}

/// Returns a managed tensor over a fetched or fed tensor, ready to be read in `stream`.
pub(crate) fn managed(external: &CExternal, stream: u64, versioned: bool) -> Result<AnyManaged> {
    let lease = lease(external, stream, versioned)?;
    Ok(match versioned {
        true => AnyManaged::Versioned(wrap(lease).0.into_raw()),
        false => AnyManaged::Legacy(wrap(lease).0.into_raw()),
    })
}

/// Returns a managed tensor of DLPack over an external.
///
/// # Safety
///
/// `external` is null or alive; `out` is null or writable.
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

/// Returns a view of an external. The external describes it.
///
/// # Safety
///
/// As for [`tb_external_dlpack`].
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

/// Records a further stream in which a view is used.
///
/// # Safety
///
/// `view` is null or alive.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_view_used(view: *const CView, stream: u64) -> Status {
    answer(|| {
        // SAFETY: the caller's obligation.
        let CView(lease) = unsafe { borrow(view, "view") }?;
        VIEWS.used(lease.device(), lease.data(), Stream::from_handle(stream).on_any_thread(), || None);
        Ok(())
    })
}

/// Drops a view.
///
/// # Safety
///
/// `view` is null, or was returned by [`tb_external_view`] and is used no more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_view_drop(view: *mut CView) {
    // SAFETY: the caller's obligation.
    unsafe { drop_raw(view) };
}
