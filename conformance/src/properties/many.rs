//! Different tensors that are converted together.

use super::{Failure, Outcome, Pair, as_expected, ensure, same_bytes};
use crate::model::{self, Expected, Random};
use crate::{Case, Spec, words};
use bridge_core::{Adapter, Failed, Options, Plan, transfer_all};

/// The most tensors of a case.
const MOST: usize = 16;

/// Each result is that of the tensor at its place in the list, and keeps its own memory. Where one of them must be
/// refused, the error names one that must be.
pub(super) fn many<F, T>(pair: &Pair<'_, F, T>, case: &Case) -> Outcome {
    let mut random = Random::new(case.seed);
    let mut specs: Vec<&Spec> = case.pieces.iter().flat_map(|kind| vec![&kind.from; kind.count.min(3)]).collect();
    specs.push(&case.spec);
    for last in (1..specs.len()).rev() {
        specs.swap(last, random.below(last + 1));
    }
    specs.truncate(MOST);
    let (mut tensors, mut elements, mut expected) = (Vec::new(), Vec::new(), Vec::new());
    for spec in &specs {
        let bytes = model::random_bytes(spec, random.bits());
        let tensor = pair.from.create(spec, &bytes)?;
        expected.push(model::expected(&pair.from.observe(&tensor)?, spec.pending, pair.profiles(), case.copy));
        elements.push(model::elements(spec, &bytes));
        tensors.push(tensor);
    }
    let from: &dyn Adapter<Tensor = F> = pair.from;
    let list: Vec<_> = tensors.iter().map(|tensor| (from, tensor)).collect();
    let converted = transfer_all(&list, pair.to, pair.ordering(), &Options::default().with_copy(case.copy));
    let refused = expected.iter().any(|expected| matches!(expected, Expected::Refused(_)));
    let converted = match converted {
        Ok(converted) => converted,
        Err(Failed { index, error, .. }) => {
            pair.see(Err(()));
            let named = expected.get(index).copied().filter(|_| refused);
            let Some(named) = named else {
                let failure = Failure::from(error);
                return Err(Failure { message: format!("tensor {index}: {failure}"), ..failure });
            };
            return as_expected::<()>(Err(error), named).map(drop);
        }
    };
    ensure!(!refused, "all were converted, and one of them had to be refused");
    ensure!(
        converted.len() == specs.len(),
        "{} converted of {}",
        words::counted(converted.len(), "tensor"),
        specs.len()
    );
    let mut views = Vec::new();
    for (index, (view, done)) in converted.into_iter().enumerate() {
        pair.see(Ok(done.plan));
        let (source, seen) = (pair.from.observe(&tensors[index])?, pair.to.observe(&view)?);
        let told = (seen.dtype, &seen.shape) == (specs[index].dtype, &specs[index].shape);
        ensure!(told, "result {index} is {seen}, not {}", specs[index]);
        let in_place = done.plan == Plan::ZeroCopy;
        ensure!(
            in_place == (expected[index] == Expected::InPlace),
            "result {index}: {}; expected: {}",
            words::plan(done.plan),
            expected[index]
        );
        let same = elements[index].is_empty() || in_place == (seen.address == source.address);
        ensure!(same, "result {index} is at {:#x}, and its tensor at {:#x}", seen.address, source.address);
        views.push((index, view));
    }
    // Only the views keep the memory alive, each its own.
    while !tensors.is_empty() {
        tensors.swap_remove(random.below(tensors.len()));
    }
    while !views.is_empty() {
        let (index, view) = views.swap_remove(random.below(views.len()));
        same_bytes(&format!("result {index}, of {}", specs[index]), &pair.to.read(&view)?, &elements[index])?;
        let nbytes = elements[index].len();
        drop(view);
        let mut garbage = pair.from.allocate(nbytes.max(1))?;
        pair.from.fill(&mut garbage, 0x5a)?;
    }
    Ok(())
}
