//! The process that has the framework: it answers the judging process.

use super::piece::{Piece, Pieces};
use super::wire::{Answer, Hello, Id, Made, Request, receive, send};
use super::{Around, held, in_place};
use crate::{Capabilities, Spec, Subject, model};
use bridge_core::{
    Access, Adapter, Device, DeviceKind, Error, ErrorKind, Layout, Options, Result, Stream, stats, transfer,
};
use bridge_ipc::{Ipc, IpcTensor, Ticket, Writing};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io::{Read, Write};

/// Serves a subject to the process at the other end, until it closes its end.
pub fn serve<T>(subject: &dyn Subject<Tensor = T>, from: impl Read + Send, to: impl Write + Send, around: Around) {
    let line = RefCell::new((Box::new(from) as _, Box::new(to) as _));
    let held = RefCell::default();
    // SAFETY: the processes use memory in turns, each after the answer of the other.
    let ipc = unsafe { Ipc::new() };
    let service = Service { subject, around, line, held, last: Cell::new(0), pieces: Pieces::default(), ipc };
    service.serve();
}

/// A tensor that the other process knows by its number.
struct Held<T> {
    tensor: T,
    /// The tickets that were made for it.
    tickets: Vec<Ticket>,
}

struct Service<'a, T> {
    subject: &'a dyn Subject<Tensor = T>,
    around: Around,
    line: RefCell<(Box<dyn Read + Send + 'a>, Box<dyn Write + Send + 'a>)>,
    held: RefCell<BTreeMap<Id, Held<T>>>,
    last: Cell<Id>,
    pieces: Pieces,
    ipc: Ipc,
}

impl<T> Service<'_, T> {
    /// Answers requests until the body of a stream, or the process at the other end, ends.
    fn serve(&self) {
        loop {
            let received = {
                let (from, _) = &mut *self.line.borrow_mut();
                self.around.detached(|| receive::<Request>(from))
            };
            let Ok((request, bytes)) = received else { return };
            match request {
                Request::Leave => return,
                Request::Enter(handle) => {
                    // SAFETY: the other process names a stream that this one has named to it.
                    self.within(|body| unsafe { self.subject.on_stream(Stream::from_handle(handle), body) });
                }
                Request::EnterFresh { external } => self.within(|body| self.subject.on_fresh_stream(external, body)),
                request => {
                    let (answer, bytes) =
                        self.answer(request, bytes).unwrap_or_else(|error| (error.into(), Vec::new()));
                    self.say(&answer, &bytes);
                }
            }
        }
    }

    /// Serves as the body of a method of the subject. The request that begins it and the one that ends it are answered.
    fn within(&self, enter: impl FnOnce(&mut dyn FnMut() -> Result<()>) -> Result<()>) {
        let result = enter(&mut || {
            self.say(&Answer::Done, &[]);
            self.serve();
            Ok(())
        });
        self.say(&result.into(), &[]);
    }

    fn say(&self, answer: &Answer, bytes: &[u8]) {
        // Where the process at the other end has ended, the next request says so.
        let _ = send(&mut self.line.borrow_mut().1, answer, bytes);
    }

    fn answer(&self, request: Request, bytes: Vec<u8>) -> Result<(Answer, Vec<u8>)> {
        let subject = self.subject;
        let answer = match request {
            Request::Hello => Answer::Hello(Box::new(self.hello())),
            Request::Create(spec) => self.publish(self.create(&spec, bytes)?)?,
            Request::Allocate(nbytes) => self.publish(subject.allocate(nbytes)?)?,
            Request::Empty(dtype, shape) => {
                let spec = Spec::compact(dtype, &shape);
                self.publish(self.create(&spec, vec![0; spec.base * model::itemsize(dtype)])?)?
            }
            Request::Open(ticket) => {
                let opened = self.around.open(&ticket.parse()?)?;
                let options = Options::default().with_copy(in_place(opened.layout()));
                let (tensor, _) = transfer(&self.ipc, subject, &opened, &subject.ordering(), &options)?;
                match subject.device().kind {
                    DeviceKind::CPU => self.publish(tensor)?,
                    _ => self.keep(tensor)?,
                }
            }
            Request::Share(id) => {
                let (ticket, address) = self.share(&self.tensor(id)?)?;
                let text = ticket.text();
                self.held.borrow_mut().entry(id).and_modify(|held| held.tickets.push(ticket));
                Answer::Made(Made { id, ticket: Some(text), address })
            }
            Request::Observe(id) => Answer::Observed(subject.observe(&self.tensor(id)?)?),
            Request::Read(id) => return Ok((Answer::Elements, subject.read(&self.tensor(id)?)?)),
            Request::Write(id) => subject.write(&self.tensor(id)?, &bytes).into(),
            Request::Note(id) => subject.note(&self.tensor(id)?).into(),
            Request::Fill(id, byte) => {
                let mut tensor = self.tensor(id)?;
                subject.fill(&mut tensor, byte)?;
                self.changed(tensor)?
            }
            Request::Snapshot { from, into } => {
                let mut copy = self.tensor(into)?;
                subject.snapshot(&self.tensor(from)?, &mut copy)?;
                self.changed(copy)?
            }
            Request::Drop(id) => {
                drop(self.take(id));
                Answer::Done
            }
            Request::DropOnThread(id) => {
                self.take(id).into_iter().for_each(|tensor| subject.drop_on_thread(tensor));
                Answer::Done
            }
            Request::Delay => subject.delay().into(),
            Request::Settle => {
                let used = subject.settle()?.unwrap_or_default();
                let stats = stats();
                Answer::Used(used + held() + stats.leased.saturating_sub(stats.released) as usize)
            }
            Request::Check => subject.check().into(),
            Request::Enter(_) | Request::EnterFresh { .. } | Request::Leave => Answer::Done,
        };
        Ok((answer, Vec::new()))
    }

    fn hello(&self) -> Hello {
        let subject = self.subject;
        let (can, profile) = (subject.capabilities(), subject.profile().clone());
        // The suite makes them in shared memory, which the adapter imports; a deferred operation does not leave the
        // process, and copies are made where the tensor goes.
        let dtypes = can.dtypes.iter().copied().filter(|dtype| profile.dtypes.contains(dtype)).collect();
        let can = Capabilities { dtypes, defers: Vec::new(), gigabytes: false, copies: false, ..can };
        // Nor do these questions go there: the other process answers for itself.
        let can = Capabilities {
            parts: false,
            threads: false,
            devices: false,
            graphs: false,
            usual: false,
            raises: false,
            ..can
        };
        let streams = subject.streams().into_iter().map(Stream::handle).collect();
        Hello { profile, device: subject.device(), can, streams }
    }

    /// Makes a tensor: by the framework, or on the host in shared memory.
    fn create(&self, spec: &Spec, bytes: Vec<u8>) -> Result<T> {
        if self.subject.device().kind != DeviceKind::CPU {
            return self.subject.create(spec, &bytes);
        }
        let access = if spec.read_only { Access::ReadOnly } else { Access::ReadWrite };
        let at = spec.align + spec.offset * model::itemsize(spec.dtype);
        let padded = [vec![0; spec.align], bytes].concat();
        let layout = Layout::new(spec.dtype, &spec.shape, Some(&spec.strides), 0)?;
        self.import(Piece::within(self.shared(padded, access)?, at, spec.dtype, layout)?)
    }

    /// Copies bytes into shared memory.
    fn shared(&self, bytes: Vec<u8>, access: Access) -> Result<IpcTensor> {
        let piece = Piece::of(bytes)?;
        let ordering = self.subject.ordering();
        let (ticket, _) = self.around.share(&self.pieces, &piece, &ordering, (writing(access), None))?;
        let opened = self.around.open(&ticket);
        // What was opened here keeps the memory.
        self.around.end(&ticket);
        opened
    }

    fn import(&self, piece: Piece) -> Result<T> {
        let options = Options::in_place();
        Ok(transfer(&self.pieces, self.subject, &piece, &self.subject.ordering(), &options)?.0)
    }

    /// Shares a tensor where it is. Returns the ticket, and the address of its first element in this process.
    fn share(&self, tensor: &T) -> Result<(Ticket, usize)> {
        let exported = self.subject.export(tensor)?;
        let (address, access, copy) = (exported.data(), exported.buffer().access(), in_place(exported.layout()));
        drop(exported);
        let (from, ordering) = (self.subject as &dyn Adapter<Tensor = T>, self.subject.ordering());
        let (ticket, _) = self.around.share(from, tensor, &ordering, (writing(access), copy))?;
        Ok((ticket, address))
    }

    /// Shares a tensor for the first time. What the framework has made in memory of the host that is its own is
    /// replaced by a copy in shared memory.
    fn publish(&self, tensor: T) -> Result<Answer> {
        let (tensor, (ticket, address)) = match self.share(&tensor) {
            Err(error) if error.kind() == ErrorKind::CopyNeeded && self.subject.device() == Device::CPU => {
                let seen = self.subject.observe(&tensor)?;
                let copy = self.create(&Spec::compact(seen.dtype, &seen.shape), self.subject.read(&tensor)?)?;
                let shared = self.share(&copy)?;
                (copy, shared)
            }
            shared => (tensor, shared?),
        };
        let text = ticket.text();
        let id = self.hold(Held { tensor, tickets: vec![ticket] });
        Ok(Answer::Made(Made { id, ticket: Some(text), address }))
    }

    /// Keeps a tensor that nothing else refers to: its drop returns its memory.
    fn keep(&self, tensor: T) -> Result<Answer> {
        let address = self.subject.export(&tensor)?.data();
        Ok(Answer::Made(Made { id: self.hold(Held { tensor, tickets: Vec::new() }), ticket: None, address }))
    }

    fn hold(&self, held: Held<T>) -> Id {
        let id = self.last.get() + 1;
        self.last.set(id);
        self.held.borrow_mut().insert(id, held);
        id
    }

    /// Answers for a tensor that was to be changed: where the framework does not write, another has replaced it.
    fn changed(&self, tensor: T) -> Result<Answer> {
        if self.subject.capabilities().writes { Ok(Answer::Done) } else { self.publish(tensor) }
    }

    fn tensor(&self, id: Id) -> Result<T> {
        let held = self.held.borrow();
        let held = held.get(&id).ok_or_else(|| Error::new(ErrorKind::Argument, format!("there is no tensor {id}")))?;
        Ok(self.subject.share(&held.tensor))
    }

    /// Forgets a tensor, and ends its shares.
    fn take(&self, id: Id) -> Option<T> {
        let Held { tensor, tickets } = self.held.borrow_mut().remove(&id)?;
        tickets.iter().for_each(|ticket| self.around.end(ticket));
        Some(tensor)
    }
}

/// Returns who may write to memory that a framework may or may not write to.
pub(super) fn writing(access: Access) -> Writing {
    if access == Access::ReadOnly { Writing::Never } else { Writing::Shared }
}
