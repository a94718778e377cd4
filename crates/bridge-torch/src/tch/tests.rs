//! What no public function shows: the cast of `tch`'s handle, tensors that `tch` cannot make, and the deleter.

use super::Tch;
use super::import::none_of;
use super::libtorch::{adopt, handle};
use super::memory::Offsets;
use super::runtime::Runtime;
use crate::library::library_of;
use ::tch::{Kind, Tensor};
use bridge_core::{Adapter, DType, DeviceKind, ErrorKind, Strides};
use std::ptr::{self, NonNull};

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
    for dtype in [DType::BOOL, DType::UINT8, DType::INT64, DType::FLOAT16, DType::BFLOAT16, DType::COMPLEX32] {
        assert!(profile.dtypes.contains(&dtype), "{dtype}");
    }
    for dtype in [DType::UINT16, DType::UINT32, DType::UINT64] {
        assert!(!profile.dtypes.contains(&dtype), "tch 0.24 has no kind for {dtype}");
        assert_eq!(none_of(tch.runtime, dtype).unwrap().size(), [0], "libtorch has it");
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
fn a_meta_tensor_is_refused() {
    let tch = tch_of_process().unwrap();
    let libtorch = &tch.runtime.libtorch;
    let number = tch.runtime.number(DType::FLOAT32).unwrap();
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
