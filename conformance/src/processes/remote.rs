//! The framework of another process, as the process that judges sees it.

use super::flaw::{Astray, Flaw};
use super::serve::writing;
use super::wire::{Answer, Hello, Id, Made, Request, receive, send};
use super::{Around, held, in_place, shares};
use crate::properties::Conversion;
use crate::{Capabilities, Observed, Pair, Spec, Subject, model};
use bridge_core::{
    Adapter, Consumer, DType, Device, DeviceKind, Error, ErrorKind, Export, Offer, Options, Order, Ordering, Plan,
    Profile, Result, Stream, Transfer, plan, transfer,
};
use bridge_ipc::{Ipc, IpcTensor, Ticket, Writing};
use std::io::{Read, Write};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long a tensor that went to the other process may take to be returned, and the time between two looks.
const MOMENT: Duration = Duration::from_millis(20);
const PAUSE: Duration = Duration::from_micros(100);

/// How many delays of the framework, of a few milliseconds each, are one of this subject.
const DELAYS: usize = 16;

/// The number of memory that the other process does not have: the room for a copy that is made here.
const ALLOCATED: Id = 0;

/// A framework in another process, which [serves](super::serve()) it.
pub struct Remote {
    line: Arc<Line>,
    ordering: Arc<dyn Ordering>,
    profile: Profile,
    device: Device,
    can: Capabilities,
    streams: Vec<Stream>,
    ipc: Ipc,
    flaw: Option<Flaw>,
}

bridge_core::debug_fields!(impl[] Remote: device);

/// The channel to the other process.
struct Line {
    ends: Mutex<(Box<dyn Read + Send>, Box<dyn Write + Send>)>,
    around: Around,
}

impl Line {
    fn ask(&self, request: &Request, bytes: &[u8]) -> Result<(Answer, Vec<u8>)> {
        let answer = self.around.detached(|| {
            let (from, to) = &mut *self.ends.lock().unwrap_or_else(PoisonError::into_inner);
            send(to, request, bytes)?;
            receive(from)
        });
        match answer {
            Ok((Answer::Failed(kind, text), _)) => Err(Error::new(kind, text)),
            Ok(answer) => Ok(answer),
            Err(error) => {
                (self.around.ended)(&format!("the other process has ended: {error}"));
                Err(Error::new(ErrorKind::Gone, "the other process has ended"))
            }
        }
    }

    /// Asks for something without an answer.
    fn tell(&self, request: &Request, bytes: &[u8]) -> Result<()> {
        match self.ask(request, bytes)?.0 {
            Answer::Done => Ok(()),
            other => Err(unexpected(&other)),
        }
    }
}

fn unexpected(answer: &Answer) -> Error {
    Error::new(ErrorKind::Protocol, format!("the other process answers another question: {answer:?}"))
}

/// A tensor of the other process. A clone is another reference to it.
#[derive(Clone)]
pub struct RemoteTensor(Arc<Known>);

bridge_core::debug_fields!(impl[] RemoteTensor);

struct Known {
    id: Id,
    line: Arc<Line>,
    /// The same elements in this process, until the drop; `None` for memory of a device that this process has exported
    /// itself: what it opened would keep the other's view.
    local: Option<IpcTensor>,
    /// Address of the first element in this process, and in the other.
    here: usize,
    there: usize,
    /// The ticket by which it went there.
    given: Option<Ticket>,
    /// Whether the other process is to drop it on another thread.
    on_thread: AtomicBool,
    /// Bytes from the start of its memory to the first element, as far as the suite has chosen them.
    offset: usize,
    flaw: Option<Flaw>,
}

impl Drop for Known {
    fn drop(&mut self) {
        match (self.flaw, &self.local) {
            (Some(Flaw::LeaseLost), local) => std::mem::forget(local.clone()),
            (Some(Flaw::LeaseIgnored), Some(local)) => {
                let garbage = vec![1; local.layout().nbytes()];
                let _ = self.line.tell(&Request::Write(self.id), &garbage);
            }
            _ => (),
        }
        let dropped = if *self.on_thread.get_mut() { Request::DropOnThread(self.id) } else { Request::Drop(self.id) };
        // A process that has ended has dropped it.
        let _ = self.line.tell(&dropped, &[]);
        self.local = None;
        let Some(given) = &self.given else { return };
        let (around, before) = (self.line.around, shares());
        around.end(given);
        // It is returned at once, unless another view keeps it. Then the owner can reuse the memory, as it may.
        around.detached(|| {
            let until = Instant::now() + MOMENT;
            while shares() >= before && Instant::now() < until {
                std::thread::sleep(PAUSE);
            }
        });
    }
}

impl Remote {
    /// Greets the process at the other end. `name` is the one in reports, and `ordering` orders the streams of this
    /// process.
    ///
    /// # Errors
    ///
    /// The other process does not answer.
    pub fn new(
        name: &str,
        from: impl Read + Send + 'static,
        to: impl Write + Send + 'static,
        ordering: Arc<dyn Ordering>,
        around: Around,
    ) -> Result<Self> {
        let line = Arc::new(Line { ends: Mutex::new((Box::new(from), Box::new(to))), around });
        let Hello { profile, device, can, streams } = match line.ask(&Request::Hello, &[])?.0 {
            Answer::Hello(hello) => *hello,
            other => return Err(unexpected(&other)),
        };
        // Memory of the host is copied once to be moved there.
        let owns_memory = device.kind == DeviceKind::CPU;
        let profile = profile.with_name(name).with_owns_memory(owns_memory).with_devices(vec![device.kind]);
        // SAFETY: it is only a name here: the other process has the stream.
        let streams = streams.into_iter().map(|handle| unsafe { Stream::from_handle(handle) }).collect();
        // SAFETY: the processes use memory in turns, each after the answer of the other.
        let ipc = unsafe { Ipc::new() };
        // Its tensors come as copies in shared memory, which may be written to. It knows no stream of this process.
        let can = Capabilities { immutable: false, external_streams: false, ..can };
        Ok(Self { line, ordering, profile, device, can, streams, ipc, flaw: None })
    }

    /// Plants a flaw.
    #[must_use]
    pub fn with(self, flaw: Option<Flaw>) -> Self {
        Self { flaw, ..self }
    }

    /// Returns a pair with this framework as the target.
    pub fn after<'a, F>(&'a self, from: &'a dyn Subject<Tensor = F>) -> Pair<'a, F, RemoteTensor> {
        let mut pair = Pair::new(from, self);
        (pair.conversion_there, pair.conversion_back) = (self.conversion(from), self.conversion_out(from));
        pair
    }

    /// Returns a pair with this framework as the source.
    pub fn before<'a, T>(&'a self, to: &'a dyn Subject<Tensor = T>) -> Pair<'a, RemoteTensor, T> {
        let mut pair = Pair::new(self, to);
        (pair.conversion_there, pair.conversion_back) = (self.conversion_out(to), self.conversion(to));
        pair
    }

    /// Returns how tensors of the host go into the other process: as its users share them. `None`: by core, into
    /// [`import`](Adapter::import).
    fn conversion<'a, F>(&'a self, from: &'a dyn Subject<Tensor = F>) -> Option<Conversion<'a, F, RemoteTensor>> {
        let convert: Conversion<'a, F, RemoteTensor> =
            Box::new(|tensor, ordering, copy| self.take(from, tensor, ordering, copy));
        (self.device == Device::CPU).then_some(convert)
    }

    /// Returns how tensors of a device come out of the other process: as its users open them, who have room for copies.
    /// `None`: by core, from [`export`](Adapter::export).
    fn conversion_out<'a, T>(&'a self, to: &'a dyn Subject<Tensor = T>) -> Option<Conversion<'a, RemoteTensor, T>> {
        let convert: Conversion<'a, RemoteTensor, T> = Box::new(move |tensor, ordering, copy| {
            transfer(&Opening(self), to, tensor, ordering, &Options::default().with_copy(copy))
        });
        (self.device != Device::CPU).then_some(convert)
    }

    /// Copies a tensor of the host into a ticket, and has it opened by the other process.
    fn take<F>(
        &self,
        from: &dyn Adapter<Tensor = F>,
        tensor: &F,
        ordering: &Arc<dyn Ordering>,
        copy: Option<bool>,
    ) -> Result<(RemoteTensor, Transfer)> {
        let expected = plan(&from.export(tensor)?, &self.profile, &Options::default().with_copy(copy))?;
        let (ticket, done) = self.line.around.share(from, tensor, ordering, (Writing::Shared, Some(true)))?;
        let made = self.make(&Request::Open(ticket.text()), &[]);
        // What the other process has open stays its own.
        self.line.around.end(&ticket);
        // Of several reasons for the copy, the ticket knows one.
        let plan = if done.plan == Plan::ZeroCopy { done.plan } else { expected };
        let mut done = done;
        done.plan = plan;
        Ok((made?, done))
    }

    /// Asks for a tensor, and opens it here.
    fn make(&self, request: &Request, bytes: &[u8]) -> Result<RemoteTensor> {
        match self.line.ask(request, bytes)?.0 {
            Answer::Made(made) => self.open(made, None, request),
            other => Err(unexpected(&other)),
        }
    }

    fn open(&self, made: Made, given: Option<Ticket>, request: &Request) -> Result<RemoteTensor> {
        let offset = match request {
            Request::Create(spec) => spec.offset * model::itemsize(spec.dtype),
            _ => 0,
        };
        let local = self.opened(&made)?;
        Ok(self.known(made.id, (local.data(), made.address), Some(local), given, offset))
    }

    /// Opens a tensor of the other process here.
    fn opened(&self, made: &Made) -> Result<IpcTensor> {
        let text = made.ticket.as_ref().ok_or_else(|| Error::new(ErrorKind::Protocol, "a ticket is missing"))?;
        self.line.around.open(&text.parse()?)
    }

    fn known(
        &self,
        id: Id,
        (here, there): (usize, usize),
        local: Option<IpcTensor>,
        given: Option<Ticket>,
        offset: usize,
    ) -> RemoteTensor {
        let (line, on_thread, flaw) = (Arc::clone(&self.line), AtomicBool::new(false), self.flaw);
        RemoteTensor(Arc::new(Known { id, line, local, here, there, given, on_thread, offset, flaw }))
    }

    /// Waits until copies that were made of a tensor here have been read: who writes next is for the processes to agree
    /// on, and the suite does so by waiting.
    fn copied(&self, tensor: &RemoteTensor) -> Result<()> {
        let exported = self.exported(tensor)?;
        let Some(stream) = exported.buffer().stream() else { return Ok(()) };
        // SAFETY: by the contract of `DeviceBuffer` the stream is alive as long as the export.
        self.line.around.detached(|| unsafe { self.ordering.synchronize(exported.device(), stream) })
    }

    /// Asks for a change of `tensor`, which another may replace.
    fn change(&self, tensor: &mut RemoteTensor, request: &Request) -> Result<()> {
        match self.line.ask(request, &[])?.0 {
            Answer::Done => Ok(()),
            Answer::Made(made) => self.open(made, None, request).map(|made| *tensor = made),
            other => Err(unexpected(&other)),
        }
    }

    /// Returns the tensor as this process sees it.
    fn exported(&self, tensor: &RemoteTensor) -> Result<Export> {
        match &tensor.0.local {
            Some(local) if self.device.kind == DeviceKind::CPU || tensor.0.id == ALLOCATED => self.ipc.export(local),
            // Each ticket is ordered after what the other process has submitted until it is opened.
            _ => match self.line.ask(&Request::Share(tensor.0.id), &[])?.0 {
                Answer::Made(made) => self.ipc.export(&self.opened(&made)?),
                other => Err(unexpected(&other)),
            },
        }
    }

    /// Runs `body` between a request and its end.
    fn within(&self, enter: &Request, body: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        self.line.tell(enter, &[])?;
        let result = body();
        self.line.tell(&Request::Leave, &[]).and(result)
    }
}

// SAFETY: the other process keeps the memory for as long as its ticket is open.
unsafe impl Adapter for Remote {
    type Tensor = RemoteTensor;

    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        let sound = self.ipc.consumer();
        match self.flaw {
            Some(Flaw::EventSkippedThere | Flaw::ReturnSkipped) => Arc::new(Astray::new(sound)),
            _ => sound,
        }
    }

    fn export(&self, tensor: &RemoteTensor) -> Result<Export> {
        let exported = self.exported(tensor)?;
        match self.flaw {
            Some(flaw) => flaw.spoil(exported, tensor.0.offset),
            None => Ok(exported),
        }
    }

    fn import(&self, offer: Offer) -> Result<RemoteTensor> {
        if let (Some(Flaw::ReturnSkipped), Some(stream)) =
            (self.flaw, self.ipc.consumer().current_stream(offer.device())?)
        {
            // SAFETY: the streams are a default stream, and the one that the adapter works in.
            unsafe { self.ordering.order(offer.device(), Astray::STREAM, stream) }?;
        }
        let offer = match self.flaw {
            // SAFETY: it takes the same tensors. The flaw is planted in its streams, which belong to the suite.
            Some(_) => unsafe { offer.trusted() },
            None => offer,
        };
        let tensor = self.ipc.import(offer)?;
        let how = (writing(tensor.access()), in_place(tensor.layout()));
        let (ticket, _) = self.line.around.share(&self.ipc, &tensor, &self.ordering, how)?;
        let request = Request::Open(ticket.text());
        match self.line.ask(&request, &[])?.0 {
            Answer::Made(made) if made.ticket.is_none() => {
                Ok(self.known(made.id, (tensor.data(), made.address), None, Some(ticket), 0))
            }
            Answer::Made(made) => self.open(made, Some(ticket), &request),
            other => Err(unexpected(&other)),
        }
    }

    fn compact(&self, _: &RemoteTensor) -> Result<RemoteTensor> {
        Err(Error::new(ErrorKind::CopyNeeded, "copies are made in the process that takes them"))
    }

    /// Makes memory of the host. On a device the framework would not wait for what this process writes into it.
    unsafe fn empty(&self, device: Device, dtype: DType, shape: &[i64], order: Order) -> Result<RemoteTensor> {
        if (device, self.device, order) != (Device::CPU, Device::CPU, Order::RowMajor) {
            let text = "the other process makes row-major memory of the host only";
            return Err(Error::new(ErrorKind::CopyNeeded, text));
        }
        self.make(&Request::Empty(dtype, shape.into()), &[])
    }
}

/// The same framework to those who open its tensors: what is to be copied on a device has room in this process.
struct Opening<'a>(&'a Remote);

// SAFETY: the other process keeps the memory for as long as its ticket is open.
unsafe impl Adapter for Opening<'_> {
    type Tensor = RemoteTensor;

    fn profile(&self) -> &Profile {
        self.0.profile()
    }

    fn consumer(&self) -> Arc<dyn Consumer> {
        self.0.consumer()
    }

    fn export(&self, tensor: &RemoteTensor) -> Result<Export> {
        self.0.export(tensor)
    }

    fn import(&self, offer: Offer) -> Result<RemoteTensor> {
        self.0.import(offer)
    }

    fn compact(&self, tensor: &RemoteTensor) -> Result<RemoteTensor> {
        self.0.compact(tensor)
    }

    unsafe fn empty(&self, device: Device, dtype: DType, shape: &[i64], order: Order) -> Result<RemoteTensor> {
        // SAFETY: the caller's obligation.
        let allocation = unsafe { self.0.ipc.empty(device, dtype, shape, order) }?;
        Ok(self.0.known(ALLOCATED, (allocation.data(), allocation.data()), Some(allocation), None, 0))
    }
}

impl Subject for Remote {
    fn device(&self) -> Device {
        self.device
    }

    fn capabilities(&self) -> Capabilities {
        self.can.clone()
    }

    fn ordering(&self) -> Arc<dyn Ordering> {
        Arc::clone(&self.ordering)
    }

    fn create(&self, spec: &Spec, bytes: &[u8]) -> Result<RemoteTensor> {
        self.make(&Request::Create(spec.clone()), bytes)
    }

    fn observe(&self, tensor: &RemoteTensor) -> Result<Observed> {
        match self.line.ask(&Request::Observe(tensor.0.id), &[])?.0 {
            Answer::Observed(seen) => {
                let here = tensor.0.here.wrapping_add(seen.address).wrapping_sub(tensor.0.there);
                Ok(Observed { address: here, ..seen })
            }
            other => Err(unexpected(&other)),
        }
    }

    fn read(&self, tensor: &RemoteTensor) -> Result<Vec<u8>> {
        match self.line.ask(&Request::Read(tensor.0.id), &[])? {
            (Answer::Elements, bytes) => Ok(bytes),
            (other, _) => Err(unexpected(&other)),
        }
    }

    fn write(&self, tensor: &RemoteTensor, bytes: &[u8]) -> Result<()> {
        self.copied(tensor)?;
        self.line.tell(&Request::Write(tensor.0.id), bytes)
    }

    fn fill(&self, tensor: &mut RemoteTensor, byte: u8) -> Result<()> {
        let request = Request::Fill(tensor.0.id, byte);
        self.change(tensor, &request)
    }

    fn allocate(&self, nbytes: usize) -> Result<RemoteTensor> {
        self.make(&Request::Allocate(nbytes), &[])
    }

    fn snapshot(&self, from: &RemoteTensor, into: &mut RemoteTensor) -> Result<()> {
        let request = Request::Snapshot { from: from.0.id, into: into.0.id };
        self.change(into, &request)
    }

    fn share(&self, tensor: &RemoteTensor) -> RemoteTensor {
        tensor.clone()
    }

    fn drop_on_thread(&self, tensor: RemoteTensor) {
        if Arc::strong_count(&tensor.0) == 1 {
            tensor.0.on_thread.store(true, Relaxed);
        }
    }

    fn streams(&self) -> Vec<Stream> {
        self.streams.clone()
    }

    unsafe fn on_stream(&self, stream: Stream, body: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        if !self.streams.contains(&stream) {
            let text = format!("{stream} is not a stream of the other process: choose one that it has named");
            return Err(Error::new(ErrorKind::Argument, text));
        }
        self.within(&Request::Enter(stream.handle()), body)
    }

    fn on_fresh_stream(&self, external: bool, body: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        self.within(&Request::EnterFresh { external }, body)
    }

    fn note(&self, view: &RemoteTensor) -> Result<()> {
        self.line.tell(&Request::Note(view.0.id), &[])
    }

    /// Delays for longer than a tensor may take to be returned. Otherwise the work would be over before its memory is
    /// reused, whether it is waited for or not.
    fn delay(&self) -> Result<()> {
        (0..DELAYS).try_for_each(|_| self.line.tell(&Request::Delay, &[]))
    }

    /// On a device one on the tensor that goes there, and one on its share.
    fn leases(&self) -> u64 {
        if self.device == Device::CPU { 1 } else { 2 }
    }

    /// Also counts what either process shares with the other: a lease that is never returned stays in use.
    fn settle(&self) -> Result<Option<usize>> {
        match self.line.ask(&Request::Settle, &[])?.0 {
            Answer::Used(used) => Ok(Some(used + held())),
            other => Err(unexpected(&other)),
        }
    }

    fn check(&self) -> Result<()> {
        self.line.tell(&Request::Check, &[])
    }
}
