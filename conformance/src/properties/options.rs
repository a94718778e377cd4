//! Options of callers other than `copy`: dimensions, the order of elements, a device, read-only results.

use super::{Outcome, Pair, as_expected, ensure, same_bytes};
use crate::model::{self, Expected, Random};
use crate::{Case, Observed, Spec};
use bridge_core::{Access, Device, ErrorKind, Options, Order, Permutation, Plan, Result, Strides, transfer};

/// The options of a conversion.
struct Asked {
    /// Which dimension of the tensor each one of the result is.
    axes: Vec<usize>,
    order: Option<Order>,
    options: Options,
}

/// The result has the dimensions, the order and the device that were asked for, in place wherever that is possible, and
/// is refused where the target cannot have it.
pub(super) fn options<F, T>(pair: &Pair<'_, F, T>, case: &Case) -> Outcome {
    // On a device only kernels make some of the orders.
    if pair.from.device() != Device::CPU {
        pair.kernels.set(true);
    }
    let (tensor, bytes) = pair.create(case)?;
    let source = pair.from.observe(&tensor)?;
    // Only kernels make a permuted copy, into memory that one of the two lets them write to.
    let shaped = pair.from.capabilities().writes || pair.to.capabilities().writes;
    let asked = Asked::at_random(case, pair.to.device(), shaped)?;
    let take = |axes: &[usize], of: &[i64]| axes.iter().map(|axis| of[*axis]).collect::<Vec<_>>();
    let seen =
        Observed { shape: take(&asked.axes, &source.shape), strides: take(&asked.axes, &source.strides), ..source };
    let expected = expected(pair, &seen, case.copy, &asked);
    let converted = transfer(pair.from, pair.to, &tensor, pair.ordering(), &asked.options);
    pair.see(converted.as_ref().map(|(_, done)| done.plan).map_err(drop));
    let Some((view, done)) = as_expected(converted, expected)? else { return Ok(()) };
    ensure!(
        (done.plan == Plan::ZeroCopy) == (expected == Expected::InPlace),
        "done: {}; expected: {expected}",
        crate::words::plan(done.plan)
    );
    let spec = Spec {
        shape: take(&asked.axes, &case.spec.shape),
        strides: take(&asked.axes, &case.spec.strides),
        ..case.spec.clone()
    };
    let result = pair.to.observe(&view)?;
    ensure!(result.shape == spec.shape, "the result has the shape {:?}, not {:?}", result.shape, spec.shape);
    ensure!(result.device == seen.device, "the result is on {}, not on {}", result.device, seen.device);
    let at_its_place =
        expected != Expected::InPlace || model::numel(&spec.shape) == 0 || result.address == seen.address;
    ensure!(at_its_place, "in place, but {:#x} became {:#x}", seen.address, result.address);
    if let Some(order) = asked.order {
        let (strides, letter) = (&result.strides, order.letter());
        ensure!(follows(order, &result.shape, strides), "order {letter:?} was asked for, and strides are {strides:?}");
    }
    same_bytes("the result", &pair.to.read(&view)?, &model::elements(&spec, &bytes))?;
    let is_immutable = pair.from.export(&tensor)?.buffer().access() == Access::Immutable;
    drop(tensor);
    let elements = model::elements(&spec, &bytes);
    same_bytes("the result, without the tensor", &pair.to.read(&view)?, &elements)?;
    let is_constant = expected == Expected::InPlace && is_immutable && !elements.is_empty();
    if !(is_constant && asked.options.watch && pair.to.capabilities().watches) {
        return Ok(());
    }
    drop(pair.to.export(&view)?);
    pair.to.write(&view, &elements)?;
    as_expected(pair.to.export(&view).map(drop), Expected::Refused(ErrorKind::ReadOnly)).map(drop)
}

impl Asked {
    fn at_random(case: &Case, device: Device, shaped: bool) -> Result<Self> {
        let mut random = Random::new(!case.seed);
        let ndim = case.spec.shape.len();
        let mut axes: Vec<usize> = (0..ndim).collect();
        let permuted = random.below(2) == 0 && shaped;
        for last in (1..ndim).rev().filter(|_| permuted) {
            axes.swap(last, random.below(last + 1));
        }
        // An axis below 0 counts from the end.
        let from_the_end = random.below(3) == 0;
        let named = |axis: &usize| *axis as i64 - if from_the_end { ndim as i64 } else { 0 };
        let permutation =
            permuted.then(|| Permutation::new(&axes.iter().map(named).collect::<Vec<_>>())).transpose()?;
        let order = [None, Some(Order::RowMajor), Some(Order::ColumnMajor)][random.below(3)].filter(|_| shaped);
        let options = Options::default().with_copy(case.copy).with_permute(permutation).with_order(order);
        let options = options.with_watch(random.below(2) == 0).with_device((random.below(2) == 0).then_some(device));
        // SAFETY: the case only reads what it makes.
        let options = unsafe { options.with_read_only(random.below(3) == 0) };
        Ok(Self { axes, order, options })
    }
}

/// Returns the expected outcome for a tensor whose dimensions are permuted already.
fn expected<F, T>(pair: &Pair<'_, F, T>, tensor: &Observed, copy: Option<bool>, asked: &Asked) -> Expected {
    let expected = model::expected(tensor, None, pair.profiles(), copy);
    let target = pair.to.profile();
    let several = model::numel(&tensor.shape) > 0 && tensor.shape.iter().filter(|length| **length > 1).count() > 1;
    let follows = asked.order.is_none_or(|order| follows(order, &tensor.shape, &tensor.strides));
    match expected {
        Expected::Refused(ErrorKind::Device | ErrorKind::Dtype | ErrorKind::Layout) => expected,
        _ if asked.order == Some(Order::ColumnMajor) && target.strides == Strides::Compact && several => {
            Expected::Refused(ErrorKind::Argument)
        }
        Expected::InPlace | Expected::Refused(ErrorKind::ReadOnly) if !follows => match copy {
            Some(false) => Expected::Refused(ErrorKind::CopyNeeded),
            _ => Expected::Copied,
        },
        Expected::Refused(ErrorKind::ReadOnly) if asked.options.is_read_only() => Expected::InPlace,
        expected => expected,
    }
}

/// Returns whether elements lie in this order, without gaps.
fn follows(order: Order, shape: &[i64], strides: &[i64]) -> bool {
    let mut dims: Vec<usize> = (0..shape.len()).filter(|dim| shape[*dim] != 1).collect();
    if order == Order::RowMajor {
        dims.reverse();
    }
    let mut next = 1;
    model::numel(shape) == 0
        || dims.into_iter().all(|dim| {
            let here = strides[dim] == next;
            next *= shape[dim];
            here
        })
}
