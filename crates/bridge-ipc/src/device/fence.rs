//! Order across two processes: words in a page of host memory that both map.
//!
//! The stream of one process writes a word, and that of the other waits for the value. Each counts its own words up, so
//! a word that has moved on covers more work, never less. If a process ends before its work has run, the other one
//! writes its words itself ([`watch`]): an event of a killed process would never fire.

use super::closer::defer;
use super::page::{PAGE, Page, RELEASED, Role, WORDS};
use super::watch::{forget, watch};
use super::{AfterWork, Then};
use crate::channel::broken;
use crate::memory::{self, Mapping, Writing};
use crate::wire::{Point, Uuid};
use bridge_core::{Device, Error, ErrorKind, Ordering, Result, Stream};
use bridge_cuda::Words;
use rustix::fd::OwnedFd;
use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::Arc;

/// What pages are registered and ordered with.
#[derive(Clone)]
pub(super) struct Tools {
    pub(super) words: &'static dyn Words,
    pub(super) ordering: Arc<dyn Ordering>,
}

/// A stream, with what names its device in every process.
#[derive(Debug, Clone, Copy)]
pub(super) struct At {
    pub(super) uuid: Uuid,
    pub(super) device: Device,
    pub(super) stream: Stream,
}

/// A page that is registered with the driver.
struct Registered {
    page: Arc<Page>,
    device: Device,
    words: &'static dyn Words,
}

impl Registered {
    fn new(page: Page, device: Device, words: &'static dyn Words) -> Result<Self> {
        // SAFETY: `drop` keeps the page until it has ended the registration.
        unsafe { words.register(device, &page.bytes()) }.map_err(|error| {
            let text = "the driver does not order work here by words of host memory: share a copy on the host";
            Error::new(ErrorKind::Driver, text).caused_by(error)
        })?;
        Ok(Self { page: Arc::new(page), device, words })
    }
}

impl Deref for Registered {
    type Target = Arc<Page>;

    fn deref(&self) -> &Arc<Page> {
        &self.page
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let (page, device, words) = (Arc::clone(&self.page), self.device, self.words);
        defer(move || {
            // SAFETY: `new` has registered it for this device. Its work has run: `Fences::drop` keeps the page until
            // then.
            unsafe { words.unregister(device, page.bytes().start) };
            drop(page);
            forget();
        });
    }
}

/// One end of the page of a connection.
pub(super) struct Fences {
    page: Arc<Registered>,
    role: Role,
    tools: Tools,
    /// The devices of the page by their numbers, each with the last value of its word at this end.
    devices: BTreeMap<usize, (At, u64)>,
}

impl Fences {
    /// Makes a page, for a connection from this process. Returns its file as well.
    ///
    /// # Errors
    ///
    /// Those of the system, and of a driver that cannot use words on this device.
    pub(super) fn make(tools: Tools, at: &At, process: Option<&Arc<OwnedFd>>) -> Result<(Self, OwnedFd)> {
        let (file, mapping) = memory::create(PAGE)?;
        let file = memory::seal(file, Writing::Shared)?;
        let mut made = Self::of(Arc::new(mapping), Role::Exporter, tools, at, process)?;
        made.devices.insert(0, (*at, 0));
        // SAFETY: see `point`. The value is that of the word already: the driver shows whether it can write one.
        unsafe { made.tools.words.write(at.device, at.stream, made.page.address(0), 0) }?;
        Ok((made, file))
    }

    /// Opens the page that came from the process at the other end.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Protocol`] for a page that is too short or may be shortened, and those of [`make`](Self::make).
    pub(super) fn open(tools: Tools, file: &OwnedFd, at: &At, process: Option<&Arc<OwnedFd>>) -> Result<Self> {
        Self::of(memory::open(file, PAGE, Writing::Shared)?, Role::Importer, tools, at, process)
    }

    fn of(mapping: Arc<Mapping>, role: Role, tools: Tools, at: &At, process: Option<&Arc<OwnedFd>>) -> Result<Self> {
        let page = Registered::new(Page::new(mapping), at.device, tools.words)?;
        process.map_or(Ok(()), |process| watch(process, &page, role.other()))?;
        Ok(Self { page: Arc::new(page), role, tools, devices: BTreeMap::new() })
    }

    /// Returns a point after all work that is now in a stream of this end. An importer has points on the devices for
    /// which it has waited.
    pub(super) fn point(&mut self, at: &At) -> Result<Point> {
        let number = self.number(at)?;
        let (_, value) = self.devices.entry(number).or_insert((*at, 0));
        *value += 1;
        let (word, value) = (2 * number + self.role.word(), *value);
        // SAFETY: the page is registered, and `drop` keeps it until the work now in the stream has run, which lives as long
        // as the process. The host uses its words atomically.
        unsafe { self.tools.words.write(at.device, at.stream, self.page.address(word), value) }?;
        Ok(Point::Word { device: at.uuid, word, value })
    }

    /// Returns the point of an exporter for which nothing waits. It tells the importer which words are the device's.
    pub(super) fn reached(&mut self, at: &At) -> Result<Point> {
        let number = self.number(at)?;
        self.devices.entry(number).or_insert((*at, 0));
        Ok(Point::Word { device: at.uuid, word: 2 * number + self.role.word(), value: 0 })
    }

    /// Returns the number of a device on the page, which an exporter gives it.
    fn number(&self, at: &At) -> Result<usize> {
        let known = self.devices.iter().find(|(_, (known, _))| known.uuid == at.uuid);
        match (known, self.role) {
            (Some((number, _)), _) => Ok(*number),
            (None, Role::Exporter) if self.devices.len() < WORDS / 2 => Ok(self.devices.len()),
            (None, Role::Exporter) => Err(Error::new(ErrorKind::Device, "a page of words has no room for a device")),
            (None, Role::Importer) => Err(broken("it has shared memory of a device without a point")),
        }
    }

    /// Makes a stream of this end wait for a point of the other one.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Protocol`] for a word that is not the other end's or not that of the device, and for a value that
    /// no count reaches. An exporter numbers the devices, so only its words may be new, and one with the value 0 is
    /// reached.
    pub(super) fn wait(&mut self, at: &At, word: usize, value: u64) -> Result<()> {
        let number = word / 2;
        let is_complete = self.role == Role::Importer && value == 0;
        let counted = is_complete || (1..RELEASED).contains(&value);
        let theirs = word < WORDS && word % 2 == self.role.other().word() && counted;
        let is_it = |(of, (known, _)): (&usize, &(At, u64))| *of == number && known.uuid == at.uuid;
        let is_other = |(of, (known, _)): (&usize, &(At, u64))| *of == number || known.uuid == at.uuid;
        let known = self.devices.iter().any(is_it);
        let is_new = self.role == Role::Importer && !self.devices.iter().any(is_other);
        if !theirs || !(known || is_new) {
            return Err(broken("a point has a word or a value that its process may not write"));
        }
        self.devices.entry(number).or_insert((*at, 0));
        if is_complete {
            return Ok(());
        }
        // SAFETY: see `point`.
        unsafe { self.tools.words.wait(at.device, at.stream, self.page.address(word), value) }
    }
}

impl Drop for Fences {
    fn drop(&mut self) {
        for (At { device, stream, .. }, _) in self.devices.values() {
            let keeps = AfterWork { device: *device, then: Then::Drop(Arc::clone(&self.page) as _) };
            // SAFETY: the streams of this end live as long as the process.
            unsafe { self.tools.ordering.release_later(*device, *stream, Box::new(keeps)) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::watch::watched;
    use super::*;
    use crate::wire::Hex;
    use bridge_core::DeviceBuffer;
    use proptest::prelude::*;
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
    use rustix::process::{Pid, PidfdFlags, pidfd_open};
    use std::ops::Range;
    use std::process::{Child, Command, Stdio};
    use std::sync::atomic::Ordering::{Acquire, Relaxed};
    use std::sync::{Mutex, MutexGuard};
    use std::time::{Duration, Instant};

    /// What was asked of the driver: whether to wait, the stream, the address, and the value.
    type Asked = (bool, Stream, usize, u64);

    /// A driver without a device, which may refuse a call. What is written stays undone until [`Fake::run`].
    #[derive(Default)]
    struct Fake {
        registered: Mutex<Vec<Range<usize>>>,
        asked: Mutex<Vec<Asked>>,
        released: Mutex<Vec<(Stream, Box<dyn DeviceBuffer>)>>,
        refused: &'static str,
    }

    fn got<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        mutex.lock().unwrap()
    }

    impl Fake {
        fn outcome(&self, call: &str) -> Result<()> {
            let failed = || Error::new(ErrorKind::Driver, format!("{call} failed"));
            if self.refused == call { Err(failed()) } else { Ok(()) }
        }

        fn ask(&self, call: &str, asked: Asked) -> Result<()> {
            let is_registered = got(&self.registered).iter().any(|bytes| bytes.contains(&asked.2));
            assert!(is_registered, "a word is used that is not registered");
            self.outcome(call)?;
            got(&self.asked).push(asked);
            Ok(())
        }

        /// Returns what was asked since the last time.
        fn taken(&self) -> Vec<Asked> {
            std::mem::take(&mut *got(&self.asked))
        }
    }

    impl Words for Fake {
        unsafe fn register(&self, _: Device, bytes: &Range<usize>) -> Result<()> {
            self.outcome("register")?;
            got(&self.registered).push(bytes.clone());
            Ok(())
        }

        unsafe fn unregister(&self, _: Device, start: usize) {
            got(&self.registered).retain(|bytes| bytes.start != start);
        }

        unsafe fn write(&self, _: Device, stream: Stream, word: usize, value: u64) -> Result<()> {
            self.ask("write", (false, stream, word, value))
        }

        unsafe fn wait(&self, _: Device, stream: Stream, word: usize, value: u64) -> Result<()> {
            self.ask("wait", (true, stream, word, value))
        }
    }

    struct Releases(&'static Fake);

    // SAFETY: it orders nothing, and no stream has work.
    unsafe impl Ordering for Releases {
        unsafe fn order(&self, _: Device, _: Stream, _: Stream) -> Result<()> {
            Ok(())
        }

        unsafe fn release_later(&self, _: Device, stream: Stream, buffer: Box<dyn DeviceBuffer>) {
            got(&self.0.released).push((stream, buffer));
        }
    }

    fn fake(refused: &'static str) -> &'static Fake {
        Box::leak(Box::new(Fake { refused, ..Fake::default() }))
    }

    fn tools(fake: &'static Fake) -> Tools {
        Tools { words: fake, ordering: Arc::new(Releases(fake)) }
    }

    fn at(device: u8) -> At {
        // SAFETY: no driver sees this stream.
        let stream = unsafe { Stream::from_handle(0xa0 + u64::from(device)) };
        At { uuid: Hex([device; 16]), device: Device::cuda(device.into()), stream }
    }

    /// A process that waits to be killed, and what becomes readable when it ends.
    fn process() -> (Child, Arc<OwnedFd>) {
        let child = Command::new("sleep").arg("100").stdin(Stdio::null()).spawn().unwrap();
        let process = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).unwrap();
        (child, Arc::new(process))
    }

    /// The exporter's end of a page and the importer's, with their own drivers, and the processes at the other ends.
    fn ends(processes: [Option<&Arc<OwnedFd>>; 2]) -> [(Fences, &'static Fake); 2] {
        let (exports, imports) = (fake(""), fake(""));
        let (exporter, file) = Fences::make(tools(exports), &at(1), processes[0]).unwrap();
        let importer = Fences::open(tools(imports), &file, &at(1), processes[1]).unwrap();
        exports.taken();
        [(exporter, exports), (importer, imports)]
    }

    fn word_and_value(point: Point) -> (usize, u64) {
        let Point::Word { word, value, .. } = point else { panic!("{point:?}") };
        (word, value)
    }

    fn eventually(what: &str, condition: impl Fn() -> bool) {
        let start = Instant::now();
        while !condition() {
            assert!(start.elapsed() < Duration::from_secs(20), "still not true after 20 s: {what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn kind(result: Result<()>) -> Option<ErrorKind> {
        result.err().map(|error| error.kind())
    }

    #[test]
    fn each_side_counts_its_own_words() {
        let [(mut exporter, exports), (mut importer, imports)] = ends([None; 2]);
        let given = [1, 1, 2].map(|device| word_and_value(exporter.point(&at(device)).unwrap()));
        assert_eq!(given, [(0, 1), (0, 2), (2, 1)]);
        let start = exporter.page.address(0);
        let written = [(false, at(1).stream, start, 1), (false, at(1).stream, start, 2)];
        assert_eq!(exports.taken()[..2], written);
        for ((word, value), device) in given.into_iter().zip([1, 1, 2]) {
            importer.wait(&at(device), word, value).unwrap();
        }
        let start = importer.page.address(0);
        assert_eq!(imports.taken()[2], (true, at(2).stream, start + 16, 1));
        let back = [2, 1, 1].map(|device| word_and_value(importer.point(&at(device)).unwrap()));
        assert_eq!(back, [(3, 1), (1, 1), (1, 2)]);
        exporter.wait(&at(2), 3, 1).unwrap();
        assert_eq!(importer.point(&at(3)).unwrap_err().kind(), ErrorKind::Protocol, "it has waited for no point there");
        // What one side writes, the other side sees.
        exporter.page.word(2).store(7, Relaxed);
        assert_eq!(importer.page.word(2).load(Relaxed), 7);
    }

    /// The importer knows its word from a point that is reached, and nothing waits.
    #[test]
    fn a_point_that_is_reached_tells_the_word_alone() {
        let [(mut exporter, exports), (mut importer, imports)] = ends([None; 2]);
        let given = [1, 2].map(|device| word_and_value(exporter.reached(&at(device)).unwrap()));
        assert_eq!(given, [(0, 0), (2, 0)]);
        for ((word, value), device) in given.into_iter().zip([1, 2]) {
            importer.wait(&at(device), word, value).unwrap();
        }
        assert_eq!((exports.taken().len(), imports.taken().len()), (0, 0));
        assert_eq!(word_and_value(importer.point(&at(2)).unwrap()), (3, 1));
        assert_eq!(word_and_value(exporter.point(&at(2)).unwrap()), (2, 1));
    }

    #[test]
    fn only_the_words_and_values_of_the_other_side_are_waited_for() {
        let [(mut exporter, exports), (mut importer, imports)] = ends([None; 2]);
        importer.wait(&at(1), 0, 1).unwrap();
        exports.taken();
        imports.taken();
        let highest = RELEASED - 1;
        for (device, word, value) in [
            (1, 0, 1),
            (1, 3, 1),
            (2, 1, 1),
            (2, 3, 1),
            (1, WORDS + 1, 1),
            (1, usize::MAX, 1),
            (1, 1, 0),
            (1, 1, RELEASED),
            (1, 1, u64::MAX),
        ] {
            let refused = kind(exporter.wait(&at(device), word, value));
            assert_eq!(refused, Some(ErrorKind::Protocol), "{device} {word} {value}");
        }
        for (device, word, value) in
            [(1, 1, 1), (1, 2, 1), (2, 0, 1), (2, 3, 1), (2, WORDS, 1), (1, 1, 0), (1, 0, RELEASED)]
        {
            let refused = kind(importer.wait(&at(device), word, value));
            assert_eq!(refused, Some(ErrorKind::Protocol), "{device} {word} {value}");
        }
        assert_eq!((exports.taken().len(), imports.taken().len()), (0, 0));
        exporter.wait(&at(1), 1, highest).unwrap();
        importer.wait(&at(1), 0, highest).unwrap();
        importer.wait(&at(2), WORDS - 2, 1).unwrap();
    }

    proptest! {
        /// Whatever points come: no wait is for a word of this side, outside of the page, or for a value that is not
        /// released in the end, and a device keeps its word.
        #[test]
        fn hostile_points_are_refused(
            exports in any::<bool>(),
            points in prop::collection::vec((0u8..4, prop_oneof![0usize..8, any::<usize>()], any::<u64>()), 1..20),
        ) {
            let [exporter, importer] = ends([None; 2]);
            let ((mut end, fake), own) = if exports { (exporter, 0) } else { (importer, 1) };
            let (mut words, start) = (BTreeMap::new(), end.page.address(0));
            for (device, word, value) in points {
                if end.wait(&at(device), word, value).is_ok() && (exports || value > 0) {
                    let Some((true, _, address, asked)) = fake.taken().pop() else { panic!("nothing was asked") };
                    prop_assert_eq!(((address - start) / 8, asked), (word, value));
                    prop_assert!(word < WORDS && word % 2 != own && (1..RELEASED).contains(&value));
                    prop_assert_eq!(*words.entry(device).or_insert(word), word);
                }
            }
            let mut numbers: Vec<_> = words.values().collect();
            numbers.sort_unstable();
            numbers.dedup();
            prop_assert_eq!(numbers.len(), words.len(), "two devices have one word");
        }
    }

    #[test]
    fn a_page_that_could_vanish_is_refused() {
        let file = |nbytes, seals| {
            let file = memfd_create(c"hostile", MemfdFlags::ALLOW_SEALING).unwrap();
            ftruncate(&file, nbytes).unwrap();
            fcntl_add_seals(&file, seals).unwrap();
            file
        };
        let page = PAGE as u64;
        for (file, expected) in [
            (file(page, SealFlags::empty()), Some(ErrorKind::Protocol)),
            (file(page - 1, SealFlags::SHRINK), Some(ErrorKind::Protocol)),
            (std::fs::File::open("/dev/zero").unwrap().into(), Some(ErrorKind::Protocol)),
            (file(page, SealFlags::SHRINK | SealFlags::WRITE), Some(ErrorKind::Denied)),
            (file(page, SealFlags::SHRINK), None),
        ] {
            let fake = fake("");
            let opened = Fences::open(tools(fake), &file, &at(1), None);
            assert_eq!(got(&fake.registered).is_empty(), expected.is_some());
            assert_eq!(kind(opened.map(drop)), expected);
        }
    }

    #[test]
    fn a_driver_without_words_is_found_when_the_page_is_made() {
        for refused in ["register", "write"] {
            let fake = fake(refused);
            assert_eq!(kind(Fences::make(tools(fake), &at(1), None).map(drop)), Some(ErrorKind::Driver), "{refused}");
            got(&fake.released).clear();
            eventually("nothing is registered", || got(&fake.registered).is_empty());
        }
    }

    #[test]
    fn a_page_has_two_words_for_each_device() {
        let [(mut exporter, _), _] = ends([None; 2]);
        let mut reached = |device: usize| {
            let mut uuid = [0; 16];
            uuid[..8].copy_from_slice(&device.to_le_bytes());
            exporter.reached(&At { uuid: Hex(uuid), ..at(1) }).map(word_and_value)
        };
        // It was made for another one.
        for device in 1..WORDS / 2 {
            assert_eq!(reached(device).unwrap(), (2 * device, 0));
        }
        assert_eq!(reached(WORDS / 2).unwrap_err().kind(), ErrorKind::Device, "there is no room");
    }

    /// Each side waits for a process that is killed before its work has run. It waits for others as before.
    #[test]
    fn the_words_of_a_process_are_released_when_it_has_ended() {
        let ((mut child, process), (mut other, lives)) = (process(), process());
        let [(kept, _), _] = ends([Some(&lives), None]);
        // The process at the other end of each page, one that shares and one that opens.
        let [(exporter, _), _] = ends([Some(&process), None]);
        let [_, (importer, _)] = ends([None, Some(&process)]);
        let words = |end: &Fences| [0, 1, 2, WORDS - 2, WORDS - 1].map(|word| end.page.word(word).load(Acquire));
        for end in [&exporter, &importer] {
            end.page.word(0).store(5, Relaxed);
            end.page.word(1).store(6, Relaxed);
        }
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!([words(&exporter), words(&importer)], [[5, 6, 0, 0, 0]; 2], "it lives");
        child.kill().unwrap();
        eventually("its words are released", || words(&exporter) == [5, RELEASED, 0, 0, RELEASED]);
        eventually("its words are released", || words(&importer) == [RELEASED, 6, RELEASED, RELEASED, 0]);
        eventually("it is watched no more", || watched(&process) == 0);
        assert_eq!((watched(&lives), words(&kept)), (1, [0; 5]));
        other.kill().unwrap();
        eventually("the words of the other are released", || words(&kept) == [0, RELEASED, 0, 0, RELEASED]);
        for mut child in [child, other] {
            child.wait().unwrap();
        }
    }

    #[test]
    fn a_page_that_is_gone_is_watched_no_more() {
        let (mut child, process) = process();
        let ends = ends([Some(&process); 2]);
        assert_eq!(watched(&process), 2);
        // The thread has heard of them.
        std::thread::sleep(Duration::from_millis(50));
        for (end, fake) in ends {
            drop(end);
            got(&fake.released).clear();
        }
        eventually("it is forgotten", || watched(&process) == 0);
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn only_the_words_of_the_other_side_are_released() {
        for exports in [true, false] {
            let [(exporter, _), (importer, _)] = ends([None; 2]);
            let (end, own) = if exports { (exporter, 0) } else { (importer, 1) };
            end.page.release(end.role.other());
            let released = (0..WORDS).filter(|word| end.page.word(*word).load(Relaxed) == RELEASED);
            assert!(released.eq((1 - own..WORDS).step_by(2)), "{exports}");
        }
    }

    /// Also where its connection has ended before: work of its process may still be under way, and then the process is
    /// killed.
    #[test]
    fn a_page_is_kept_until_the_work_in_its_streams_has_run() {
        let (mut child, process) = process();
        let [(mut exporter, exports), (importer, _)] = ends([Some(&process); 2]);
        exporter.point(&at(2)).unwrap();
        exporter.wait(&at(1), 1, 1).unwrap();
        drop(exporter);
        let streams: Vec<_> = got(&exports.released).iter().map(|(stream, _)| *stream).collect();
        assert_eq!(streams, [at(1).stream, at(2).stream]);
        assert_eq!(got(&exports.registered).len(), 1);
        assert_eq!(importer.page.word(1).load(Acquire), 0, "the process lives");
        child.kill().unwrap();
        eventually("the word is released", || importer.page.word(1).load(Acquire) == RELEASED);
        got(&exports.released).pop();
        std::thread::sleep(Duration::from_millis(400));
        assert_eq!(got(&exports.registered).len(), 1, "the other stream has work");
        got(&exports.released).clear();
        eventually("it is registered no more", || got(&exports.registered).is_empty());
        child.wait().unwrap();
    }
}
