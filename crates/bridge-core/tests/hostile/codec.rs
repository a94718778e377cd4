//! A managed tensor, every field of which an input sets.
//!
//! The codec must take it exactly if DLPack's rules allow it, describe it as its producer does, and call the deleter
//! once. The rules are written down here a second time, in wider numbers.

use bridge_core::dlpack::ffi::{
    DLDataType, DLDataTypeCode, DLDevice, DLDeviceType, DLManagedTensor, DLManagedTensorVersioned, DLTensor,
};
use bridge_core::dlpack::{
    DLPack, DlpackFlags, Managed, ManagedTensorBase, Origin, Tensor, adopt, describes, export, export_borrowed, read,
};
use bridge_core::{Access, DType, Device, Export, HostOnly, MAX_NDIM, Options, Order, Ordering, transfer};
use bridge_fuzz::{Fields, addresses, compact, extent};
use std::ffi::c_void;
use std::ops::Range;
use std::ptr::{null_mut, with_exposed_provenance};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

/// Words of the memory that tensors lie in, and the byte of it that they usually begin at.
const CAPACITY: usize = 64;
const MIDDLE: u64 = 256;

/// The largest extent of a tensor, in bytes.
const MAX_BYTES: i128 = i64::MAX as i128;

/// The most bytes whose bits `dlpark` counts. Larger tensors, which are broadcast ones, may be refused.
const COUNTED: i128 = u64::MAX as i128 / 8;

/// The most elements that are read.
const MOST: i128 = 4096;

/// Runs the input of a case.
pub fn case(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    let fields = Fields::of(&text);
    if fields.has("legacy") { run::<DLManagedTensor>(&fields) } else { run::<DLManagedTensorVersioned>(&fields) }
}

/// An ABI of managed tensors.
trait Abi: ManagedTensorBase + 'static {
    const VERSIONED: bool;
    fn state(&mut self, fields: &Fields<'_>);
}

impl Abi for DLManagedTensor {
    const VERSIONED: bool = false;
    fn state(&mut self, _: &Fields<'_>) {}
}

impl Abi for DLManagedTensorVersioned {
    const VERSIONED: bool = true;
    fn state(&mut self, fields: &Fields<'_>) {
        self.version.major = fields.at("version", 0, 1) as u32;
        self.version.minor = fields.at("version", 1, 3) as u32;
        self.flags = DlpackFlags::from_bits_retain(fields.one("flags", 0));
    }
}

/// What a managed tensor keeps until its deleter is called: numbers of the lengths that it states, and no more.
struct Kept {
    shape: Box<[i64]>,
    strides: Box<[i64]>,
    deleted: Arc<AtomicU32>,
}

/// Frees the managed tensor, so that sanitizers find what reads it afterwards.
unsafe extern "C" fn delete<M: ManagedTensorBase>(managed: *mut M) {
    // SAFETY: `made` has put both on the heap, and this is called once.
    let kept = unsafe { Box::from_raw(Box::from_raw(managed).manager_ctx().cast::<Kept>()) };
    kept.deleted.fetch_add(1, SeqCst);
}

/// A tensor as its producer states it.
struct Stated {
    major: u64,
    minor: u64,
    read_only: bool,
    ndim: i32,
    shape: Option<Vec<i64>>,
    strides: Option<Vec<i64>>,
    dtype: DType,
    device: Device,
    data: usize,
    offset: u64,
    is_aligned: bool,
}

/// Makes a managed tensor over the memory.
fn made<M: Abi>(fields: &Fields<'_>, memory: usize, deleted: &Arc<AtomicU32>) -> (*mut M, Stated) {
    let mut shape = fields.signed("shape").unwrap_or_else(|| vec![4]);
    let ndim = fields.one("ndim", shape.len() as u64) as i32;
    let mut strides = fields.signed("strides").unwrap_or_else(|| compact(&shape));
    // A shape has as many numbers as the tensor states dimensions, unless those are too many.
    let dimensions = usize::try_from(ndim).ok().filter(|ndim| *ndim <= MAX_NDIM).unwrap_or(shape.len());
    shape.resize(dimensions, 1);
    strides.resize(dimensions, 1);
    let skew = fields.one("skew", 0) as usize % 8;
    let data = if fields.has("null-data") { 0 } else { memory.wrapping_add(fields.one("data", MIDDLE) as usize) };
    let dtype = DType {
        code: fields.at("dtype", 0, 2) as u8,
        bits: fields.at("dtype", 1, 32) as u8,
        lanes: fields.at("dtype", 2, 1) as u16,
    };
    let device = DLDevice {
        device_type: DLDeviceType(fields.at("device", 0, 1) as u32),
        device_id: fields.at("device", 1, 0) as i32,
    };
    let mut kept =
        Box::new(Kept { shape: shape.clone().into(), strides: strides.clone().into(), deleted: deleted.clone() });
    let (has_shape, has_strides) = (!fields.has("null-shape"), !fields.has("null-strides"));
    // An empty slice has an address, but not one that may be read.
    let skewed = |numbers: &mut [i64]| numbers.as_mut_ptr().cast::<u8>().wrapping_add(skew).cast::<i64>();
    let tensor = DLTensor {
        data: std::ptr::with_exposed_provenance_mut(data),
        device,
        ndim,
        dtype: DLDataType { code: DLDataTypeCode(dtype.code), bits: dtype.bits, lanes: dtype.lanes },
        shape: if has_shape { skewed(&mut kept.shape) } else { null_mut() },
        strides: if has_strides { skewed(&mut kept.strides) } else { null_mut() },
        byte_offset: fields.one("offset", 0),
    };
    let deleter = (!fields.has("null-deleter")).then_some(delete::<M> as unsafe extern "C" fn(*mut M));
    let mut managed = Box::new(M::from_parts(tensor, Box::into_raw(kept).cast::<c_void>(), deleter));
    managed.state(fields);
    let stated = Stated {
        major: fields.at("version", 0, 1) as u32 as u64,
        minor: fields.at("version", 1, 3) as u32 as u64,
        read_only: managed.flags().contains(DlpackFlags::READ_ONLY),
        ndim,
        shape: has_shape.then_some(shape),
        strides: has_strides.then_some(strides),
        dtype,
        device: Device::from(device),
        data,
        offset: tensor.byte_offset,
        is_aligned: skew == 0 || !(has_shape || has_strides),
    };
    (Box::into_raw(managed), stated)
}

impl Stated {
    fn shape(&self) -> &[i64] {
        self.shape.as_deref().unwrap_or_default()
    }

    /// Returns the strides, which are compact where there are none.
    fn strides(&self) -> Vec<i64> {
        self.strides.clone().unwrap_or_else(|| compact(self.shape()))
    }

    fn itemsize(&self) -> i128 {
        i128::from(self.dtype.bits) / 8
    }

    /// Returns the address of the first element.
    fn first(&self) -> i128 {
        self.data as i128 + i128::from(self.offset)
    }

    fn is_empty(&self) -> bool {
        self.shape().contains(&0)
    }

    /// Returns the number of elements.
    fn numel(&self) -> Option<i128> {
        self.shape().iter().try_fold(1_i128, |product, length| product.checked_mul(i128::from(*length)))
    }

    /// Returns whether there are too many elements to read them all.
    fn is_long(&self) -> bool {
        !self.is_empty() && self.numel().is_none_or(|numel| numel > MOST)
    }

    /// Returns the addresses that the elements lie at, where there are elements.
    fn extent(&self) -> Option<Range<i128>> {
        extent(self.first(), self.shape(), &self.strides(), self.itemsize())
    }

    /// Returns whether the rules allow the tensor; `None` where its lengths are beyond all memory.
    fn is_sound(&self, versioned: bool) -> Option<bool> {
        if versioned && self.major != 1 {
            return Some(false);
        }
        let whole = self.is_aligned
            && (0..=MAX_NDIM as i32).contains(&self.ndim)
            && (self.ndim == 0 || self.shape.is_some())
            // DLPack 1.2 demands them.
            && (!versioned || self.minor < 2 || self.ndim == 0 || self.strides.is_some())
            && self.shape().iter().all(|length| *length >= 0)
            && self.dtype.itemsize().is_some()
            && (self.dtype.lanes == 1 || self.dtype == DType::FLOAT4_E2M1FN_X2)
            && self.device.index >= 0
            && self.first() <= usize::MAX as i128;
        if !whole {
            return Some(false);
        }
        if self.is_empty() {
            let lengths = self.shape().iter().filter(|length| **length > 0);
            let product = lengths.fold(self.itemsize(), |product, length| product.saturating_mul(i128::from(*length)));
            return (product <= COUNTED).then_some(true);
        }
        let fits = |bytes: &Range<i128>| {
            bytes.end - bytes.start <= MAX_BYTES && bytes.start >= 0 && bytes.end <= usize::MAX as i128
        };
        let nbytes = self.numel().and_then(|numel| numel.checked_mul(self.itemsize())).unwrap_or(i128::MAX);
        let sound = self.data != 0 && nbytes <= MAX_BYTES && self.extent().as_ref().is_some_and(fits);
        (!sound || nbytes <= COUNTED).then_some(sound)
    }
}

/// Checks what was taken against what its producer has stated.
fn check(exported: &Export, stated: &Stated, access: Access) {
    let (layout, buffer) = (exported.layout(), exported.buffer());
    assert_eq!((layout.shape(), exported.dtype(), exported.device()), (stated.shape(), stated.dtype, stated.device));
    assert_eq!(buffer.access(), access);
    if stated.is_empty() {
        assert_eq!(layout.numel(), 0);
        return;
    }
    assert_eq!(exported.data() as i128, stated.first());
    for ((length, kept), stride) in layout.shape().iter().zip(layout.strides()).zip(stated.strides()) {
        assert!(*length == 1 || *kept == stride, "{layout}");
    }
    let bytes = buffer.address() as i128..(buffer.address() + buffer.len()) as i128;
    assert_eq!(Some(bytes), stated.extent());
}

/// Makes the tensor of the case for a consumer, and checks that its deleter has then been called, once.
fn consumed<M: Abi>(fields: &Fields<'_>, memory: usize, consumer: impl FnOnce(*mut M, &Stated, &AtomicU32)) {
    let deleted = Arc::new(AtomicU32::new(0));
    let (raw, stated) = made::<M>(fields, memory, &deleted);
    consumer(raw, &stated, &deleted);
    if fields.has("null-deleter") {
        assert_eq!(deleted.load(SeqCst), 0);
        // SAFETY: without a deleter, no code but this frees it.
        unsafe { delete(raw) };
    }
    assert_eq!(deleted.load(SeqCst), 1, "calls of the deleter");
}

/// Runs the case in one ABI.
fn run<M: Abi>(fields: &Fields<'_>) {
    let memory: Box<[u64]> = (1..=CAPACITY as u64).map(|word| word.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
    let start = memory.as_ptr().expose_provenance();
    let bytes = start..start + size_of_val(&*memory);
    consumed::<M>(fields, start, |raw, stated, deleted| {
        // SAFETY: the managed tensor is of this ABI, and its shape and strides are as long as it states, or it states a
        // number of dimensions that no tensor has. No element is read.
        let exported = unsafe { adopt(raw).and_then(|managed| export(managed, |_, _| Ok(Origin::host()))) };
        let sound = stated.is_sound(M::VERSIONED);
        assert!(sound.is_none_or(|sound| sound == exported.is_ok()), "{:?}", exported.as_ref().map(drop));
        if let Ok(exported) = &exported {
            let access = if stated.read_only { Access::ReadOnly } else { Access::ReadWrite };
            check(exported, stated, if M::VERSIONED { access } else { Access::Unstated });
            assert_eq!(deleted.load(SeqCst), 0, "it is in use");
        }
    });

    let mut can_be_read = false;
    consumed::<M>(fields, start, |raw, stated, _| {
        let within = |_: Device, _: usize| Ok(Origin::host().within(Some(bytes.clone())));
        // SAFETY: as above.
        let exported = unsafe { adopt(raw).and_then(|managed| export(managed, within)) };
        let is_inside = |extent: Range<i128>| extent.start >= bytes.start as i128 && extent.end <= bytes.end as i128;
        let sound = stated.is_sound(M::VERSIONED);
        let fits = sound.map(|sound| sound && (stated.is_empty() || stated.extent().is_some_and(is_inside)));
        assert!(fits.is_none_or(|fits| fits == exported.is_ok()), "{:?}", exported.as_ref().map(drop));
        can_be_read = fits == Some(true) && stated.device == Device::CPU && !stated.is_long();
    });
    if can_be_read {
        copied::<M>(fields, start);
    }
    kept::<M>(fields, start);
}

/// Reads and exports a tensor that its producer keeps.
fn kept<M: Abi>(fields: &Fields<'_>, memory: usize) {
    let deleted = Arc::new(AtomicU32::new(0));
    let (raw, stated) = made::<M>(fields, memory, &deleted);
    // SAFETY: the managed tensor is deleted only at the end, and its parts are as for `adopt` above.
    let tensor = unsafe { &*raw }.tensor();
    // SAFETY: as above.
    let view = unsafe { read(tensor) };
    // SAFETY: as above.
    let exported = unsafe { export_borrowed(tensor, Access::ReadWrite, |_, _| Ok((Origin::host(), ()))) };
    match exported {
        Ok(exported) => {
            check(&exported, &stated, Access::ReadWrite);
            let view = view.expect("what can be exported can be read");
            assert_eq!((view.data, view.dtype, view.device), (exported.data(), exported.dtype(), exported.device()));
            assert_eq!(view.layout.strides(), exported.layout().strides());
            let strides = stated.strides.as_deref().filter(|_| stated.ndim > 0).unwrap_or_default();
            // SAFETY: as above.
            let is_same = unsafe { describes(tensor, &exported) };
            assert_eq!(is_same, strides == exported.layout().strides(), "strides {strides:?}, {}", exported.layout());
        }
        // Without a version, which the tensor itself does not have.
        Err(error) => assert_ne!(stated.is_sound(false), Some(true), "{error}"),
    }
    assert_eq!(deleted.load(SeqCst), 0);
    // SAFETY: it was made above, and is used no more.
    unsafe { delete(raw) };
}

/// Copies the tensor, compares every byte, and passes it on in both ABIs.
fn copied<M: Abi>(fields: &Fields<'_>, memory: usize) {
    let ordering: Arc<dyn Ordering> = Arc::new(HostOnly);
    // SAFETY: one thread uses the memory.
    let dlpack = unsafe { DLPack::host() };
    consumed::<M>(fields, memory, |raw, stated, deleted| {
        // SAFETY: the elements lie inside the memory.
        let tensor = unsafe { adopt(raw).and_then(|managed| Tensor::new(managed, |_, _| Ok(Origin::host()))) };
        let tensor = tensor.expect("it was taken before");
        let compactly = Options::default().with_copy(true).with_order(Order::RowMajor);
        match transfer(&dlpack, &dlpack, &tensor, &ordering, &compactly) {
            Ok((copy, _)) => assert_eq!(bytes(copy.data(), copy.layout().nbytes()), elements(stated)),
            Err(error) => {
                assert!(!DType::NAMED.iter().any(|(named, _)| *named == stated.dtype), "{error}");
            }
        }
        let (shape, strides) = (tensor.layout().shape().to_vec(), tensor.layout().strides().to_vec());
        let read_only = tensor.clone().into_managed().flags().contains(DlpackFlags::READ_ONLY);
        assert_eq!(tensor.clone().into_legacy().is_ok(), !read_only);
        // SAFETY: nothing is written.
        let unversioned = unsafe { tensor.clone().into_legacy_unchecked() };
        for again in [passed_on(unversioned), passed_on(tensor.clone().into_managed())] {
            assert_eq!((again.layout().shape(), again.layout().strides()), (&shape[..], &strides[..]));
            assert_eq!((again.data(), again.dtype(), again.device()), (tensor.data(), stated.dtype, stated.device));
        }
        assert_eq!(deleted.load(SeqCst), 0, "it is in use");
    });
}

/// Returns the tensor of a managed tensor of an ABI.
fn passed_on<M: Abi>(managed: Managed<M>) -> Export {
    let raw = managed.into_raw();
    // SAFETY: the managed tensor is a whole one, and nothing else has it.
    unsafe { adopt(raw).and_then(|managed| export(managed, |_, _| Ok(Origin::host()))) }.expect("it is sound")
}

/// Returns the bytes of the elements in row-major order.
fn elements(stated: &Stated) -> Vec<u8> {
    let found = addresses(stated.first(), stated.shape(), &stated.strides(), stated.itemsize());
    found.iter().flat_map(|start| bytes(*start as usize, stated.itemsize() as usize)).collect()
}

fn bytes(address: usize, len: usize) -> Vec<u8> {
    if len == 0 {
        return Vec::new();
    }
    // SAFETY: the bytes are those of elements, and initialised.
    unsafe { std::slice::from_raw_parts(with_exposed_provenance::<u8>(address), len) }.to_vec()
}
