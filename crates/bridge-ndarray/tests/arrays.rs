//! Arrays and vectors in and out.

use bridge_core::{
    Access, Adapter, DType, Device, ErrorKind, HostOnly, Options, Order, Ordering, Plan, Result, Transfer, copy_into,
    transfer,
};
use bridge_ndarray::{Element, HostArray, NdArray};
use ndarray::{Array, Array2, Array3, ArrayD, Axis, array, s};
use num_complex::Complex;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread;

/// Returns the adapter.
fn ndarray() -> NdArray {
    // SAFETY: the memory of a tensor is used on one thread at a time.
    unsafe { NdArray::new() }
}

fn across(array: &HostArray) -> (HostArray, Transfer) {
    let (from, to) = (ndarray(), ndarray());
    let ordering: Arc<dyn Ordering> = Arc::new(HostOnly);
    transfer(&from, &to, array, &ordering, &Options::default()).unwrap()
}

/// Returns the elements as a view reads them. No test writes to an array that has a view.
fn read<T: Element>(array: &HostArray) -> ArrayD<T> {
    // SAFETY: see above; the bools here are 0 or 1.
    unsafe { array.view::<T>() }.unwrap().to_owned()
}

fn converts<T: Element + PartialEq + std::fmt::Debug>(elements: Vec<T>) {
    let start = elements.as_ptr().addr();
    let (same, done) = across(&HostArray::from(elements.clone()));
    assert_eq!(
        (done.plan, same.dtype(), same.layout().shape()),
        (Plan::ZeroCopy, T::DTYPE, &[elements.len() as i64][..])
    );
    assert_eq!(read::<T>(&same), Array::from_vec(elements.clone()).into_dyn());
    assert_eq!(same.to_array::<T>().unwrap(), Array::from_vec(elements.clone()).into_dyn());
    let (same, _) = across(&HostArray::from(elements));
    assert_eq!(same.data(), start, "moved, not copied");
}

#[test]
fn a_vector_of_every_type_converts_in_place() {
    converts(vec![true, false, true]);
    converts(vec![1i8, -2, 3]);
    converts(vec![1i16, -2, 3]);
    converts(vec![1i32, -2, 3]);
    converts(vec![1i64, -2, 3]);
    converts(vec![1u8, 2, 255]);
    converts(vec![1u16, 2, 3]);
    converts(vec![1u32, 2, 3]);
    converts(vec![1u64, 2, u64::MAX]);
    converts(vec![1.5f32, -0.0]);
    converts(vec![1.5f64, -0.0]);
    converts(vec![Complex::new(1.5f32, -2.0), Complex::new(0.0, 1.0)]);
    converts(vec![Complex::new(1.5f64, -2.0)]);
}

#[test]
fn every_layout_of_ndarray_converts_in_place() {
    let base = || Array3::from_shape_fn((3, 4, 5), |(i, j, k)| (i * 100 + j * 10 + k) as i32);
    let mut reversed = base();
    reversed.invert_axis(Axis(1));
    reversed.invert_axis(Axis(2));
    for array in [
        base().into_dyn(),
        base().reversed_axes().into_dyn(),
        base().slice_move(s![.., 1..;2, ..]).into_dyn(),
        base().slice_move(s![..;-1, 1..;-1, 2]).into_dyn(),
        base().slice_move(s![1, 2, 3]).into_dyn(),
        base().slice_move(s![.., 2..2, ..]).into_dyn(),
        base().permuted_axes([2, 0, 1]).into_dyn(),
        reversed.into_dyn(),
    ] {
        let first = array.as_ptr().addr();
        let (same, done) = across(&HostArray::from(array.clone()));
        assert_eq!(done.plan, Plan::ZeroCopy);
        assert_eq!((read::<i32>(&same), same.to_array::<i32>().unwrap()), (array.clone(), array.clone()));
        let strides: Vec<i64> = array.strides().iter().map(|stride| *stride as i64).collect();
        if same.layout().numel() > 0 {
            assert_eq!(same.layout().strides(), strides);
        }
        let (same, _) = across(&HostArray::from(array));
        assert!(same.data() == first || same.layout().numel() == 0);
    }
}

#[test]
fn a_write_through_one_is_seen_in_the_other() {
    let original = HostArray::from(array![[1.0f32, 2.0], [3.0, 4.0]]);
    let (mut same, _) = across(&original);
    // SAFETY: no other view of the elements lives.
    unsafe { same.view_mut::<f32>() }.unwrap()[[1, 0]] = 7.0;
    assert_eq!(read::<f32>(&original), array![[1.0, 2.0], [7.0, 4.0]].into_dyn());
}

#[test]
fn an_array_is_copied_into_part_of_another() {
    let adapter = ndarray();
    let ordering: Arc<dyn Ordering> = Arc::new(HostOnly);
    let copied = |from: ArrayD<i32>, to: ArrayD<i32>| {
        let to = HostArray::from(to);
        copy_into(&adapter, &adapter, &HostArray::from(from), &to, &ordering).unwrap();
        to.to_array::<i32>().unwrap()
    };
    let numbers = array![[1, 2, 3], [4, 5, 6]].into_dyn();
    for target in [
        ArrayD::zeros(vec![2, 3]),
        ArrayD::zeros(vec![3, 2]).reversed_axes(),
        Array3::zeros((2, 5, 3)).slice_move(s![.., ..;-2, 1..2]).remove_axis(Axis(2)).into_dyn(),
    ] {
        assert_eq!(copied(numbers.clone(), target), numbers);
    }
    assert_eq!(copied(array![7].into_dyn(), ArrayD::zeros(vec![2, 2])), array![[7, 7], [7, 7]].into_dyn(), "repeated");
    assert_eq!(copied(array![[]].into_dyn(), ArrayD::zeros(vec![3, 0])), ArrayD::zeros(vec![3, 0]));
}

struct Counted(Vec<u8>, Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.1.fetch_add(1, SeqCst);
    }
}

#[test]
fn the_last_array_drops_the_owner_once() {
    let dropped = Arc::new(AtomicUsize::new(0));
    let owner = Counted(vec![1, 2, 3], Arc::clone(&dropped));
    let view = Array::from_vec(owner.0.clone());
    // SAFETY: the owner of the view keeps it; nothing writes to it.
    let host = unsafe { HostArray::from_raw_view(view.raw_view(), (view, owner)) }.unwrap();
    let (same, _) = across(&host);
    let (third, _) = across(&same);
    drop((host, same));
    assert_eq!((dropped.load(SeqCst), read::<u8>(&third)), (0, array![1, 2, 3].into_dyn()));
    std::thread::spawn(move || drop(third)).join().unwrap();
    assert_eq!(dropped.load(SeqCst), 1);
}

#[test]
fn read_only_elements_stay_read_only() {
    let kept = Arc::new(vec![1i64, 2]);
    let view = ndarray::ArrayView1::from(&kept[..]).raw_view();
    // SAFETY: the shared vector is never written to, and kept.
    let host = unsafe { HostArray::from_raw_view(view, Arc::clone(&kept)) }.unwrap();
    let (mut same, _) = across(&host);
    assert_eq!(same.access(), Access::ReadOnly);
    // SAFETY: no other view lives.
    assert_eq!(unsafe { same.view_mut::<i64>() }.unwrap_err().kind(), ErrorKind::ReadOnly);
    assert_eq!(ndarray().overwritten(&same).unwrap_err().kind(), ErrorKind::ReadOnly);
}

#[test]
fn elements_of_another_type_or_at_one_address_are_refused() {
    let mut host = HostArray::from(vec![1.0f32]);
    let refused = host.to_array::<f64>().unwrap_err();
    assert_eq!(
        (refused.kind(), refused.to_string().as_str()),
        (ErrorKind::Dtype, "the elements are float32, not float64: request those")
    );
    // SAFETY: no other view lives.
    assert_eq!(unsafe { host.view_mut::<i32>() }.map(drop).unwrap_err().kind(), ErrorKind::Dtype);
    let one = Array::from_vec(vec![5i32]);
    let repeated = one.broadcast([3, 4]).unwrap().raw_view();
    // SAFETY: the owner keeps the element.
    let mut repeated = unsafe { HostArray::from_raw_view(repeated, one) }.unwrap();
    assert_eq!(repeated.to_array::<i32>().unwrap(), ArrayD::from_elem(vec![3, 4], 5));
    // SAFETY: no other view lives.
    assert!(unsafe { repeated.view_mut::<i32>() }.is_err());
}

#[test]
fn bytes_of_bool_are_read_as_in_c() {
    let bytes = Array::from_vec(vec![0u8, 1, 2, 255]);
    let as_bool = bytes.raw_view().cast::<bool>();
    // SAFETY: the owner keeps the bytes; no view reads them as bools.
    let host = unsafe { HostArray::from_raw_view(as_bool, bytes) }.unwrap();
    assert_eq!(host.to_array::<bool>().unwrap(), array![false, true, true, true].into_dyn());
}

#[test]
fn fresh_memory_has_the_order_that_is_asked_for() -> Result<()> {
    let adapter = ndarray();
    for order in [Order::RowMajor, Order::ColumnMajor] {
        // SAFETY: the elements are numbers, of any bits.
        let fresh = unsafe { adapter.empty(Device::CPU, DType::FLOAT64, &[3, 4, 2], order) }?;
        assert!(fresh.layout().follows(order) && fresh.data().is_multiple_of(64));
        assert_eq!(fresh.to_array::<f64>()?, ArrayD::zeros(vec![3, 4, 2]));
    }
    // SAFETY: the call makes no tensor.
    let on_gpu = unsafe { adapter.empty(Device::cuda(0), DType::FLOAT32, &[1], Order::RowMajor) };
    assert_eq!(on_gpu.map(drop).unwrap_err().kind(), ErrorKind::CopyNeeded);
    Ok(())
}

/// Views and clones of one array are made, read and dropped on several threads at once. Nothing writes.
#[test]
fn threads_read_views_of_one_array_and_drop_them() {
    let source = HostArray::from((0..24).collect::<Vec<i32>>());
    let (view, _) = across(&source);
    let threads: Vec<_> = (0..3)
        .map(|_| {
            let (source, view) = (source.clone(), view.clone());
            thread::spawn(move || {
                let (onward, done) = across(&view);
                drop(view);
                assert_eq!((done.plan, onward.data()), (Plan::ZeroCopy, source.data()));
                drop(source);
                onward.to_array::<i32>().map(|read| read.sum())
            })
        })
        .collect();
    drop((source, view));
    threads.into_iter().for_each(|thread| assert_eq!(thread.join().unwrap().unwrap(), 276));
}

/// An allocator may align a vector of complex numbers only to the parts of one.
#[test]
fn complex_numbers_are_aligned_as_their_parts() {
    let parts: Vec<f64> = (0..9).map(f64::from).collect();
    for first in 0..2 {
        let data = parts[first..].as_ptr().expose_provenance();
        let shape: (&[i64], _) = (&[4], None);
        // SAFETY: the four pairs of numbers are in the vector, which outlives the array and is not written to.
        let array = unsafe { HostArray::from_raw(data, DType::COMPLEX128, shape, Access::ReadOnly, ()) }.unwrap();
        let (same, done) = across(&array);
        assert_eq!((done.plan, same.data()), (Plan::ZeroCopy, data));
        assert_eq!(same.to_array::<Complex<f64>>().unwrap()[[3]].re, 6.0 + first as f64);
    }
}

#[test]
#[cfg_attr(miri, ignore = "Miri itself ends where there is no memory")]
fn a_copy_that_no_memory_holds_is_an_error() {
    let number = 1.5_f32;
    let data = (&raw const number).expose_provenance();
    for length in [1 << 45, 1 << 60] {
        let shape: (&[i64], _) = (&[length], Some(&[0][..]));
        // SAFETY: every element is the one number, which outlives the array and is not written to.
        let array = unsafe { HostArray::from_raw(data, DType::FLOAT32, shape, Access::ReadOnly, ()) }.unwrap();
        assert_eq!(array.to_array::<f32>().unwrap_err().kind(), ErrorKind::OutOfMemory);
    }
}

#[test]
#[should_panic(expected = "overflows 2^63 bytes")]
fn an_array_of_nothing_that_is_too_long_panics_as_documented() {
    let _ = HostArray::from(Array2::<f32>::zeros((1 << 62, 0)));
}
