//! Views of tensors at the edges of graphs, for whoever asks: leases, bare or as managed tensors of DLPack.

use crate::external::External;
use crate::pointers::{look, put, there};
use crate::release::dropping;
use crate::status::{Status, answer, quietly, refused};
use bridge_core::dlpack::ffi::{DLManagedTensor, DLManagedTensorVersioned};
use bridge_core::dlpack::{Managed, wrap};
use bridge_core::{
    Adapter, Consumer, Device, DeviceKind, Lease, Lent, Options, Profile, Result, Stream, Strides, Views, transfer,
};
use std::ffi::c_void;
use std::sync::{Arc, LazyLock};

/// `tb_view`
pub struct View(Lease);

/// Somebody who reads and writes in one stream, and takes every lease as it is.
struct Reader {
    profile: Profile,
    stream: Stream,
}

/// The views of all readers: what counts is the address.
static VIEWS: LazyLock<Views> = LazyLock::new(Views::default);

impl Reader {
    /// A reader for tensors like this one.
    fn of(external: &External, stream: u64, keeps_read_only: bool) -> Self {
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
        Err(refused("what was taken is lent once"))
    }

    fn import(&self, lease: Lease) -> Result<Lease> {
        Ok(lease)
    }

    fn compact(&self, _: &Lease) -> Result<Lease> {
        Err(refused("what was taken is lent once"))
    }
}

fn lease(external: &External, stream: u64, keeps_read_only: bool) -> Result<Lease> {
    let reader = Reader::of(external, stream, keeps_read_only);
    let in_place = Options { copy: Some(false), device: None };
    let (lease, _) = transfer(&external.graph(), &reader, external.edge(), bridge_cuda::ordering(), &in_place)?;
    Ok(lease)
}

/// A managed tensor over what a run has given, or over what is fed, ready to be read in `stream`.
pub(crate) fn managed(external: &External, stream: u64, versioned: bool) -> Result<*mut c_void> {
    let lease = lease(external, stream, versioned)?;
    Ok(match versioned {
        true => wrap::<DLManagedTensorVersioned>(lease).0.into_raw().cast(),
        false => wrap::<DLManagedTensor>(lease).0.into_raw().cast(),
    })
}

/// Gives a managed tensor back.
///
/// # Safety
///
/// It is one that [`managed`] gave, with the same `versioned`, and nobody else has it.
pub(crate) unsafe fn delete(managed: *mut c_void, versioned: bool) {
    // SAFETY: the caller's obligation. Our own are of the version that we know.
    unsafe {
        match versioned {
            true => drop(Managed::from_raw(managed.cast::<DLManagedTensorVersioned>())),
            false => drop(Managed::from_raw(managed.cast::<DLManagedTensor>())),
        }
    }
}

/// A managed tensor of DLPack over an external.
///
/// # Safety
///
/// `external` is null or alive; `out` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_external_dlpack(
    external: *const External,
    stream: u64,
    versioned: i32,
    out: *mut *mut c_void,
) -> Status {
    answer(|| {
        there(out, "out")?;
        // SAFETY: the caller's obligations.
        unsafe { put(out, managed(look(external, "external")?, stream, versioned != 0)?, "out") }
    })
}

/// A view of an external, without a description of its own.
///
/// # Safety
///
/// As for [`tb_external_dlpack`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_external_view(external: *const External, stream: u64, out: *mut *mut View) -> Status {
    answer(|| {
        there(out, "out")?;
        // SAFETY: the caller's obligations.
        unsafe {
            let view = View(lease(look(external, "external")?, stream, true)?);
            put(out, Box::into_raw(Box::new(view)), "out")
        }
    })
}

/// Notes a further stream on which a view is used.
///
/// # Safety
///
/// `view` is null or alive.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_view_used(view: *const View, stream: u64) -> Status {
    answer(|| {
        // SAFETY: the caller's obligation.
        let View(lease) = unsafe { look(view, "view") }?;
        VIEWS.used(lease.device(), lease.data(), Stream::from_handle(stream).on_any_thread(), || None);
        Ok(())
    })
}

/// Drops a view.
///
/// # Safety
///
/// `view` is null, or what [`tb_external_view`] gave and nobody else uses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_view_drop(view: *mut View) {
    if !view.is_null() {
        // SAFETY: the caller's obligation.
        quietly(|| dropping(|| drop(unsafe { Box::from_raw(view) })));
    }
}
