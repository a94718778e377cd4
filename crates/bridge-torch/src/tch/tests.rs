//! What no public function shows: the cast of `tch`'s handle, tensors that `tch` cannot make, and the deleter.

use super::Tch;
use super::import::wrap;
use super::libtorch::{adopt, handle};
use super::memory::Offsets;
use super::runtime::Runtime;
use super::tensors::{empty, none_of};
use crate::library::library_of;
use crate::record::RecordStream;
use ::tch::{Kind, Tensor};
use bridge_core::{
    Access, Adapter, Allocation, Consumer, DType, Device, DeviceKind, ErrorKind, Export, HostOnly, Layout, Memory,
    Offer, Options, Order, Ordering, Profile, Result, Strides, transfer,
};
use std::ptr::{self, NonNull};
use std::sync::Arc;

/// Returns the adapter.
fn tch_of_process() -> bridge_core::Result<Tch> {
    // SAFETY: the memory of a tensor is used on one thread at a time.
    unsafe { Tch::new() }
}

const HOST: (Kind, ::tch::Device) = (Kind::Double, ::tch::Device::Cpu);

/// libtorch's C functions read from the handle of `tch` what `tch` itself reads, and `tch` from a handle of theirs.
#[test]
fn the_handle_of_tch_is_that_of_libtorch() {
    let libtorch = &Runtime::of_process().unwrap().libtorch;
    let tensor = Tensor::arange(24, HOST).view([2, 3, 4]).transpose(0, 2);
    assert_eq!(libtorch.read(libtorch.data, &tensor, ptr::null_mut()).unwrap(), tensor.data_ptr());
    assert_eq!(libtorch.read(libtorch.dim, &tensor, 0).unwrap(), 3);
    assert_eq!(libtorch.read(libtorch.dtype, &tensor, 0).unwrap(), 7, "kDouble of ScalarType.h");
    let mut made = ptr::null_mut();
    // SAFETY: the tensor is alive; its storage has the two elements.
    let code = unsafe { (libtorch.reinterpret)(handle(&tensor), 1, [2].as_ptr(), [5].as_ptr(), 1, &mut made) };
    // SAFETY: the function has returned a new tensor.
    let view = unsafe { adopt(NonNull::new(made).filter(|_| code == 0).unwrap()) };
    assert_eq!((view.size(), view.stride(), view.kind()), (vec![2], vec![5], Kind::Double));
    drop(tensor);
    assert_eq!(Vec::<f64>::try_from(&view).unwrap(), [1.0, 6.0], "the view keeps the storage");
}

#[test]
fn the_profile_has_the_dtypes_of_tch() {
    let tch = tch_of_process().unwrap();
    let profile = tch.profile();
    assert_eq!(
        (profile.name.as_str(), profile.strides, profile.devices[0]),
        ("tch", Strides::NonNegative, DeviceKind::CPU)
    );
    // A libtorch for the host only has no allocator of blocks that streams use.
    assert_eq!(profile.private_functions, RecordStream::find().is_some());
    for dtype in [DType::BOOL, DType::UINT8, DType::INT64, DType::FLOAT16, DType::BFLOAT16, DType::COMPLEX32] {
        assert!(profile.dtypes.contains(&dtype), "{dtype}");
    }
    for dtype in [DType::UINT16, DType::UINT32, DType::UINT64] {
        assert!(!profile.dtypes.contains(&dtype), "tch 0.24 has no kind for {dtype}");
        assert_eq!(none_of(&tch.runtime.libtorch, &tch.runtime.numbers, dtype).unwrap().size(), [0], "libtorch has it");
    }
}

/// The layout of the private objects, by which the caching allocator's memory is recognised, is found in the libtorch
/// that this crate is tested with. Elsewhere the reuse of its memory is unknown.
#[test]
fn the_deleter_of_a_storage_is_found() {
    let offsets = Offsets::find(&Runtime::of_process().unwrap().libtorch).expect("found in libtorch 2.11");
    let (one, other) = (Tensor::ones([3], HOST), Tensor::ones([5, 5], HOST));
    assert_eq!(offsets.deleter_of(&one), offsets.deleter_of(&other.tr()));
    assert!(library_of(offsets.deleter_of(&one)).unwrap().ends_with("libc10.so"));
    assert_eq!(library_of(0x10), None);
}

#[test]
fn a_tensor_that_the_host_cannot_hold_is_out_of_memory() {
    let runtime = tch_of_process().unwrap().runtime;
    let refused = |length| {
        let made = empty(&runtime.libtorch, &runtime.numbers, Device::CPU, DType::FLOAT32, &[length], Order::RowMajor);
        made.unwrap_err().kind()
    };
    assert_eq!([1 << 45, -1].map(refused), [ErrorKind::OutOfMemory, ErrorKind::Layout]);
}

#[test]
fn a_tensor_of_zeros_without_memory_is_refused() {
    let tch = tch_of_process().unwrap();
    let zeros = Tensor::internal_efficientzerotensor([3], HOST);
    let refused = tch.export(&zeros).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::NotATensor);
    assert!(tch.export(&zeros.copy()).is_ok(), "as the error says");
}

#[test]
fn a_meta_tensor_is_refused() {
    let tch = tch_of_process().unwrap();
    let libtorch = &tch.runtime.libtorch;
    let number = tch.runtime.numbers.number(DType::FLOAT32).unwrap();
    let mut made = ptr::null_mut();
    // SAFETY: one length and one stride; the result is writable.
    let code = unsafe {
        (libtorch.empty_strided)(1, [4].as_ptr(), [1].as_ptr(), number, (libtorch.device_type_meta)(), 0, &mut made)
    };
    // SAFETY: the function has returned a new tensor.
    let meta = unsafe { adopt(NonNull::new(made).filter(|_| code == 0).unwrap()) };
    let refused = tch.export(&meta).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::NotATensor);
    assert_eq!(refused.to_string(), "a meta tensor has no memory: make a real one first");
}

/// Exports bytes as elements of a dtype, and imports as the adapter does, but accepts that dtype.
struct Source {
    tch: Tch,
    profile: Profile,
    dtype: DType,
    length: i64,
    memory: Arc<[u8; 16]>,
}

impl Source {
    fn new(dtype: DType, length: i64) -> Self {
        let tch = tch_of_process().unwrap();
        let profile = tch.profile().clone().with_dtypes(vec![dtype]);
        Self { tch, profile, dtype, length, memory: Arc::default() }
    }

    fn imported(&self) -> Result<Tensor> {
        let ordering: Arc<dyn Ordering> = Arc::new(HostOnly);
        transfer(self, self, &Tensor::new(), &ordering, &Options::in_place()).map(|(tensor, _)| tensor)
    }
}

// SAFETY: it only exports host memory.
unsafe impl Adapter for Source {
    type Tensor = Tensor;

    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.tch.consumer()
    }

    fn export(&self, _: &Tensor) -> Result<Export> {
        let (data, layout) =
            (self.memory.as_ptr().expose_provenance(), Layout::new(self.dtype, &[self.length], None, 0)?);
        let allocation = Allocation::host(layout.extent_at(data, None)?, Access::ReadWrite);
        // SAFETY: the owner keeps the bytes, which no code uses.
        let memory = unsafe { Memory::new(allocation, self.memory.clone()) };
        Export::at(data, self.dtype, layout, memory)
    }

    fn import(&self, offer: Offer) -> Result<Tensor> {
        wrap(self.tch.runtime, offer.accept(&self.profile, &self.consumer())?)
    }

    fn compact(&self, tensor: &Tensor) -> Result<Tensor> {
        self.tch.compact(tensor)
    }
}

/// As of a call of libtorch that fails, without the word whether it has called the deleter.
#[test]
fn memory_that_libtorch_does_not_take_is_returned() {
    let source = Source::new(DType::FLOAT8_E3M4, 4);
    assert_eq!(source.imported().unwrap_err().kind(), ErrorKind::Dtype);
    assert_eq!(Arc::strong_count(&source.memory), 1);
}

/// Its storage is libtorch's own, which grows.
#[test]
fn a_tensor_without_elements_is_not_at_the_address_of_another_framework() {
    let source = Source::new(DType::FLOAT32, 0);
    let mut tensor = source.imported().unwrap();
    assert_eq!((tensor.size(), Arc::strong_count(&source.memory)), (vec![0], 1));
    assert_eq!(tensor.f_resize_([2]).unwrap().f_fill_(5.0).unwrap().size(), [2]);
}

#[test]
fn all_views_of_a_process_are_in_one_list() {
    let [one, other] = [(); 2].map(|()| tch_of_process().unwrap().consumer());
    assert!(ptr::eq(one.views(), other.views()));
}
