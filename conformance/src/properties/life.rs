//! How long tensors live: a state machine over both frameworks, with a model of every buffer.

use super::watched::Watched;
use super::{Failure, Outcome, Pair, as_expected, ensure, outstanding, same_bytes};
use crate::model::{self, Expected};
use crate::{Case, Op, Spec};
use bridge_core::{Options, Plan, transfer};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

/// A tensor of one of the two frameworks.
enum Held<F, T> {
    Source(F),
    Target(T),
}

/// A tensor that is alive, and its model.
struct Entry<F, T> {
    tensor: Held<F, T>,
    spec: Spec,
    buffer: usize,
    /// Whether its memory is protected: no view of it may be written to.
    protected: bool,
}

/// The frameworks, their tensors, and the model of every buffer.
struct Machine<'a, F, T> {
    pair: &'a Pair<'a, F, T>,
    alive: Vec<Entry<F, T>>,
    buffers: Vec<Vec<u8>>,
}

/// In any order of steps and on any thread, the bytes are right at every read, every lease is released once, and no
/// memory stays in use at the end.
pub(super) fn life<F, T>(pair: &Pair<'_, F, T>, case: &Case) -> Outcome {
    keeps_its_memory(pair, case)?;
    // Only what the steps convert counts.
    pair.take_seen();
    let before = pair.memory()?;
    let mut machine = Machine { pair, alive: Vec::new(), buffers: Vec::new() };
    machine.create(&case.spec, case.seed)?;
    for (number, op) in case.ops.iter().enumerate() {
        machine
            .step(op, case)
            .map_err(|failure| Failure { message: format!("step {number}, {op}: {}", failure.message), ..failure })?;
    }
    for entry in &machine.alive {
        machine.read(entry)?;
    }
    drop(machine);
    pair.is_back(before)
}

/// Bytes of the tensor whose memory is looked for again: few allocations next to those of the frameworks have this
/// size.
const SOUGHT: usize = 1000;

/// Tensors that are made where the memory of a view must not be.
const TRIES: usize = 4;

/// A view keeps its lease, and the lease its memory, for a tensor of a size that is sought and for that of the case. No
/// element of the view is touched: where either is missing, that would end the process without a report.
fn keeps_its_memory<F, T>(pair: &Pair<'_, F, T>, case: &Case) -> Outcome {
    let dtype = case.spec.dtype;
    let row = Spec::row(dtype, SOUGHT / model::itemsize(dtype), &pair.sides().common_ranks());
    keeps(pair, &Case { spec: row, ..case.clone() })?;
    let own = Spec { read_only: false, ..case.spec.clone() };
    if model::numel(&own.shape) == 0 { Ok(()) } else { keeps(pair, &Case { spec: own, ..case.clone() }) }
}

fn keeps<F, T>(pair: &Pair<'_, F, T>, case: &Case) -> Outcome {
    let leased = outstanding();
    let spec = &case.spec;
    let (tensor, bytes) = pair.create(case)?;
    // That of the base buffer, which is as long as `bytes`.
    let base = |seen: usize| seen - spec.offset * model::itemsize(spec.dtype);
    let address = pair.from.observe(&tensor)?.address;
    let from = Watched { adapter: pair.from, returned: Arc::default() };
    let converted = match pair.conversion_there {
        // Frameworks of two processes: the lease is of the process between them.
        Some(_) => pair.transfer(&tensor, None),
        None => transfer(&from, pair.to, &tensor, pair.ordering(), &Options::default()),
    };
    let lost = from.returned.load(SeqCst);
    drop(tensor);
    // What is refused or copied has no lease; whether it may be is judged by the steps.
    if let Some((view, _)) = converted.ok().filter(|(_, transfer)| transfer.bytes_copied == 0) {
        if lost {
            let advice = "keep the lease where the framework keeps the owner of imported memory";
            return Err(Failure::last(format!("the import dropped its lease while the view lives: {advice}")));
        }
        let shared = pair.to.observe(&view)?.address == address;
        let mut others = Vec::new();
        for _ in 0..if shared { TRIES } else { 0 } {
            let other = pair.from.create(spec, &bytes)?;
            let other_base = base(pair.from.observe(&other)?.address);
            let block = pair.from.allocate(bytes.len())?;
            for start in [other_base, pair.from.observe(&block)?.address] {
                if start.abs_diff(base(address)) < bytes.len() {
                    let advice = "the buffer of an export owns the tensor's memory";
                    return Err(Failure::last(format!("the source reuses the memory of a view that lives: {advice}")));
                }
            }
            others.push((other, block));
        }
    }
    pair.returned(leased)
}

/// Returns whether the tensor cannot be written to.
fn is_constant<X>(subject: &dyn crate::Subject<Tensor = X>, tensor: &X) -> bridge_core::Result<bool> {
    Ok(!subject.capabilities().writes || subject.observe(tensor)?.read_only)
}

impl<F, T> Machine<'_, F, T> {
    fn create(&mut self, spec: &Spec, seed: u64) -> Outcome {
        let bytes = model::random_bytes(spec, seed);
        let tensor = Held::Source(self.pair.from.create(spec, &bytes)?);
        self.buffers.push(bytes);
        let (buffer, protected) = (self.buffers.len() - 1, spec.read_only);
        self.alive.push(Entry { tensor, spec: spec.clone(), buffer, protected });
        Ok(())
    }

    fn read(&self, entry: &Entry<F, T>) -> Outcome {
        let bytes = match &entry.tensor {
            Held::Source(tensor) => self.pair.from.read(tensor)?,
            Held::Target(tensor) => self.pair.to.read(tensor)?,
        };
        same_bytes("a tensor", &bytes, &model::elements(&entry.spec, &self.buffers[entry.buffer]))
    }

    fn step(&mut self, op: &Op, case: &Case) -> Outcome {
        let alive = self.alive.len();
        match *op {
            Op::Create(seed) => self.create(&case.spec, seed),
            Op::Collect => {
                self.pair.from.settle()?;
                self.pair.to.settle()?;
                Ok(())
            }
            Op::Pressure => self.pressure(case),
            _ if alive == 0 => Ok(()),
            Op::Convert(which, copy) => self.convert(which % alive, copy),
            Op::Write(which, seed) => self.write(which % alive, seed),
            Op::Read(which) => self.read(&self.alive[which % alive]),
            Op::Part(which, start) => self.part(which % alive, start),
            Op::Through(which) => self.through(which % alive),
            Op::Drop(which) => {
                drop(self.alive.swap_remove(which % alive));
                Ok(())
            }
            Op::DropElsewhere(which) => {
                match self.alive.swap_remove(which % alive).tensor {
                    Held::Source(tensor) => self.pair.from.drop_on_thread(tensor),
                    Held::Target(tensor) => self.pair.to.drop_on_thread(tensor),
                }
                Ok(())
            }
        }
    }

    fn convert(&mut self, which: usize, copy: Option<bool>) -> Outcome {
        let pair = self.pair;
        let Entry { tensor, spec, buffer, protected } = &self.alive[which];
        let (expected, converted) = match tensor {
            Held::Source(tensor) => {
                let expected = model::expected(&pair.from.observe(tensor)?, None, pair.profiles(), copy);
                let got = pair.transfer(tensor, copy).map(|(view, _)| Held::Target(view));
                (expected, as_expected(got, expected)?)
            }
            Held::Target(tensor) => {
                let expected = model::expected(&pair.to.observe(tensor)?, None, pair.profiles_back(), copy);
                let got = pair.back(tensor, copy).map(|(view, _)| Held::Source(view));
                (expected, as_expected(got, expected)?)
            }
        };
        let Some(tensor) = converted else { return Ok(()) };
        let (mut spec, mut buffer, mut protected) = (spec.clone(), *buffer, *protected);
        if expected == Expected::Copied {
            self.buffers.push(model::elements(&spec, &self.buffers[buffer]));
            (spec, buffer, protected) = (model::compact(&spec), self.buffers.len() - 1, false);
        }
        // A tensor without elements has no memory that could be written to: some frameworks make another one.
        if protected && !spec.shape.contains(&0) {
            let constant = match &tensor {
                Held::Source(tensor) => is_constant(pair.from, tensor)?,
                Held::Target(tensor) => is_constant(pair.to, tensor)?,
            };
            ensure!(constant, "a view of read-only memory can be written to");
        }
        self.alive.push(Entry { tensor, spec, buffer, protected });
        Ok(())
    }

    /// The framework of a tensor makes a view of it, which keeps the memory as the tensor does.
    fn part(&mut self, which: usize, start: usize) -> Outcome {
        let Entry { tensor, spec, buffer, protected } = &self.alive[which];
        let (Some(&length), Some(&stride)) = (spec.shape.first(), spec.strides.first()) else { return Ok(()) };
        if model::numel(&spec.shape) == 0 {
            return Ok(());
        }
        let start = start as i64 % length;
        let made = match tensor {
            Held::Source(tensor) => self.pair.from.part(tensor, start as usize).map(|part| part.map(Held::Source)),
            Held::Target(tensor) => self.pair.to.part(tensor, start as usize).map(|part| part.map(Held::Target)),
        };
        let Some(tensor) = made.transpose()? else { return Ok(()) };
        let mut spec = spec.clone();
        spec.shape[0] -= start;
        spec.offset = (spec.offset as i64 + start * stride) as usize;
        self.alive.push(Entry { tensor, spec, buffer: *buffer, protected: *protected });
        Ok(())
    }

    /// A view of a view of a view: of the target, of a third framework, and of the target again.
    fn through(&mut self, which: usize) -> Outcome {
        let pair = self.pair;
        let (Some(third), Entry { tensor: Held::Target(tensor), spec, buffer, protected }) =
            (pair.third, &self.alive[which])
        else {
            return Ok(());
        };
        let options = Options::default();
        // What a third framework takes is judged in its own pairs.
        let Ok((view, there)) = transfer(pair.to, third, tensor, pair.ordering(), &options) else { return Ok(()) };
        let Ok((tensor, back)) = transfer(third, pair.to, &view, pair.ordering(), &options) else { return Ok(()) };
        let (mut spec, mut buffer, mut protected) = (spec.clone(), *buffer, *protected);
        if [there, back].iter().any(|done| done.plan != Plan::ZeroCopy) {
            self.buffers.push(model::elements(&spec, &self.buffers[buffer]));
            (spec, buffer, protected) = (model::compact(&spec), self.buffers.len() - 1, false);
        }
        self.alive.push(Entry { tensor: Held::Target(tensor), spec, buffer, protected });
        Ok(())
    }

    fn write(&mut self, which: usize, seed: u64) -> Outcome {
        let Entry { tensor, spec, buffer, .. } = &self.alive[which];
        let bytes = model::random_elements(spec, model::numel(&spec.shape), seed);
        match tensor {
            Held::Source(tensor) if is_constant(self.pair.from, tensor)? => return self.read(&self.alive[which]),
            Held::Target(tensor) if is_constant(self.pair.to, tensor)? => return self.read(&self.alive[which]),
            Held::Source(tensor) => self.pair.from.write(tensor, &bytes)?,
            Held::Target(tensor) => self.pair.to.write(tensor, &bytes)?,
        }
        model::scatter(spec, &mut self.buffers[*buffer], &bytes);
        // Reading on the same side waits for the write: later uses on the other side are not ordered after it.
        self.read(&self.alive[which])
    }

    fn pressure(&self, case: &Case) -> Outcome {
        let nbytes = case.spec.base * model::itemsize(case.spec.dtype);
        for garbage in [0x5a, 0xa5] {
            let (mut ours, mut theirs) = (self.pair.from.allocate(nbytes)?, self.pair.to.allocate(nbytes)?);
            self.pair.from.fill(&mut ours, garbage)?;
            self.pair.to.fill(&mut theirs, garbage)?;
        }
        Ok(())
    }
}
