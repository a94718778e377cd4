//! 5. A view keeps the memory of its owner, and returns it when the last view is dropped.

use truebridge::dlpack::DLPack;
use truebridge::prelude::*;

pub(crate) fn main() -> truebridge::Result<()> {
    // SAFETY: this program uses the memory of a tensor on one thread at a time.
    let (ndarray, dlpack) = unsafe { (NdArray::new(), DLPack::host()) };
    let numbers = HostArray::from(vec![1_i64, 2, 3]);
    let options = Options::in_place();

    let (view, _) = transfer(&ndarray, &dlpack, &numbers, ordering(), &options)?;
    drop(numbers); // The view keeps the vector.

    // A view is a tensor like any other, and can be converted further. Each view keeps the one that it was made of.
    let (further, _) = transfer(&dlpack, &ndarray, &view, ordering(), &options)?;
    drop(view);
    assert_eq!(further.to_array::<i64>()?.sum(), 6);
    drop(further); // The last view: the vector is freed.

    // On a device the owner's stream first waits for the readers. `stats` counts views that were made and returned.
    println!("{:?}", truebridge::stats());
    Ok(())
}
