//! 2. `plan` says whether a conversion copies, and why, before anything is done.

use truebridge::Order;
use truebridge::dlpack::DLPack;
use truebridge::prelude::*;

pub(crate) fn main() -> truebridge::Result<()> {
    // SAFETY: this program uses the memory of a tensor on one thread at a time.
    let (ndarray, dlpack) = unsafe { (NdArray::new(), DLPack::host()) };
    let matrix = HostArray::from(ndarray::array![[1, 2, 3], [4, 5, 6]]);
    let exported = ndarray.export(&matrix)?;
    let planned = |options: Options| plan(&exported, dlpack.profile(), &options);

    let columns = Options::default().with_order(Order::ColumnMajor);
    assert_eq!(planned(Options::default())?, Plan::ZeroCopy);
    if let Plan::Copy(reason) = planned(columns)? {
        println!("a copy because of {reason}"); // another order than the requested one
    }

    // What cannot be done in place is an error where a copy is forbidden. Its message says what to do next.
    let refused = planned(columns.with_copy(false)).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::CopyNeeded);
    println!("{refused}");
    Ok(())
}
