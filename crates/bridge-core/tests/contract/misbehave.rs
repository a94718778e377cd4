//! Adapters that break their promises: whatever one returns, core touches no memory that was not exported to it. Miri
//! and AddressSanitizer run it as part of the audit.

use crate::exchange::{counted, elements, on_host};
use bridge_core::dlpack::{DLPack, Tensor};
use bridge_core::{
    Adapter, Consumer, DType, Device, DeviceKind, Error, ErrorKind, Export, HostOnly, Offer, Options, Order, Ordering,
    Pending, Permutation, Profile, Result, Strides, copy_into, output, transfer, transfer_all,
};
use std::cell::Cell;
use std::sync::Arc;
use std::thread;

/// What an adapter returns instead of what was requested.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Lie {
    /// Fresh memory of another shape, dtype or order.
    Shorter,
    Longer,
    Narrower,
    Columns,
    /// The source, as fresh memory or as its copy.
    TheSource,
    /// Another tensor is exported than the one that is passed.
    AnotherTensor,
    /// The lease ends in the import.
    DropsLeases,
    /// Nothing fits the profile.
    OddProfile,
}

const LIES: [Lie; 8] = [
    Lie::Shorter,
    Lie::Longer,
    Lie::Narrower,
    Lie::Columns,
    Lie::TheSource,
    Lie::AnotherTensor,
    Lie::DropsLeases,
    Lie::OddProfile,
];

struct Liar {
    sound: DLPack,
    lie: Lie,
    profile: Profile,
    source: Tensor,
    other: Tensor,
}

impl Liar {
    fn new(lie: Lie, owns_memory: bool, source: &Tensor) -> Self {
        let sound = on_host();
        let mut profile = sound.profile().clone();
        profile.owns_memory = owns_memory;
        if lie == Lie::OddProfile {
            profile.alignment = 66;
        }
        Self { sound, lie, profile, source: source.clone(), other: counted(&[1]) }
    }
}

// SAFETY: it breaks its promises in host memory that nothing reads.
unsafe impl Adapter for Liar {
    type Tensor = Tensor;

    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.sound.consumer()
    }

    fn export(&self, tensor: &Tensor) -> Result<Export> {
        self.sound.export(if self.lie == Lie::AnotherTensor { &self.other } else { tensor })
    }

    fn import(&self, offer: Offer) -> Result<Tensor> {
        match self.lie {
            Lie::DropsLeases => Ok(self.other.clone()),
            _ => self.sound.import(offer),
        }
    }

    fn compact(&self, _: &Tensor) -> Result<Tensor> {
        Ok(self.source.clone())
    }

    fn overwritten(&self, _: &Tensor) -> Result<()> {
        Ok(())
    }

    unsafe fn empty(&self, device: Device, dtype: DType, shape: &[i64], order: Order) -> Result<Tensor> {
        let scaled = |by: i64| shape.iter().map(|length| length * by / 2).collect::<Vec<_>>();
        let (dtype, shape, order) = match self.lie {
            Lie::Shorter => (dtype, scaled(1), order),
            Lie::Longer => (dtype, scaled(4), order),
            Lie::Narrower => (DType::UINT8, shape.to_vec(), order),
            Lie::Columns => (dtype, shape.to_vec(), Order::ColumnMajor),
            Lie::TheSource => return Ok(self.source.clone()),
            _ => (dtype, shape.to_vec(), order),
        };
        // SAFETY: the caller's obligation.
        unsafe { self.sound.empty(device, dtype, &shape, order) }
    }
}

#[test]
fn no_lie_of_an_adapter_touches_memory_that_was_not_exported() {
    let ordering: Arc<dyn Ordering> = Arc::new(HostOnly);
    let all = [Options::default(), Options::copied(), Options::in_place()];
    for (lie, owns_memory) in LIES.iter().flat_map(|lie| [(*lie, false), (*lie, true)]) {
        for options in &all {
            let source = counted(&[4, 6]);
            let (liar, sound) = (Liar::new(lie, owns_memory, &source), on_host());
            let converted = [
                transfer(&sound, &liar, &source, &ordering, options),
                transfer(&liar, &sound, &source, &ordering, options),
                transfer(&liar, &liar, &source, &ordering, options),
            ];
            for (tensor, _) in converted.into_iter().flatten() {
                let numbers = elements(&tensor);
                assert!(numbers.iter().enumerate().all(|(i, number)| *number == i as f32), "{lie:?}: {numbers:?}");
            }
            for target in [counted(&[4, 6]), counted(&[2, 3]), counted(&[24])] {
                let _ = copy_into(&liar, &sound, &source, &target, &ordering);
                let _ = copy_into(&sound, &liar, &source, &target, &ordering);
                assert!(elements(&target).iter().all(|number| (0.0..24.0).contains(number)), "{lie:?}");
            }
        }
    }
}

/// Passes its offer on to a taker, and returns the taker's refusal: its profile promises more than the taker's.
struct Broker<'a> {
    profile: Profile,
    taker: &'a Liar,
    /// How often it states that profile before it states the taker's.
    states: Cell<u32>,
}

// SAFETY: it breaks its promises in host memory that nothing reads.
unsafe impl Adapter for Broker<'_> {
    type Tensor = Option<ErrorKind>;

    fn profile(&self) -> &Profile {
        let left = self.states.get().checked_sub(1);
        left.map_or(&self.taker.profile, |left| {
            self.states.set(left);
            &self.profile
        })
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.taker.consumer()
    }

    fn export(&self, _: &Option<ErrorKind>) -> Result<Export> {
        Err(Error::new(ErrorKind::NotATensor, "planned"))
    }

    fn import(&self, offer: Offer<'_>) -> Result<Option<ErrorKind>> {
        let lease = match offer.accept(&self.taker.profile, &self.taker.consumer()) {
            Ok(lease) => lease,
            Err(error) => return Ok(Some(error.kind())),
        };
        let (Profile { dtypes, devices, rank, strides, .. }, layout) = (&self.taker.profile, lease.layout());
        assert!(dtypes.contains(&lease.dtype()) && devices.contains(&lease.device().kind));
        assert!(rank.contains(&layout.shape().len()) && (*strides != Strides::Compact || layout.is_compact()));
        assert!(lease.data().is_multiple_of(self.taker.profile.alignment_of(lease.dtype())));
        Ok(None)
    }
}

#[test]
fn an_import_refuses_what_was_offered_to_a_profile_that_takes_more() {
    let ordering: Arc<dyn Ordering> = Arc::new(HostOnly);
    let profile = on_host().profile().clone();
    let (float, compact) = (vec![DType::FLOAT64], Strides::Compact);
    let columns = Options::default().with_permute(Permutation::new(&[1, 0]).unwrap());
    let cases = [
        (profile.clone(), Options::default(), None),
        (profile.clone().with_dtypes(float), Options::default(), Some(ErrorKind::Dtype)),
        (profile.clone().with_devices(vec![DeviceKind::CUDA]), Options::default(), Some(ErrorKind::Device)),
        (profile.clone().with_rank(0..=1), Options::default(), Some(ErrorKind::Layout)),
        (profile.clone().with_strides(compact), columns, Some(ErrorKind::CopyNeeded)),
        (profile.clone().with_alignment(1 << 30), Options::default(), Some(ErrorKind::CopyNeeded)),
        (profile.clone().with_alignment(48), Options::default(), Some(ErrorKind::Argument)),
        (profile.clone().with_owns_memory(true), Options::default(), Some(ErrorKind::CopyNeeded)),
    ];
    for (narrow, options, kind) in cases {
        let taker = Liar { profile: narrow, ..Liar::new(Lie::AnotherTensor, false, &counted(&[1])) };
        let broker = |states| Broker { profile: profile.clone(), taker: &taker, states: Cell::new(states) };
        let offered = |states| transfer(&on_host(), &broker(states), &counted(&[2, 3]), &ordering, &options);
        assert_eq!(offered(u32::MAX).unwrap().0, kind);
        // It may also state one profile for the plan, and another one for the offer.
        for states in 0..12 {
            let _ = offered(states);
        }
    }
}

#[test]
fn memory_for_a_result_is_as_it_was_asked_for() {
    let ordering: Arc<dyn Ordering> = Arc::new(HostOnly);
    for lie in LIES {
        let liar = Liar::new(lie, false, &counted(&[4, 6]));
        if let Ok(result) = output(&liar, &ordering, Device::CPU, DType::FLOAT64, &[4, 6]) {
            assert_eq!((result.layout().shape(), result.layout().nbytes()), (&[4, 6][..], 4 * 6 * 8), "{lie:?}");
        }
    }
}

#[test]
fn numbers_without_a_meaning_are_no_panic() {
    let (huge, wide) = ([1 << 40, 1 << 40], DType { code: 5, bits: 192, lanes: 2 });
    assert_eq!(
        // SAFETY: the call makes no tensor.
        unsafe { on_host().empty(Device::CPU, DType::UINT8, &huge, Order::RowMajor) }.unwrap_err().kind(),
        ErrorKind::Layout
    );
    assert_eq!([Pending::Conjugation, Pending::Negation].map(|pending| pending.flips(wide)), [None; 2]);
}

#[test]
fn views_are_dropped_in_any_order_on_any_thread() {
    let ordering: Arc<dyn Ordering> = Arc::new(HostOnly);
    let dlpack = on_host();
    for first in 0..4 {
        let source = counted(&[8, 3]);
        let sources = [(&dlpack as &dyn Adapter<Tensor = Tensor>, &source); 9];
        let views = transfer_all(&sources, &dlpack, &ordering, &Options::default()).expect("they convert");
        let mut views: Vec<_> = views.into_iter().map(|(view, _)| view).collect();
        let onward = transfer(&dlpack, &dlpack, &views[first], &ordering, &Options::default()).expect("it converts").0;
        views.rotate_left(first * 2);
        drop(source);
        let late = views.split_off(5);
        let clones = late.clone();
        let threads = [views, late].map(|views| thread::spawn(move || views.into_iter().rev().for_each(drop)));
        let read = thread::spawn(move || elements(&clones[0]));
        assert_eq!(read.join().expect("it reads"), elements(&onward));
        threads.into_iter().for_each(|thread| thread.join().expect("it drops"));
        assert_eq!(elements(&onward)[23], 23.0);
    }
}
