//! 4. Many tensors at once: on a device, one wait for each pair of streams orders them all.

use truebridge::dlpack::{DLPack, Tensor};
use truebridge::prelude::*;

pub(crate) fn main() -> truebridge::Result<()> {
    // SAFETY: this program uses the memory of a tensor on one thread at a time.
    let (ndarray, dlpack) = unsafe { (NdArray::new(), DLPack::host()) };
    let layers: Vec<_> = (1..=12).map(|width| HostArray::from(vec![0.5_f32; width])).collect();

    // Each tensor has its adapter, so that a batch may hold tensors of several frameworks.
    let batch: Vec<(&dyn Adapter<Tensor = HostArray>, _)> = layers.iter().map(|layer| (&ndarray as _, layer)).collect();
    let converted = transfer_all(&batch, &dlpack, ordering(), &Options::in_place());

    // If one of them fails, none is converted, and the error says which it was.
    let converted: Vec<(Tensor, _)> = converted.map_err(|failed| failed.error)?;
    assert!(converted.iter().zip(&layers).all(|((view, _), layer)| view.data() == layer.data()));
    println!("{} tensors in place", converted.len());
    Ok(())
}
