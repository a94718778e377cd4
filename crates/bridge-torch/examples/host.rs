//! A tensor of `tch`, changed by `ndarray` in place, and back in `tch`. Nothing is copied.
//!
//! ```sh
//! LIBTORCH_USE_PYTORCH=1 cargo run -p truebridge-torch --no-default-features --features tch --example host
//! ```

use bridge_core::{HostOnly, Options, Ordering, Result, transfer};
use bridge_ndarray::NdArray;
use bridge_torch::Tch;
use ndarray::Axis;
use std::sync::Arc;
use tch::{Device, Kind, Tensor};

fn main() -> Result<()> {
    // SAFETY: the memory of a tensor is used on one thread at a time.
    let (tch, ndarray) = unsafe { (Tch::new()?, NdArray::new()) };
    let ordering: Arc<dyn Ordering> = Arc::new(HostOnly);
    // Without `copy`, a transfer that needs one is an error.
    let in_place = Options::in_place();

    let tensor = Tensor::arange(6, (Kind::Float, Device::Cpu)).view([2, 3]);
    let (mut array, _) = transfer(&tch, &ndarray, &tensor.tr(), &ordering, &in_place)?;
    // SAFETY: no other code uses the tensor while the view lives.
    let mut view = unsafe { array.view_mut::<f32>()? };
    println!("ndarray sees shape {:?}, strides {:?}", view.shape(), view.strides());
    for (row, mut elements) in view.axis_iter_mut(Axis(0)).enumerate() {
        elements += 10.0 * row as f32;
    }
    assert_eq!(Vec::<f32>::try_from(tensor.view([-1])).unwrap(), [0.0, 11.0, 22.0, 3.0, 14.0, 25.0]);

    let (back, done) = transfer(&ndarray, &tch, &array, &ordering, &in_place)?;
    drop((array, tensor));
    println!("tch sees shape {:?}, strides {:?}, {} bytes copied", back.size(), back.stride(), done.bytes_copied);
    back.print();
    assert_eq!(back.sum(Kind::Float).double_value(&[]), 75.0);
    Ok(())
}
