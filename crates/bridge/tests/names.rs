//! Everything of the facade next to the library that an adapter is for: their names do not clash.
#![cfg(feature = "ndarray")]

use ndarray::array;
use truebridge::adapters::ndarray::{HostArray, NdArray};
use truebridge::*;

/// Returns the adapter.
fn ndarray() -> NdArray {
    // SAFETY: the memory of a tensor is used on one thread at a time.
    unsafe { NdArray::new() }
}

#[test]
fn a_glob_import_leaves_the_names_of_libraries_alone() -> Result<()> {
    let numbers = HostArray::from(array![[1.0f32, 2.0], [3.0, 4.0]]);
    let turned = Options::in_place().with_permute(Permutation::new(&[1, 0])?);
    let (turned, done) = transfer(&ndarray(), &ndarray(), &numbers, ordering(), &turned)?;
    assert_eq!((turned.to_array::<f32>()?, done.plan), (array![[1.0, 3.0], [2.0, 4.0]].into_dyn(), Plan::ZeroCopy));
    Ok(())
}

#[test]
fn the_library_of_an_adapter_is_the_one_that_it_takes() {
    let own: truebridge::adapters::ndarray::framework::Array1<f32> = array![1.0, 2.0];
    assert_eq!(HostArray::from(own).to_array::<f32>().unwrap(), array![1.0, 2.0].into_dyn());
}
