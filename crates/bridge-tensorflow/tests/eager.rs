//! Eager tensors of the real TensorFlow 2, without Python.

mod installed;

use bridge_core::{Adapter, DType, ErrorKind, HostOnly, Options, Ordering, Result, transfer};
use bridge_ndarray::{HostArray, NdArray};
use bridge_tensorflow::{Attribute, Eager, EagerTensor, Runtime, SessionOptions};
use ndarray::array;
use std::path::Path;
use std::sync::Arc;

/// What the folder has is a TensorFlow, or no library of this name.
fn open(folder: &Path) -> bridge_core::Result<&'static Runtime> {
    // SAFETY: as above.
    unsafe { Runtime::open(folder) }
}

/// Returns the adapter.
fn ndarray() -> NdArray {
    // SAFETY: the memory of a tensor is used on one thread at a time.
    unsafe { NdArray::new() }
}

fn refused<T>(result: Result<T>, kind: ErrorKind, expected: &str) {
    let Err(error) = result else { panic!("{expected}: it was not refused") };
    assert_eq!(error.kind(), kind, "{error}");
    assert!(error.to_string().contains(expected), "{error}");
}

fn into_tensorflow(eager: &Eager, array: &HostArray) -> EagerTensor {
    let ordering: Arc<dyn Ordering> = Arc::new(HostOnly);
    transfer(&ndarray(), eager, array, &ordering, &Options::default()).unwrap().0
}

fn out_of_tensorflow(eager: &Eager, tensor: &EagerTensor) -> HostArray {
    let (ordering, in_place): (Arc<dyn Ordering>, _) = (Arc::new(HostOnly), Options::in_place());
    transfer(eager, &ndarray(), tensor, &ordering, &in_place).unwrap().0
}

#[test]
fn operations_run_on_the_memory_of_other_frameworks() {
    let Some(folder) = installed::two() else {
        eprintln!("left out: no TensorFlow 2 (cargo xtask setup fetches it)");
        return;
    };
    let eager = Eager::new(open(&folder).unwrap(), &SessionOptions::default()).unwrap();
    assert!(!eager.profile().dtypes.is_empty());

    // TensorFlow allocates at addresses that its own kernels take: its results come back in place.
    let floats = HostArray::from(array![[1.0f32, 2.0], [3.0, 4.0]].into_dyn());
    let x = into_tensorflow(&eager, &floats);
    let twice = eager.execute("AddV2", &[&x, &x], &[], 1).unwrap().remove(0);
    assert_eq!(twice.layout().unwrap().0, DType::FLOAT32);
    assert_eq!(twice.layout().unwrap().1.shape(), [2, 2]);
    let view = out_of_tensorflow(&eager, &twice);
    assert_eq!(view.to_array::<f32>().unwrap(), array![[2.0, 4.0], [6.0, 8.0]].into_dyn());
    let again = into_tensorflow(&eager, &view);
    assert_eq!(out_of_tensorflow(&eager, &again).data(), view.data());
    let copy = eager.compact(&again).unwrap();
    assert_ne!(out_of_tensorflow(&eager, &copy).data(), view.data());

    // The memory lives as long as a view of it.
    drop((x, twice, again, copy));
    assert_eq!(view.to_array::<f32>().unwrap(), array![[2.0, 4.0], [6.0, 8.0]].into_dyn());

    // Attributes, several outputs, and one that does not convert.
    let x = into_tensorflow(&eager, &floats);
    let transposed = [("transpose_a", Attribute::Bool(true))];
    let product = eager.execute("MatMul", &[&x, &x], &transposed, 1).unwrap().remove(0);
    let expected = array![[10.0f32, 14.0], [14.0, 20.0]].into_dyn();
    assert_eq!(out_of_tensorflow(&eager, &product).to_array::<f32>().unwrap(), expected);
    let whole = eager.execute("Cast", &[&x], &[("DstT", Attribute::Type(DType::INT64))], 1).unwrap().remove(0);
    let expected = array![[1i64, 2], [3, 4]].into_dyn();
    assert_eq!(out_of_tensorflow(&eager, &whole).to_array::<i64>().unwrap(), expected);
    let parts = eager.execute("Unpack", &[&x], &[("num", Attribute::Int(2))], 2).unwrap();
    assert_eq!(out_of_tensorflow(&eager, &parts[1]).to_array::<f32>().unwrap(), array![3.0f32, 4.0].into_dyn());
    let text = eager.execute("AsString", &[&x], &[], 1).unwrap().remove(0);
    refused(eager.export(&text), ErrorKind::Dtype, "strings have no memory of a fixed size");
    refused(text.layout(), ErrorKind::Dtype, "strings");
    let empty = into_tensorflow(&eager, &HostArray::from(Vec::<f32>::new()));
    assert_eq!(out_of_tensorflow(&eager, &empty).layout().shape(), [0]);

    refused(eager.execute("Nothing", &[], &[], 1), ErrorKind::Framework, "Nothing");
    refused(eager.execute("AddV2", &[&x], &[], 1), ErrorKind::Framework, "tensorflow reported");
    refused(eager.execute("AddV2", &[&x, &whole], &[], 1), ErrorKind::Framework, "tensorflow reported");
    refused(eager.execute("Unpack", &[&x], &[("num", Attribute::Int(2))], 1), ErrorKind::Framework, "output");
    refused(eager.execute("AddV2", &[&x, &x], &[], 2), ErrorKind::Argument, "the operation has 1 outputs");
    refused(eager.execute("AddV2", &[&x, &x], &[], usize::MAX), ErrorKind::Argument, "at most 65536 outputs");
    refused(eager.execute("InplaceAdd", &[&x, &x, &x], &[], 1), ErrorKind::Argument, "writes to its input");
    refused(eager.execute("Add\0", &[&x, &x], &[], 1), ErrorKind::Argument, "null character");
}

#[test]
fn tensorflow_1_has_no_eager_tensors_to_share() {
    let Some(folder) = installed::one() else {
        eprintln!("left out: no TensorFlow 1.15 (cargo xtask setup fetches it)");
        return;
    };
    let opened = Eager::new(open(&folder).unwrap(), &SessionOptions::default());
    refused(opened, ErrorKind::Version, "open TensorFlow 2.12 and later, or a session");
}
