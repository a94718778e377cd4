//! Tensors that a carrier brings from one host to another. Here both are this one, and bytes are copied by hand.

use super::child::ipc;
use super::{Folder, LONG, host, ndarray, wait_for};
use bridge_core::{Adapter, Device, ErrorKind, Options, Permutation, Result, transfer};
use bridge_ipc::{Block, Exporter, Incoming, IpcTensor, Limits, Opened, Outgoing, Parcel, Ticket, Writing, open};
use bridge_ndarray::{Element, HostArray};
use ndarray::{Array, ArrayD, array};

type Leaf<'a> = (&'a dyn Adapter<Tensor = HostArray>, &'a HostArray);

fn shared(exporter: &Exporter, arrays: &[HostArray], writing: Writing) -> Ticket {
    let from = ndarray();
    let leaves: Vec<Leaf<'_>> = arrays.iter().map(|array| (&from as _, array)).collect();
    let parcel = Parcel::of(&leaves, Some(writing), &host(), &Options::default()).unwrap();
    parcel.share(exporter, LONG, Some("a tree".into())).unwrap()
}

fn values<T: Element>(tensor: &IpcTensor) -> ArrayD<T> {
    transfer(&ipc(), &ndarray(), tensor, &host(), &Options::default()).unwrap().0.to_array().unwrap()
}

/// Brings what a ticket opens through blocks of bytes, and opens it again.
fn carried(exporter: &Exporter, ticket: &Ticket) -> (Vec<Block>, Opened) {
    let outgoing = Outgoing::of(open(ticket).unwrap(), &host()).unwrap();
    outgoing.wait().unwrap();
    let blocks: Vec<_> = outgoing.blocks().iter().map(|block| (Device::CPU, block.nbytes)).collect();
    let incoming = Incoming::new(outgoing.tensors(), &blocks).unwrap();
    for (from, to) in outgoing.blocks().iter().zip(incoming.blocks()) {
        assert!(to.nbytes >= from.nbytes);
        let [source, target] = [from.address, to.address].map(std::ptr::with_exposed_provenance_mut::<u8>);
        // SAFETY: both blocks have that many bytes, and nothing else uses them.
        unsafe { std::ptr::copy_nonoverlapping(source, target, from.nbytes) };
    }
    let ticket = incoming.share(exporter, LONG, outgoing.tree().map(Into::into)).unwrap();
    let opened = open(&ticket).unwrap();
    exporter.end(&ticket).unwrap();
    (outgoing.blocks().to_vec(), opened)
}

#[test]
fn tensors_arrive_with_their_dtypes_shapes_and_elements() {
    let folder = Folder::new();
    let exporter = folder.exporter(Limits::default());
    let matrix = array![[1.5f32, 2.0], [3.0, 4.0], [5.0, 6.0]];
    let arrays = [
        matrix.clone().into(),
        array![1u8, 2, 3].into(),
        Array::from_elem((), -7i64).into(),
        Array::<f32, _>::zeros((0, 5)).into(),
    ];
    let ticket = shared(&exporter, &arrays, Writing::Private);
    let (blocks, opened) = carried(&exporter, &ticket);
    assert_eq!(blocks.len(), 1, "they are shared side by side");
    assert_eq!(opened.tree.as_deref(), Some("a tree"));
    let [first, second, third, fourth] = &opened.tensors[..] else { panic!("{}", opened.tensors.len()) };
    assert_eq!(values::<f32>(first), matrix.into_dyn());
    assert_eq!(values::<u8>(second), array![1u8, 2, 3].into_dyn());
    assert_eq!(values::<i64>(third), Array::from_elem((), -7i64).into_dyn());
    assert_eq!(fourth.layout().shape(), [0, 5]);
    exporter.end(&ticket).unwrap();
    drop(opened);
    wait_for(&exporter, |held| held.leases == 0 && held.shares == 0);
}

#[test]
fn views_with_strides_are_packed() {
    let folder = Folder::new();
    let exporter = folder.exporter(Limits::default());
    let wide = Array::from_shape_fn((40, 30), |(row, column)| (row * 100 + column) as i32);
    let opened = open(&shared(&exporter, &[wide.clone().into()], Writing::Never)).unwrap();
    let turned = Options::default().with_permute(Permutation::new(&[1, 0]).unwrap());
    let (seen, done) = transfer(&ipc(), &ndarray(), &opened.tensors[0], &host(), &turned).unwrap();
    assert_eq!(done.bytes_copied, 0);
    let ticket = shared(&exporter, &[seen], Writing::Never);
    let (blocks, arrived) = carried(&exporter, &ticket);
    assert_eq!(blocks[0].nbytes, 40 * 30 * 4);
    assert_eq!(values::<i32>(&arrived.tensors[0]), wide.t().to_owned().into_dyn());
}

#[test]
fn what_makes_no_sense_is_refused() {
    let refused = |tensors: &str, blocks: &[(Device, usize)]| Incoming::new(tensors, blocks).unwrap_err().kind();
    let block = [(Device::CPU, 280)];
    assert!(Incoming::new(r#"[["float32",[2,3],0,0],["int64",[3],0,256]]"#, &block).is_ok());
    for tensors in [
        "",
        "{}",
        "[]",
        r#"[["float32",[2,3],0]]"#,
        r#"[["float32",[2,3],0,0,0]]"#,
        r#"[["nn",[2,3],0,0]]"#,
        r#"[["float32",[2,-3],0,0]]"#,
        r#"[["float32",[2,3],1,0]]"#,
        r#"[["float32",[0,3],1,0]]"#,
        r#"[["float32",[2,3],0,257]]"#,
        r#"[["float32",[2,3],0,-4]]"#,
        r#"[["float32",[2,3],0,2]]"#,
        r#"[["float32",[2,3],0,18446744073709551615]]"#,
        r#"[["float32",[4611686018427387904,4611686018427387904],0,0]]"#,
        r#"[["float32","x",0,0]]"#,
        &format!(r#"[["float32",{:?},0,0]]"#, [1; 101]),
        &format!("[{}]", [r#"["int8",[0],0,0]"#; 65_537].join(",")),
    ] {
        assert_eq!(refused(tensors, &block), ErrorKind::Protocol, "{tensors:.80}");
    }
    assert_eq!(refused(r#"[["int8",[1],0,0]]"#, &[(Device::CPU, usize::MAX >> 1)]), ErrorKind::OutOfMemory);
    assert!(Incoming::new(r#"[["int8",[1],0,0]]"#, &[(Device::cuda(99), 1)]).is_err());
}

#[test]
fn blocks_that_are_never_filled_leave_nothing() -> Result<()> {
    let folder = Folder::new();
    let exporter = folder.exporter(Limits { bytes: 1 << 10, ..Limits::default() });
    drop(Incoming::new(r#"[["int8",[9],0,0]]"#, &[(Device::CPU, 9)])?);
    let incoming = Incoming::new(r#"[["int8",[2048],0,0]]"#, &[(Device::CPU, 2048)])?;
    let error = incoming.share(&exporter, LONG, None).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    assert_eq!(exporter.held().bytes, 0);
    Ok(())
}
