//! Copies by the ordering's own kernels, next to those of the frameworks.

use super::{Outcome, Pair, ensure, on, on_both, same_bytes};
use crate::{Case, model};
use bridge_core::{CopiedBy, DType, ErrorKind};

/// The kernels copy what the frameworks copy: the same elements into the same layout.
pub(super) fn copy<F, T>(pair: &Pair<'_, F, T>, case: &Case) -> Outcome {
    let (tensor, bytes) = pair.create(case)?;
    let expected = model::elements(&case.spec, &bytes);
    let mut seen = Vec::new();
    for kernels in [true, false] {
        pair.kernels.set(kernels);
        let (copy, told) = match pair.transfer(&tensor, Some(true)) {
            // A framework may be unable to copy.
            Err(error) if !kernels && error.kind() == ErrorKind::CopyNeeded => continue,
            converted => converted?,
        };
        let own = matches!(told.copied_by, Some(CopiedBy::Producer | CopiedBy::Consumer));
        // What has no elements is copied by none.
        let by = told.copied_by.map_or("no kernel".into(), |by| format!("{by}"));
        let chosen = kernels || pair.by_package || pair.from.streams().is_empty();
        ensure!(chosen || own, "without kernels the copy was made by {by}");
        same_bytes(&format!("the copy by {by}"), &pair.to.read(&copy)?, &expected)?;
        let what = pair.to.observe(&copy)?;
        seen.push((what.dtype, what.shape, what.strides));
    }
    let same = seen.windows(2).all(|two| two[0].0 == two[1].0 && two[0].1 == two[1].1);
    let told = |copy: Option<&(DType, Vec<i64>, Vec<i64>)>| {
        copy.map_or("none".into(), |(dtype, shape, strides)| format!("{dtype}, shape {shape:?}, strides {strides:?}"))
    };
    ensure!(same, "the kernels make {}, and the frameworks {}", told(seen.first()), told(seen.last()));
    same_bytes("the source, after the copies", &pair.from.read(&tensor)?, &expected)
}

/// Elements that lie gigabytes apart are copied: their index needs more than 31 bits.
pub(super) fn far<F, T>(pair: &Pair<'_, F, T>, case: &Case) -> Outcome {
    let Some(tensor) = pair.from.create_unwritten(&case.spec) else { return Ok(()) };
    let tensor = tensor?;
    let elements = model::random_elements(&case.spec, model::numel(&case.spec.shape), case.seed);
    pair.from.write(&tensor, &elements)?;
    same_bytes("the source, before the copy", &pair.from.read(&tensor)?, &elements)?;
    let (copy, _) = pair.transfer(&tensor, Some(true))?;
    same_bytes("the copy", &pair.to.read(&copy)?, &elements)
}

/// Two copies that run at once do not disturb each other, whatever memory they go through.
pub(super) fn staging<F, T>(pair: &Pair<'_, F, T>, case: &Case) -> Outcome {
    let streams = pair.streams();
    // From one stream of the source, the second copy would wait for the first: it is exported after the release.
    let sides = [
        (streams.from(case.streams.write), streams.to(case.streams.read)),
        (streams.from(case.streams.back), streams.to(case.streams.onward)),
    ];
    let mut copies = Vec::new();
    for (i, (writer, reader)) in sides.into_iter().enumerate() {
        let bytes = model::random_bytes(&case.spec, case.seed.wrapping_add(i as u64));
        let tensor = pair.from.create(&case.spec, &bytes)?;
        let copy = on_both(pair, writer, reader, || {
            pair.to.delay()?;
            Ok(pair.transfer(&tensor, Some(true))?.0)
        })?;
        copies.push((reader, tensor, copy, model::elements(&case.spec, &bytes)));
    }
    for (reader, _tensor, copy, expected) in &copies {
        let got = on(pair.to, *reader, || Ok(pair.to.read(copy)?))?;
        same_bytes("one of two copies", &got, expected)?;
    }
    Ok(())
}
