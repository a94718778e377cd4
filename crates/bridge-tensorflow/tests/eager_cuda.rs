//! Eager tensors of the real TensorFlow 2 on the first CUDA device, without Python.

mod installed;

use bridge_core::{Adapter, Device, DeviceKind, ErrorKind, Options, transfer};
use bridge_cudarc::{Cudarc, DeviceArray};
use bridge_tensorflow::{Eager, EagerTensor, Runtime, SessionOptions};
use std::path::Path;

/// What the folder has is a TensorFlow, or no library of this name.
fn open(folder: &Path) -> bridge_core::Result<&'static Runtime> {
    // SAFETY: as above.
    unsafe { Runtime::open(folder) }
}

const COUNT: usize = 1 << 20;

/// The adapters, or `None` where one has no device. The reason is printed.
fn ready() -> Option<(Cudarc, Eager)> {
    let cudarc = match Cudarc::of_device(0) {
        Err(error) if [ErrorKind::Missing, ErrorKind::Device].contains(&error.kind()) => {
            eprintln!("skipped: {error}");
            return None;
        }
        cudarc => cudarc.unwrap(),
    };
    let Some(folder) = installed::two() else {
        eprintln!("skipped: no TensorFlow 2 (cargo xtask setup fetches it)");
        return None;
    };
    let eager = Eager::new(open(&folder).unwrap(), &SessionOptions::default()).unwrap();
    if !eager.profile().devices.contains(&DeviceKind::CUDA) {
        eprintln!("skipped: TensorFlow shows no GPU");
        return None;
    }
    Some((cudarc, eager))
}

#[test]
fn operations_run_on_device_memory_of_other_frameworks() {
    let Some((cudarc, eager)) = ready() else { return };
    let (ordering, in_place) = (bridge_cuda::ordering(), Options::in_place());
    let stream = cudarc.stream();
    let numbers: Vec<f32> = (0..COUNT).map(|i| i as f32).collect();
    let twice: Vec<f32> = numbers.iter().map(|number| 2.0 * number).collect();
    let slice = stream.clone_htod(&numbers).unwrap();
    let array = DeviceArray::from_slice(slice, &[COUNT as i64], None, 0).unwrap();

    let back = |tensor: &EagerTensor| transfer(&eager, &cudarc, tensor, ordering, &in_place).unwrap().0;
    let numbers_of = |array: &DeviceArray| stream.clone_dtoh(&array.read::<f32>().unwrap().view()).unwrap();
    let (x, _) = transfer(&cudarc, &eager, &array, ordering, &in_place).unwrap();
    assert_eq!(back(&x).data(), array.data());
    let sum = eager.execute("AddV2", &[&x, &x], &[], 1).unwrap().remove(0);
    let view = back(&sum);
    assert_eq!(view.device(), Device::cuda(0));
    assert_eq!(numbers_of(&view), twice);
    let copy = eager.compact(&sum).unwrap();
    assert_ne!(back(&copy).data(), view.data());
    assert_eq!(numbers_of(&back(&copy)), twice);

    // The memory lives as long as a view of it.
    drop((x, sum, copy, array));
    assert_eq!(numbers_of(&view), twice);
}
