//! An adapter with a fault.

use super::Fault;
use crate::{Observed, Subject};
use bridge_core::{
    Access, Adapter, Allocation, Consumer, DType, Device, Export, Keep, Layout, Memory, Offer, Profile, Result, Reuse,
    Stream, Strides, Views,
};
use std::collections::HashMap;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// A subject whose memory a fault can give back early.
pub trait Breakable: Subject {
    /// Returns a function that releases the memory of the tensor while the tensor still uses it.
    fn releaser(&self, tensor: &Self::Tensor) -> Box<dyn Fn() + Send + Sync>;

    /// Returns the same tensor, which does not keep its memory.
    fn orphan(&self, tensor: &Self::Tensor) -> Self::Tensor;
}

/// A subject, and its adapter with one fault. Without a fault it is the subject itself.
pub struct Faulty<A: Subject> {
    pub(super) sound: A,
    pub(super) fault: Option<Fault>,
    profile: Profile,
    /// The last copy, with what was observed of its original.
    last: Mutex<Option<(Observed, A::Tensor)>>,
    /// The view that is being imported.
    slot: Mutex<Option<A::Tensor>>,
    /// Whether a tensor was exported since the consumer was last queried.
    exports: AtomicBool,
    /// Number of imported tensors.
    imports: AtomicUsize,
    /// Whether another device is the current one.
    pub(super) is_elsewhere: AtomicBool,
    keeps: Keeps,
}

bridge_core::debug_fields!(impl[A: Subject] Faulty<A>: fault);

/// What keeps streams alive, by handle, as it was when the handle was first seen.
type Keeps = Arc<Mutex<HashMap<Stream, Option<Keep>>>>;

impl<A: Subject> Faulty<A> {
    /// Plants a fault.
    pub fn new(sound: A, fault: Option<Fault>) -> Self {
        let mut profile = sound.profile().clone();
        match fault {
            Some(Fault::DtypeOverclaimed) => {
                let every = DType::NAMED.iter().map(|(dtype, _)| *dtype);
                profile.dtypes = every.filter(|dtype| dtype.itemsize().is_some()).collect();
            }
            Some(Fault::ReadOnlyOverclaimed) => profile.keeps_read_only = true,
            Some(Fault::NegativeStridesAccepted) => profile.strides = Strides::Any,
            Some(Fault::AlignmentIgnored | Fault::AlignmentAny) => profile.alignment = 0,
            Some(Fault::AlignmentOdd) => profile.alignment = 48,
            Some(Fault::AlignmentInvented) => profile.alignment = 1 << 20,
            Some(Fault::AlignmentOverstated) => profile.alignment *= 4,
            Some(Fault::StridesOverstated) => profile.strides = Strides::Compact,
            Some(Fault::DtypeUnderclaimed) => profile.dtypes.retain(|dtype| *dtype != DType::INT16),
            Some(Fault::ReadOnlyUnderclaimed) => profile.keeps_read_only = false,
            Some(Fault::StridesUnderclaimed) => profile.strides = Strides::NonNegative,
            _ => (),
        }
        Self {
            sound,
            fault,
            profile,
            last: Mutex::default(),
            slot: Mutex::default(),
            exports: AtomicBool::default(),
            imports: AtomicUsize::default(),
            is_elsewhere: AtomicBool::default(),
            keeps: Keeps::default(),
        }
    }

    /// Returns a stream of the framework that is not its current one.
    fn another_stream(&self) -> Result<Option<Stream>> {
        let current = self.sound.consumer().current_stream(self.sound.device())?;
        Ok(self.sound.streams().into_iter().find(|stream| Some(*stream) != current))
    }

    /// Returns whether the framework has a view of this memory; the exported tensor itself need not be one.
    fn has_view_of(&self, exported: &Export) -> Result<bool> {
        let (device, consumer) = (exported.device(), self.sound.consumer());
        let Some(stream) = consumer.current_stream(device)? else { return Ok(false) };
        // SAFETY: the subject keeps its streams until its views are dropped.
        Ok(unsafe { consumer.views().used(device, exported.data(), stream, || None) } > 0)
    }

    /// Exports where the current stream is known only by its handle.
    fn export_under_a_handle(&self, tensor: &A::Tensor) -> Result<Export> {
        let Some(current) = self.sound.consumer().current_stream(self.sound.device())? else {
            return self.sound.export(tensor);
        };
        let mut exported = None;
        // SAFETY: the stream is the current one.
        unsafe {
            self.sound.on_stream(current, &mut || {
                exported = Some(self.sound.export(tensor)?);
                Ok(())
            })
        }?;
        exported.map_or_else(|| self.sound.export(tensor), Ok)
    }

    fn compact_elsewhere(&self, tensor: &A::Tensor) -> Result<A::Tensor> {
        let mut copy = None;
        let mut compact = || {
            copy = Some(self.sound.compact(tensor)?);
            Ok(())
        };
        match self.another_stream()? {
            // SAFETY: the stream is one of the subject's.
            Some(stream) => unsafe { self.sound.on_stream(stream, &mut compact) }?,
            None => compact()?,
        }
        copy.map_or_else(|| self.sound.compact(tensor), Ok)
    }

    fn compact_once(&self, tensor: &A::Tensor) -> Result<A::Tensor> {
        let what = self.sound.observe(tensor)?;
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, copy)) = last.as_ref().filter(|(of, _)| *of == what) {
            return Ok(self.sound.share(copy));
        }
        let copy = self.sound.compact(tensor)?;
        *last = Some((what, self.sound.share(&copy)));
        Ok(copy)
    }
}

#[deny(clippy::missing_trait_methods)]
// SAFETY: the faults are what the suite has to find, in memory that it owns.
unsafe impl<A: Breakable> Adapter for Faulty<A> {
    type Tensor = A::Tensor;

    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        let sound = self.sound.consumer();
        let exports = self.exports.swap(false, Relaxed);
        let mut liar = Liar { sound: Arc::clone(&sound), claims: None, views: None, keeps: None };
        match self.fault {
            Some(Fault::WaitSkipped | Fault::ReleaseNotOrdered) => liar.claims = Some(Stream::LEGACY),
            Some(Fault::ViewsNotNoted) => liar.views = Some(Views::default()),
            Some(Fault::ExportNotNoted) if exports => liar.views = Some(Views::default()),
            Some(Fault::SecondViewNotNoted) if self.imports.load(Relaxed) % 2 == 1 => {
                liar.views = Some(Views::default())
            }
            Some(Fault::StreamOfCurrentDevice) if self.is_elsewhere.load(Relaxed) => liar.claims = Some(Stream::LEGACY),
            Some(Fault::StreamKeptByHandle) => liar.keeps = Some(Arc::clone(&self.keeps)),
            _ => return sound,
        }
        Arc::new(liar)
    }

    fn export(&self, tensor: &A::Tensor) -> Result<Export> {
        let exported = match self.fault {
            Some(Fault::OwnerStreamNotKept) => self.export_under_a_handle(tensor)?,
            _ => self.sound.export(tensor)?,
        };
        self.exports.store(true, Relaxed);
        match self.fault {
            Some(Fault::ReuseBorrowed) if self.has_view_of(&exported)? => {
                spoil(Fault::ReuseOverclaimed, exported, || self.sound.releaser(tensor))
            }
            Some(fault) => spoil(fault, exported, || self.sound.releaser(tensor)),
            None => Ok(exported),
        }
    }

    fn import(&self, offer: Offer) -> Result<A::Tensor> {
        self.imports.fetch_add(1, Relaxed);
        // SAFETY: a fault breaks this on purpose. What it reaches is the memory of the simulated device.
        let offer = unsafe { offer.trusted() };
        match self.fault {
            Some(Fault::Panic) if offer.layout().shape().len() == 2 => panic!("a planted fault"),
            Some(Fault::SilentCopy) => self.sound.compact(&self.sound.import(offer)?),
            Some(Fault::SharedSlot) => {
                let view = self.sound.import(offer)?;
                let slot = || self.slot.lock().unwrap_or_else(PoisonError::into_inner);
                *slot() = Some(self.sound.share(&view));
                std::thread::sleep(Duration::from_micros(50));
                let last = slot().take();
                Ok(last.unwrap_or(view))
            }
            Some(Fault::Leak) => {
                let view = self.sound.import(offer)?;
                std::mem::forget(self.sound.share(&view));
                Ok(view)
            }
            Some(Fault::ReleaseNotOrdered) => {
                let device = offer.device();
                if let Some(current) = self.sound.consumer().current_stream(device)? {
                    // SAFETY: the streams are a default stream, and the one that the framework works in.
                    unsafe { self.sound.ordering().order(device, Stream::LEGACY, current) }?;
                }
                self.sound.import(offer)
            }
            _ => self.sound.import(offer),
        }
    }

    fn compact(&self, tensor: &A::Tensor) -> Result<A::Tensor> {
        match self.fault {
            Some(Fault::CopyNotFresh) => Ok(self.sound.share(tensor)),
            Some(Fault::CopyElsewhere) => self.compact_elsewhere(tensor),
            Some(Fault::CopyStale) => self.compact_once(tensor),
            _ => self.sound.compact(tensor),
        }
    }

    forward_adapter!(A::Tensor, sound: overwritten empty);
}

/// Exports the same tensor with a fault.
fn spoil(fault: Fault, exported: Export, releaser: impl FnOnce() -> Box<dyn Fn() + Send + Sync>) -> Result<Export> {
    let (mut dtype, layout, mut pending) = (exported.dtype(), exported.layout().clone(), exported.pending());
    let (mut shape, mut strides) = (layout.shape().to_vec(), layout.strides().to_vec());
    let mut offset = layout.offset();
    let itemsize = layout.itemsize() as i64;
    let buffer = exported.buffer();
    let bytes = buffer.address()..buffer.address() + buffer.len();
    let (mut device, mut access, mut stream, mut reuse) =
        (buffer.device(), buffer.access(), buffer.stream(), buffer.reuse());
    let mut owner = Owner::default();
    match fault {
        Fault::StridesInBytes => strides.iter_mut().for_each(|stride| *stride *= itemsize),
        Fault::OffsetDropped => offset = layout.byte_extent().0,
        Fault::ShapeReversed => {
            shape.reverse();
            strides.reverse();
        }
        Fault::DimensionsDropped => {
            shape.truncate(32);
            strides.truncate(32);
        }
        Fault::LengthWraps => shape.iter_mut().for_each(|length| *length &= i64::from(i32::MAX)),
        Fault::EmptyFlattened if layout.numel() == 0 => (shape, strides) = (vec![0], vec![1]),
        Fault::DtypeNarrowed => {
            if let Some((_, narrow)) = NARROWER.iter().find(|(wide, _)| *wide == dtype) {
                dtype = *narrow;
                strides.iter_mut().for_each(|stride| *stride *= 2);
            }
        }
        Fault::DtypeMistaken => {
            let both = MISTAKEN.iter().flat_map(|(one, other)| [(*one, *other), (*other, *one)]);
            dtype = both.into_iter().find(|(right, _)| *right == dtype).map_or(dtype, |(_, wrong)| wrong);
        }
        Fault::ReadOnlyLost | Fault::ReadOnlyForgotten | Fault::ReadOnlyReturned => access = Access::ReadWrite,
        Fault::ReadOnlyInvented => access = Access::ReadOnly,
        Fault::PendingDropped => pending = None,
        Fault::WrongDevice => device.index += 1,
        Fault::StreamForgotten => stream = None,
        Fault::StreamMistaken => stream = Some(Stream::LEGACY),
        Fault::ReuseOverclaimed => reuse = Reuse::InStreamOrder,
        Fault::DoubleRelease => owner.again = Some(releaser()),
        _ => (),
    }
    if fault != Fault::EarlyRelease {
        owner.exported = Some(exported);
    }
    let layout = Layout::new(dtype, &shape, Some(&strides), offset)?;
    let allocation = Allocation::new(bytes, device, access, stream, reuse);
    // SAFETY: the promises are broken on purpose. That is sound because faults are planted on simulated memory only, whose
    // addresses are only numbers.
    let memory = unsafe { Memory::new(allocation, owner) };
    Ok(Export::new(dtype, layout, memory)?.with_pending(pending))
}

/// Dtypes, and those of half their size.
const NARROWER: &[(DType, DType)] = &[
    (DType::FLOAT64, DType::FLOAT32),
    (DType::FLOAT32, DType::FLOAT16),
    (DType::INT64, DType::INT32),
    (DType::INT32, DType::INT16),
    (DType::UINT64, DType::UINT32),
    (DType::COMPLEX128, DType::COMPLEX64),
];

/// Dtypes of the same size.
const MISTAKEN: &[(DType, DType)] = &[
    (DType::INT8, DType::UINT8),
    (DType::INT32, DType::UINT32),
    (DType::FLOAT16, DType::BFLOAT16),
    (DType::FLOAT64, DType::COMPLEX64),
    (DType::FLOAT8_E4M3FN, DType::FLOAT8_E4M3FNUZ),
];

/// What keeps the memory of a tensor that is exported with a fault.
#[derive(Default)]
struct Owner {
    exported: Option<Export>,
    again: Option<Box<dyn Fn() + Send + Sync>>,
}

impl Drop for Owner {
    fn drop(&mut self) {
        if let Some(again) = self.again.take() {
            again();
        }
        drop(self.exported.take());
    }
}

/// A consumer that reports wrong facts.
struct Liar {
    sound: Arc<dyn Consumer>,
    claims: Option<Stream>,
    views: Option<Views>,
    keeps: Option<Keeps>,
}

// SAFETY: the faults are what the suite has to find, in memory that it owns.
unsafe impl Consumer for Liar {
    fn current_stream(&self, device: Device) -> Result<Option<Stream>> {
        match self.claims {
            Some(stream) => Ok(Some(stream)),
            None => self.sound.current_stream(device),
        }
    }

    fn keep(&self, device: Device, stream: Stream) -> Option<Keep> {
        let Some(keeps) = &self.keeps else { return self.sound.keep(device, stream) };
        let mut keeps = keeps.lock().unwrap_or_else(PoisonError::into_inner);
        keeps.entry(stream).or_insert_with(|| self.sound.keep(device, stream)).clone()
    }

    fn views(&self) -> &Views {
        self.views.as_ref().unwrap_or_else(|| self.sound.views())
    }
}
