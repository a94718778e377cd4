//! Which tensors are converted in place, which as a copy, and which not at all.

use crate::common::{GPU, Item, Log, Office, Paper, writes_nothing};
use bridge_core::{
    Access, Adapter, DType, Device, DeviceKind, ErrorKind, Options, Order, Pending, Permutation, Plan, Profile, Reason,
    Strides, plan,
};

/// Plans the transfer of a paper into an office that accepts compact, writable tensors at multiples of 64 bytes.
fn planned(change: impl FnOnce(&mut Paper), copy: Option<bool>) -> Result<Plan, ErrorKind> {
    let office = Office::new(Strides::Compact);
    let mut paper = Paper::new(&Log::default());
    change(&mut paper);
    let exported = office.export(&Item::Own(paper)).map_err(|error| error.kind())?;
    plan(&exported, office.profile(), &Options::default().with_copy(copy)).map_err(|error| error.kind())
}

type Change = fn(&mut Paper);

#[test]
fn every_reason_for_a_copy() {
    let table: [(Change, Reason); 6] = [
        (|paper| paper.pending = Some(Pending::Conjugation), Reason::PendingConjugation),
        (|paper| paper.pending = Some(Pending::Negation), Reason::PendingNegation),
        (|paper| paper.pending = Some(Pending::Packing), Reason::PendingPacking),
        (|paper| paper.strides = vec![-3, 1], Reason::NegativeStrides),
        (|paper| paper.strides = vec![1, 2], Reason::Strides),
        (|paper| paper.address = 0x1020, Reason::Alignment),
    ];
    for (change, reason) in table {
        assert_eq!(planned(change, None), Ok(Plan::Copy(reason)));
        assert_eq!(planned(change, Some(true)), Ok(Plan::Copy(reason)));
        assert_eq!(planned(change, Some(false)), Err(ErrorKind::CopyNeeded));
    }
    assert_eq!(planned(|_| (), None), Ok(Plan::ZeroCopy));
    assert_eq!(planned(|_| (), Some(false)), Ok(Plan::ZeroCopy));
    assert_eq!(planned(|_| (), Some(true)), Ok(Plan::Copy(Reason::Asked)));
}

/// A type of matrices takes matrices, in place and as a copy, and nothing else.
#[test]
fn a_number_of_dimensions_that_the_target_does_not_have_is_refused() {
    let mut office = Office::new(Strides::Any);
    let paper = Paper::new(&Log::default());
    assert_eq!(paper.shape.len(), 2);
    let exported = office.export(&Item::Own(paper)).unwrap();
    let table = [
        (0..=64, None),
        (2..=2, None),
        (1..=2, None),
        (3..=3, Some("takes 3 dimensions: reshape it")),
        (1..=1, Some("takes 1 dimension: reshape it")),
        (3..=5, Some("takes 3 to 5 dimensions: reshape it")),
    ];
    for (rank, words) in table {
        office.profile.rank = rank.clone();
        for copy in [None, Some(true), Some(false)] {
            let planned = plan(&exported, office.profile(), &Options::default().with_copy(copy));
            match words {
                None => assert!(planned.is_ok(), "{rank:?}"),
                Some(words) => {
                    let error = planned.unwrap_err();
                    assert_eq!(error.kind(), ErrorKind::Layout, "{rank:?}");
                    assert!(error.to_string().contains(words), "{error}");
                    assert!(error.to_string().starts_with("the tensor has 2 dimensions, and "), "{error}");
                }
            }
        }
    }
}

/// Profiles that were kept before there was a rank have any.
#[test]
fn a_rank_is_kept_where_it_is_not_any() {
    let any = Office::new(Strides::Any).profile;
    let text = serde_json::to_string(&any).unwrap();
    assert!(!text.contains("rank"), "{text}");
    assert_eq!(serde_json::from_str::<bridge_core::Profile>(&text).unwrap(), any);
    let matrices = any.with_rank(2..=2);
    let text = serde_json::to_string(&matrices).unwrap();
    assert!(text.contains(r#""rank":{"start":2,"end":2}"#), "{text}");
    assert_eq!(serde_json::from_str::<bridge_core::Profile>(&text).unwrap(), matrices);
}

/// A framework whose tensors own their memory takes no other, whatever it looks like.
#[test]
fn tensors_that_own_their_memory_are_filled_by_copies() {
    let mut office = Office::new(Strides::Any);
    office.profile.owns_memory = true;
    let decided = |change: Change, copy| {
        let mut paper = Paper::new(&Log::default());
        change(&mut paper);
        let exported = office.export(&Item::Own(paper)).unwrap();
        plan(&exported, office.profile(), &Options::default().with_copy(copy)).map_err(|error| error.kind())
    };
    let table: [(Change, Reason); 4] = [
        (|_| (), Reason::MemoryNotOwned),
        (|paper| paper.access = Access::ReadOnly, Reason::MemoryNotOwned),
        (|paper| (paper.shape, paper.strides) = (vec![0, 3], vec![3, 1]), Reason::MemoryNotOwned),
        (|paper| paper.pending = Some(Pending::Negation), Reason::PendingNegation),
    ];
    for (change, reason) in table {
        assert_eq!(decided(change, None), Ok(Plan::Copy(reason)));
        assert_eq!(decided(change, Some(true)), Ok(Plan::Copy(reason)));
        assert_eq!(decided(change, Some(false)), Err(ErrorKind::CopyNeeded));
    }
    assert_eq!(decided(|paper| paper.dtype = DType::INT8, None), Err(ErrorKind::Dtype));
}

#[test]
fn every_refusal() {
    let table: [(Change, ErrorKind); 4] = [
        (|paper| paper.dtype = DType::INT8, ErrorKind::Dtype),
        (|paper| paper.dtype = DType { code: 77, bits: 32, lanes: 1 }, ErrorKind::Dtype),
        (|paper| paper.device.kind = DeviceKind::ROCM, ErrorKind::Device),
        (|paper| paper.shape = vec![2, -3], ErrorKind::Layout),
    ];
    for (change, kind) in table {
        for copy in [None, Some(true), Some(false)] {
            assert_eq!(planned(change, copy), Err(kind));
        }
    }
    let read_only: Change = |paper| paper.access = Access::ReadOnly;
    assert_eq!(planned(read_only, None), Err(ErrorKind::ReadOnly));
    assert_eq!(planned(read_only, Some(false)), Err(ErrorKind::ReadOnly));
    assert_eq!(planned(read_only, Some(true)), Ok(Plan::Copy(Reason::Asked)));
    // What no consumer of the caller writes to is converted, by the contract of its framework or by the caller's
    // promise.
    assert_eq!(planned(|paper| paper.access = Access::Immutable, Some(false)), Ok(Plan::ZeroCopy));
    let mut paper = Paper::new(&Log::default());
    read_only(&mut paper);
    let office = Office::new(Strides::Any);
    let exported = office.export(&Item::Own(paper)).unwrap();
    let promised = writes_nothing(Options::in_place());
    assert_eq!(plan(&exported, office.profile(), &promised).ok(), Some(Plan::ZeroCopy));
    let reversed: Change = |paper| (paper.access, paper.strides) = (Access::ReadOnly, vec![-3, 1]);
    assert_eq!(planned(reversed, None), Ok(Plan::Copy(Reason::NegativeStrides)));
    assert_eq!(planned(reversed, Some(false)), Err(ErrorKind::CopyNeeded));
}

/// Plans the transfer of a tensor with this shape and these strides in elements, permuted and in this order.
fn arranged(
    target: Strides,
    dims: &[(i64, i64)],
    permute: Option<&[i64]>,
    order: Option<Order>,
) -> Result<Plan, ErrorKind> {
    let office = Office::new(target);
    let (shape, strides) = dims.iter().copied().unzip();
    let permute = permute.map(|axes| Permutation::new(axes).unwrap());
    let exported = office.export(&Item::Own(Paper { shape, strides, ..Paper::new(&Log::default()) })).unwrap();
    let options = Options::default().with_order(order).with_permute(permute);
    let exported = exported.permuted(permute.as_ref()).map_err(|error| error.kind())?;
    plan(&exported, office.profile(), &options).map_err(|error| error.kind())
}

#[test]
fn an_order_is_met_in_place_or_by_a_copy() {
    use Order::{ColumnMajor as F, RowMajor as C};
    let (rows, columns, gaps) = ([(2, 3), (3, 1)], [(2, 1), (3, 2)], [(2, 6), (3, 2)]);
    let copy = Ok(Plan::Copy(Reason::Order));
    for (dims, order, expected) in [
        (rows, Some(C), Ok(Plan::ZeroCopy)),
        (rows, Some(F), copy),
        (columns, Some(C), copy),
        (columns, Some(F), Ok(Plan::ZeroCopy)),
        (gaps, Some(C), copy),
        (gaps, Some(F), copy),
        (gaps, None, Ok(Plan::ZeroCopy)),
    ] {
        assert_eq!(arranged(Strides::Any, &dims, None, order), expected, "{dims:?} {order:?}");
        // A permuted view has the other order.
        let other = order.map(|order| if order == C { F } else { C });
        assert_eq!(arranged(Strides::Any, &dims, Some(&[1, 0]), other), expected, "{dims:?} {order:?}, permuted");
    }
    assert_eq!(arranged(Strides::Any, &rows, Some(&[0, 0]), None), Err(ErrorKind::Argument));
}

#[test]
fn a_target_with_row_major_tensors_only_refuses_the_other_order() {
    let to = |dims, order| arranged(Strides::Compact, dims, None, Some(order));
    assert_eq!(to(&[(2, 1), (3, 2)], Order::ColumnMajor), Err(ErrorKind::Argument));
    assert_eq!(to(&[(2, 1), (3, 2)], Order::RowMajor), Ok(Plan::Copy(Reason::Strides)));
    for dims in [&[][..], &[(3, 1)], &[(1, 7), (3, 1)], &[(0, 1), (3, 1)]] {
        assert_eq!(to(dims, Order::ColumnMajor), Ok(Plan::ZeroCopy), "both orders are the same: {dims:?}");
    }
}

#[test]
fn a_tensor_moves_to_the_device_that_is_asked_for_unless_copies_are_forbidden() {
    let mut office = Office::new(Strides::Any);
    let exported = office.export(&Item::Own(Paper::new(&Log::default()))).unwrap();
    let on = |office: &Office, device, copy| {
        plan(&exported, office.profile(), &Options::default().with_copy(copy).with_device(device))
    };
    for device in [Device::cuda(1), Device::CPU] {
        for copy in [None, Some(true)] {
            assert_eq!(on(&office, GPU, Some(false)).unwrap(), Plan::ZeroCopy);
            assert_eq!(on(&office, device, copy).unwrap(), Plan::Copy(Reason::Moved));
        }
        let error = on(&office, device, Some(false)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::CopyNeeded);
        assert!(error.to_string().contains(&format!("on cuda:0, not on {device}")), "{error}");
    }
    for kind in [DeviceKind::CUDA_MANAGED, DeviceKind::ROCM] {
        let device = Device { kind, index: 0 };
        assert_eq!(on(&office, device, None).unwrap_err().kind(), ErrorKind::Device);
        office.profile.devices.push(kind);
        assert_eq!(on(&office, device, None).unwrap_err().kind(), ErrorKind::Device, "nothing moves there");
    }
    office.profile.devices = vec![DeviceKind::CUDA];
    let error = on(&office, Device::CPU, None).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Device);
    assert!(error.to_string().contains("has only cuda"), "{error}");
    assert_eq!(on(&office, Device::CPU, Some(false)).unwrap_err().kind(), ErrorKind::Device);
}

#[test]
fn there_is_one_host_whatever_its_number() {
    let office = Office::new(Strides::Any);
    for (of, to) in [(0, 3), (3, 0), (-1, 7)] {
        let [device, requested] = [of, to].map(|index| Device { kind: DeviceKind::CPU, index });
        let exported = office.export(&Item::Own(Paper { device, ..Paper::new(&Log::default()) })).unwrap();
        assert_eq!(exported.device(), Device::CPU);
        let options = Options::in_place().with_device(requested);
        assert_eq!(plan(&exported, office.profile(), &options).unwrap(), Plan::ZeroCopy);
    }
}

#[test]
fn pinned_memory_is_on_the_host_already() {
    let office = Office::new(Strides::Any);
    let paper = Paper { device: Device { kind: DeviceKind::CUDA_HOST, index: 0 }, ..Paper::new(&Log::default()) };
    let exported = office.export(&Item::Own(paper)).unwrap();
    let on = |device| plan(&exported, office.profile(), &Options::default().with_device(device)).unwrap();
    assert_eq!((on(Device::CPU), on(GPU)), (Plan::ZeroCopy, Plan::Copy(Reason::Moved)));
}

#[test]
fn managed_memory_is_its_devices_and_the_hosts() {
    let mut office = Office::new(Strides::Any);
    let paper = Paper { device: Device { kind: DeviceKind::CUDA_MANAGED, index: 1 }, ..Paper::new(&Log::default()) };
    let exported = office.export(&Item::Own(paper)).unwrap();
    let on = |office: &Office, device| {
        let done = plan(&exported, office.profile(), &Options::default().with_device(device));
        done.map_err(|error| error.to_string())
    };
    let in_place = Ok(Plan::ZeroCopy);
    let moved = Ok(Plan::Copy(Reason::Moved));
    for (device, expected) in [(None, &in_place), (Some(Device::cuda(1)), &in_place), (Some(GPU), &moved)] {
        assert_eq!(&on(&office, device), expected, "{device:?}");
    }
    office.profile.devices = vec![DeviceKind::CUDA];
    assert_eq!(on(&office, None), in_place);
    office.profile.devices = vec![DeviceKind::CPU];
    assert_eq!((on(&office, None), on(&office, Some(Device::CPU))), (in_place.clone(), in_place));
}

#[test]
fn refusals_say_where_the_tensor_is_and_what_to_do() {
    let refused = |target: &[DeviceKind], device| {
        let mut office = Office::new(Strides::Compact);
        office.profile.devices = target.into();
        let exported = office.export(&Item::Own(Paper { device, ..Paper::new(&Log::default()) })).unwrap();
        plan(&exported, office.profile(), &Options::default()).unwrap_err().worded(bridge_core::python::words)
    };
    let rocm = Device { kind: DeviceKind::ROCM, index: 0 };
    for (target, device, expected) in [
        (
            DeviceKind::CUDA,
            Device::CPU,
            [
                "is in host memory (cpu), which",
                "move it to a device with its own framework first, or pass device=\"cuda\"",
            ],
        ),
        (
            DeviceKind::CPU,
            GPU,
            [
                "is on cuda:0, which office",
                "process: copy it to the host with its own framework first, or pass device=\"cpu\" to",
            ],
        ),
        (DeviceKind::CPU, rocm, ["is on rocm:0, which office", "process: copy it to the host with its own"]),
    ] {
        let text = refused(&[target], device);
        assert!(expected.iter().all(|part| text.contains(part)), "{text}");
    }
    let office = Office::new(Strides::Compact);
    let exported = office.export(&Item::Own(Paper { strides: vec![1, 2], ..Paper::new(&Log::default()) })).unwrap();
    let in_place = Options::in_place();
    let refused = plan(&exported, office.profile(), &in_place).unwrap_err();
    let text = refused.to_string();
    assert!(text.contains("because of strides that are not compact (shape [2, 3], strides [1, 2]"), "{text}");
    assert!(text.ends_with("): allow a copy, with Options::copy at None"), "{text}");
    assert!(refused.worded(bridge_core::python::words).ends_with("): pass copy=None to allow a copy"), "{refused}");
}

#[test]
fn nothing_has_no_layout_and_no_alignment() {
    let nothing: Change = |paper| (paper.shape, paper.strides, paper.address) = (vec![0, 3], vec![-5, 7], 3);
    assert_eq!(planned(nothing, Some(false)), Ok(Plan::ZeroCopy));
}

#[test]
fn alignment_is_at_least_that_of_an_element() {
    let mut profile = Office::new(Strides::Any).profile;
    let (long, wide, single) = (DType::INT64, DType::COMPLEX128, DType::FLOAT32);
    let (half, nothing) = (DType::FLOAT4_E2M1FN, DType { bits: 0, ..DType::INT8 });
    let cases = [(0, long, 1), (1, long, 8), (1, wide, 16), (64, single, 64), (4, long, 8), (1, DType::BOOL, 1)];
    for (alignment, dtype, expected) in cases.into_iter().chain([(1, half, 1), (1, nothing, 1)]) {
        profile.alignment = alignment;
        assert_eq!(profile.alignment_of(dtype), expected, "{alignment} {dtype}");
    }
    for (dtype, expected) in [(wide, 8), (DType::COMPLEX64, 4), (DType::COMPLEX32, 2), (long, 8)] {
        let by_parts = profile.clone().with_complex_by_parts(true);
        assert_eq!(by_parts.alignment_of(dtype), expected, "{dtype}");
    }
}

#[test]
fn an_alignment_that_no_memory_has_is_an_error() {
    let mut office = Office::new(Strides::Any);
    let exported = office.export(&Item::Own(Paper::new(&Log::default()))).unwrap();
    for (alignment, refused) in [(3, true), (48, true), (1 << 31, true), (usize::MAX, true), (1 << 12, false)] {
        office.profile.alignment = alignment;
        let planned = plan(&exported, office.profile(), &Options::copied()).map_err(|error| error.kind());
        assert_eq!(planned, if refused { Err(ErrorKind::Argument) } else { Ok(Plan::Copy(Reason::Asked)) });
    }
}

#[test]
fn elements_of_less_than_a_byte_have_the_alignment_of_a_byte() {
    let profile = Profile::export_only("parts").with_alignment(1).with_complex_by_parts(true);
    let complex: DType = "dlpack(5, 8, 1)".parse().unwrap();
    assert_eq!(profile.alignment_of(complex), 1);
}
