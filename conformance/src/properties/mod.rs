//! The properties that every pair of adapters has.

mod batch;
mod captured;
mod chain;
mod contents;
mod copies;
mod device;
mod elements;
mod failing;
mod failure;
mod graph;
mod growth;
mod huge;
mod least;
mod life;
mod many;
mod moves;
mod options;
mod order;
mod place;
mod profile;
mod raises;
mod subject;
mod table;
mod threads;
mod torn;
mod users;
mod watched;

pub(crate) use least::Tested;
pub(crate) use table::SUBJECT;
pub use table::{PROPERTIES, Property, WHOLE, property};

use crate::{Case, Coverage, Sides, Subject, Usage, words};
use bridge_core::{
    Adapter, Copies, Deferred, Device, DeviceBuffer, Error, ErrorKind, Failed, Flush, Options, Ordering, Plan, Profile,
    Result, Stream, Transfer, stats, transfer, transfer_all,
};
use std::cell::Cell;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Why a case failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// What was observed, and what was expected.
    pub message: String,
    /// The kind of the error, where the failure is an unexpected error.
    pub refused: Option<ErrorKind>,
    /// Whether no other case can be judged in this process: leases are still held, or memory is freed while it is used.
    pub is_last: bool,
}

impl Failure {
    /// A failure that is not an error of an adapter.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), refused: None, is_last: false }
    }

    /// The same failure, of what is named.
    pub(crate) fn about(self, what: &str) -> Self {
        Self { message: format!("{what}: {}", self.message), ..self }
    }

    /// A failure after which no other case can be judged.
    pub(crate) fn last(message: impl Into<String>) -> Self {
        Self { is_last: true, ..Self::new(message) }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let message = format!("an error that was not expected ({}): {error}", words::kind(error.kind()));
        Self { message, refused: Some(error.kind()), is_last: false }
    }
}

pub(crate) type Outcome = std::result::Result<(), Failure>;

macro_rules! ensure {
    ($condition:expr, $($text:tt)*) => {
        if !$condition {
            return Err($crate::properties::Failure::new(format!($($text)*)));
        }
    };
}
use ensure;

/// An ordered pair of subjects, and what orders their streams.
pub struct Pair<'a, F, T> {
    pub(crate) from: &'a dyn Subject<Tensor = F>,
    pub(crate) to: &'a dyn Subject<Tensor = T>,
    ordering: Arc<dyn Ordering>,
    /// Orders as `ordering`, and has no copies.
    without_copies: Arc<dyn Ordering>,
    /// Whether the copies of `ordering` are used, or the frameworks' own. Each case chooses.
    kernels: Cell<bool>,
    /// How the transfers of the current case ended.
    seen: Cell<Coverage>,
    pub(crate) native: Option<NativeMethod<'a, F, T>>,
    /// Another framework with the type of the target's tensors, through which tensors of the target go in a life.
    pub(crate) third: Option<&'a dyn Subject<Tensor = T>>,
    /// Another framework with the type of the source's tensors, whose tensors are converted together with those of the
    /// source.
    pub(crate) also: Option<&'a dyn Subject<Tensor = F>>,
    /// Whether a package that is built of the same adapters takes tensors across, within the process.
    pub(crate) by_package: bool,
    /// Takes a tensor of the source across; `None`: core's `transfer`.
    pub(crate) conversion_there: Option<Conversion<'a, F, T>>,
    /// Takes a tensor of the target back; `None`: core's `transfer`.
    pub(crate) conversion_back: Option<Conversion<'a, T, F>>,
}

bridge_core::debug_fields!(impl[F, T] Pair<'_, F, T>);

/// Takes a tensor across, with this ordering and the requested `copy`.
pub(crate) type Conversion<'a, F, T> = Box<dyn Fn(&F, &Arc<dyn Ordering>, Option<bool>) -> Result<(T, Transfer)> + 'a>;

/// An ordering without its copies.
struct WithoutCopies(Arc<dyn Ordering>);

#[deny(clippy::missing_trait_methods)]
// SAFETY: every method is that of the ordering inside, which has made the promises.
unsafe impl Ordering for WithoutCopies {
    forward! { 0:
        unsafe fn order(device: Device, earlier: Stream, later: Stream) -> Result<()>;
        unsafe fn order_across(earlier: (Device, Stream), later: (Device, Stream)) -> Result<()>;
        unsafe fn synchronize(device: Device, stream: Stream) -> Result<()>;
        unsafe fn release_later(device: Device, stream: Stream, buffer: Box<dyn DeviceBuffer>);
        unsafe fn release_all_later(device: Device, stream: Stream, buffers: Vec<Box<dyn DeviceBuffer>>);
        unsafe fn release_after_all_work(device: Device, stream: Stream, buffer: Box<dyn DeviceBuffer>);
        unsafe fn defer(device: Device, stream: Stream, attempt: Deferred);
        unsafe fn is_captured(device: Device, stream: Stream) -> Option<bool>;
    }

    forward! { 0:
        fn flush_later(flush: Flush);
    }

    fn copies(&self) -> Option<&dyn Copies> {
        None
    }
}

/// The frameworks' own method from one to the other; `None` where there is none.
type NativeMethod<'a, F, T> = Box<dyn Fn(&F) -> Option<Result<T>> + 'a>;

impl<'a, F, T> Pair<'a, F, T> {
    /// A source and a target, ordered as the source [says](Subject::ordering).
    pub fn new(from: &'a dyn Subject<Tensor = F>, to: &'a dyn Subject<Tensor = T>) -> Self {
        let ordering = from.ordering();
        let without_copies = Arc::new(WithoutCopies(Arc::clone(&ordering)));
        Self {
            from,
            to,
            ordering,
            without_copies,
            kernels: Cell::new(true),
            seen: Cell::default(),
            native: None,
            third: None,
            also: None,
            by_package: false,
            conversion_there: None,
            conversion_back: None,
        }
    }

    /// Orders the streams of the pair otherwise.
    #[must_use]
    pub(crate) fn with_ordering(self, ordering: Arc<dyn Ordering>) -> Self {
        let without_copies = Arc::new(WithoutCopies(Arc::clone(&ordering)));
        Self { ordering, without_copies, ..self }
    }

    /// Returns what the strategies need to know of the pair.
    pub fn sides(&self) -> Sides {
        Sides::of(self.from, self.to)
    }
}

/// What needs one type of tensor on both sides.
impl<'a, T> Pair<'a, T, T> {
    /// Lets a package take tensors across and back, instead of core.
    #[cfg(feature = "python")]
    pub(crate) fn by_package(self, there: Conversion<'a, T, T>, back: Conversion<'a, T, T>) -> Self {
        Self { by_package: true, conversion_there: Some(there), conversion_back: Some(back), ..self }
    }

    /// Adds the target's [own import](Subject::import_natively).
    #[must_use]
    pub fn with_native_method(self) -> Self {
        let to = self.to;
        let native: NativeMethod<'a, T, T> = Box::new(move |tensor| to.import_natively(tensor));
        Self { native: Some(native), also: self.also.or(Some(to)), ..self }
    }

    /// Adds a third framework, into which views of the target are imported, too. Its tensors are converted together
    /// with those of the source, if it has streams.
    #[must_use]
    pub fn with_third(self, third: Option<&'a dyn Subject<Tensor = T>>) -> Self {
        let also = third.filter(|third| !third.streams().is_empty()).or(self.also);
        Self { third, also, ..self }
    }
}

/// Time between two polls of memory that is not yet released.
const PAUSE: Duration = Duration::from_millis(1);

/// Returns the leases of this process that have not been released.
pub(crate) fn outstanding() -> u64 {
    let stats = stats();
    stats.leased.saturating_sub(stats.released)
}

/// A way of importing a tensor of the source into the target.
type Take<'a, F, T> = &'a dyn Fn(&F) -> Result<T>;

impl<F, T> Pair<'_, F, T> {
    /// Returns whether both frameworks can copy.
    fn frameworks_copy(&self) -> bool {
        self.from.capabilities().copies && self.to.capabilities().copies
    }

    /// Chooses who makes copies from now on: the kernels, or the frameworks where both can.
    fn copies_by(&self, kernels: bool) {
        self.kernels.set(kernels || self.by_package || !self.frameworks_copy());
    }

    fn ordering(&self) -> &Arc<dyn Ordering> {
        if self.kernels.get() { &self.ordering } else { &self.without_copies }
    }

    fn transfer(&self, tensor: &F, copy: Option<bool>) -> Result<(T, Transfer)> {
        let converted = match &self.conversion_there {
            Some(convert) => convert(tensor, self.ordering(), copy),
            None => transfer(self.from, self.to, tensor, self.ordering(), &Options::default().with_copy(copy)),
        };
        self.see(converted.as_ref().map(|(_, done)| done.plan).map_err(drop));
        converted
    }

    fn transfer_all(
        &self,
        tensors: &[(&dyn Subject<Tensor = F>, &F)],
        copy: Option<bool>,
    ) -> std::result::Result<Vec<T>, Failure> {
        let tensors: Vec<(&dyn Adapter<Tensor = F>, &F)> =
            tensors.iter().map(|(subject, tensor)| (*subject as _, *tensor)).collect();
        let (options, mut converted) = (Options::default().with_copy(copy), Ok(Vec::new()));
        self.from.together(&mut || converted = transfer_all(&tensors, self.to, self.ordering(), &options));
        match &converted {
            Ok(all) => all.iter().for_each(|(_, done)| self.see(Ok(done.plan))),
            Err(_) => self.see(Err(())),
        }
        let converted = converted.map_err(|Failed { index, error, .. }| {
            let failure = Failure::from(error);
            Failure { message: format!("tensor {index} of {}: {failure}", tensors.len()), ..failure }
        })?;
        Ok(converted.into_iter().map(|(view, _)| view).collect())
    }

    fn back(&self, tensor: &T, copy: Option<bool>) -> Result<(F, Transfer)> {
        let converted = match &self.conversion_back {
            Some(convert) => convert(tensor, self.ordering(), copy),
            None => transfer(self.to, self.from, tensor, self.ordering(), &Options::default().with_copy(copy)),
        };
        self.see(converted.as_ref().map(|(_, done)| done.plan).map_err(drop));
        converted
    }

    /// Records how a transfer of the current case ended.
    fn see(&self, ended: std::result::Result<Plan, ()>) {
        let mut seen = self.seen.get();
        match ended {
            Ok(Plan::ZeroCopy) => seen.in_place = 1,
            Ok(_) => seen.copied = 1,
            Err(()) => seen.refused = 1,
        }
        self.seen.set(seen);
    }

    /// Records that the current case has shown what its property is for.
    fn show(&self) {
        self.seen.set(Coverage { shown: 1, ..self.seen.get() });
    }

    /// Records how transfers of the current case ended that were made elsewhere.
    fn add_seen(&self, more: Coverage) {
        let mut seen = self.seen.get();
        seen.in_place |= more.in_place;
        seen.copied |= more.copied;
        self.seen.set(seen);
    }

    /// Returns how the transfers since the last call ended: 1 for each way that at least one took.
    pub(crate) fn take_seen(&self) -> Coverage {
        self.seen.take()
    }

    /// Makes the source's tensor. Returns it with the bytes of its base buffer.
    fn create(&self, case: &Case) -> Result<(F, Vec<u8>)> {
        let bytes = crate::model::random_bytes(&case.spec, case.seed);
        Ok((self.from.create(&case.spec, &bytes)?, bytes))
    }

    /// Returns the profiles of source and target.
    fn profiles(&self) -> (&Profile, &Profile) {
        (self.from.profile(), self.to.profile())
    }

    /// Returns the profiles of target and source, for the conversion back.
    fn profiles_back(&self) -> (&Profile, &Profile) {
        (self.to.profile(), self.from.profile())
    }

    fn streams(&self) -> Streams {
        let from = self.from.streams();
        // One framework has one current stream: both roles then mean the same streams.
        let same = self.from.profile().name == self.to.profile().name;
        Streams { to: if same { from.clone() } else { self.to.streams() }, from }
    }

    /// Settles both sides. Returns the bytes that their allocators then have in use.
    fn memory(&self) -> Result<(Option<usize>, Option<usize>)> {
        Ok((self.from.settle()?, self.to.settle()?))
    }

    /// Returns what this process uses, as both sides count it: each counts what it knows of.
    fn usage(&self) -> Result<Usage> {
        let (from, to) = (self.from.usage()?, self.to.usage()?);
        Ok(Usage { objects: to.objects.or(from.objects), resident: to.resident.or(from.resident) })
    }

    /// Waits until no more memory is in use than `before`, as [`memory`](Self::memory) has returned it.
    ///
    /// # Errors
    ///
    /// More is in use after the time that memory may take to be released.
    fn is_back(&self, before: (Option<usize>, Option<usize>)) -> Outcome {
        let started = Instant::now();
        loop {
            let after = self.memory()?;
            // Memory of earlier cases may be released meanwhile: less than before is not a failure of this one.
            if after.0 <= before.0 && after.1 <= before.1 {
                return Ok(());
            }
            let late = started.elapsed() >= self.patience();
            let told =
                |(from, to)| format!("{} of the source, {} of the target", words::in_use(from), words::in_use(to));
            ensure!(!late, "memory in use before: {}; after: {}", told(before), told(after));
            std::thread::sleep(PAUSE);
        }
    }

    /// Returns how long memory may take to be released.
    fn patience(&self) -> Duration {
        self.from.patience().max(self.to.patience())
    }

    /// Waits until at most `before` leases are outstanding. Every case waits for its own leases, so that none affects
    /// the next case.
    ///
    /// # Errors
    ///
    /// They were not released in time.
    pub(crate) fn returned(&self, before: u64) -> Outcome {
        let started = Instant::now();
        while outstanding() > before {
            // Collecting garbage may drop the last view.
            self.memory()?;
            let left = outstanding().saturating_sub(before);
            if left > 0 && started.elapsed() >= self.patience() {
                let text = format!("{left} leases of this case were not released within {:?}", self.patience());
                return Err(Failure::last(text));
            }
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// Waits until both devices are idle after a case that failed.
    pub(crate) fn recover(&self) {
        let _ = (self.from.settle(), self.to.settle(), self.from.check(), self.to.check());
    }
}

/// The streams of both sides, by the numbers of [`Picks`].
struct Streams {
    from: Vec<Stream>,
    to: Vec<Stream>,
}

impl Streams {
    fn pick(streams: &[Stream], number: usize) -> Option<Stream> {
        // A framework without further streams always works in its single one.
        number.checked_sub(1).and_then(|i| streams.get(i % streams.len().max(1))).copied()
    }

    fn from(&self, number: usize) -> Option<Stream> {
        Self::pick(&self.from, number)
    }

    fn to(&self, number: usize) -> Option<Stream> {
        Self::pick(&self.to, number)
    }
}

/// Runs `body` with `stream` as the current one of `subject`; `None` is the default one.
fn on<S, R>(
    subject: &dyn Subject<Tensor = S>,
    stream: Option<Stream>,
    body: impl FnOnce() -> std::result::Result<R, Failure>,
) -> std::result::Result<R, Failure> {
    let Some(stream) = stream else { return body() };
    let (mut body, mut result) = (Some(body), None);
    let mut run = || {
        result = body.take().map(|body| body());
        Ok(())
    };
    // SAFETY: the stream is one of the subject's: `Pair::streams` has chosen it.
    unsafe { subject.on_stream(stream, &mut run) }?;
    result.unwrap_or_else(|| Err(Failure::new("on_stream did not run its body")))
}

/// Runs `body` where both sides have chosen their current streams.
fn on_both<F, T, R>(
    pair: &Pair<'_, F, T>,
    from: Option<Stream>,
    to: Option<Stream>,
    body: impl FnOnce() -> std::result::Result<R, Failure>,
) -> std::result::Result<R, Failure> {
    on(pair.from, from, || on(pair.to, to, body))
}

/// Compares bit for bit.
fn same_bytes(what: &str, got: &[u8], want: &[u8]) -> Outcome {
    ensure!(got.len() == want.len(), "{what}: {} instead of {}", words::counted(got.len(), "byte"), want.len());
    if got == want {
        return Ok(());
    }
    if let Some(at) = got.iter().zip(want).position(|(got, want)| got != want) {
        let wrong = got.iter().zip(want).filter(|(got, want)| got != want).count();
        let (got, want, all) = (got[at], want[at], words::counted(want.len(), "byte"));
        let are = if wrong == 1 { "is" } else { "are" };
        let text = format!("{what}: {wrong} of {all} {are} wrong, the first at {at}: {got:#04x}, not {want:#04x}");
        return Err(Failure::new(text));
    }
    Ok(())
}

/// Compares a result with the [expected](crate::model::expected) outcome. Returns the tensor where it was converted.
fn as_expected<R>(got: Result<R>, expected: crate::model::Expected) -> std::result::Result<Option<R>, Failure> {
    use crate::model::Expected;
    match (got, expected) {
        (Ok(result), Expected::InPlace | Expected::Copied) => Ok(Some(result)),
        (Err(error), Expected::Refused(kind)) if error.kind() == kind => Ok(None),
        (Ok(_), Expected::Refused(kind)) => {
            Err(Failure::new(format!("converted; expected: {}", Expected::Refused(kind))))
        }
        (Err(error), Expected::Refused(kind)) => {
            let (got, want) = (words::kind(error.kind()), words::kind(kind));
            Err(Failure::new(format!("refused with the kind “{got}” instead of “{want}”: {error}")))
        }
        (Err(error), _) => Err(error.into()),
    }
}
