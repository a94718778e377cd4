//! 1. A vector of Rust becomes a tensor of DLPack, over the same memory.
//!
//! Every conversion takes two adapters, a tensor, the ordering of the process and options.

use truebridge::dlpack::{DLPack, Tensor};
use truebridge::prelude::*;

pub(crate) fn main() -> truebridge::Result<()> {
    // SAFETY: this program uses the memory of a tensor on one thread at a time.
    let (ndarray, dlpack) = unsafe { (NdArray::new(), DLPack::host()) };
    let numbers = HostArray::from(vec![1.0_f32, 2.0, 3.0]);

    // An error instead of a copy: `Options::default()` copies where the target cannot take the tensor.
    let (view, done): (Tensor, _) = transfer(&ndarray, &dlpack, &numbers, ordering(), &Options::in_place())?;

    assert_eq!((view.data(), done.bytes_copied), (numbers.data(), 0));
    println!("in place at {:#x}: {} elements of {}", view.data(), view.layout().numel(), view.dtype());
    Ok(())
}
