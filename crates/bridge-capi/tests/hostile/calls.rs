//! A program whose lines are calls of the C functions, such as `memory 0 shape 4`, `transfer 0 1 copy 2` and `drop 0`.
//!
//! The number after a call names a slot. Each call returns a status, never the one of a panic, and writes a result only
//! where it succeeds. In the end each owner was released once, and all that was leased has been returned. The program
//! keeps the promises that C cannot check: its pointers are null, or what the header says.

use super::interface::*;
use super::managed::{Made, Owner, delete_legacy, delete_versioned, release};
use bridge_capi as _;
use bridge_fuzz::{Fields, compact, extent};
use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr::{null, null_mut, with_exposed_provenance_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::time::{Duration, Instant};

/// Words of the memory that tensors lie in, and the byte of it that they usually begin at.
const CAPACITY: usize = 64;
const MIDDLE: u64 = 256;

/// Slots of each kind, calls of a program, and dimensions of a tensor.
const SLOTS: usize = 4;
const MOST_CALLS: usize = 64;
const MAX_NDIM: usize = 64;

/// The most elements that are read.
const MOST: i128 = 4096;

/// Time for what another thread does.
const PATIENCE: Duration = Duration::from_secs(20);

/// The statuses of a panic, and the last one.
const PANIC: i32 = 15;
const LAST: i32 = 21;

/// The statuses of transfers that a plan does not foresee: there is no driver, it fails, or another process has taken
/// the memory back.
const UNFORESEEN: [i32; 3] = [12, 13, 20];

/// What an output holds before a call.
const UNTOUCHED: Object = std::ptr::without_provenance_mut(0x55);

/// Runs the calls of an input.
pub fn case(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    let before = counts();
    let mut program = Program::new();
    for line in text.lines().take(MOST_CALLS) {
        let fields = Fields::of(line);
        if let Some((_, call)) = CALLS.iter().find(|(name, _)| *name == fields.first()) {
            call(&mut program, &fields);
        }
    }
    let owners = std::mem::take(&mut program.owners);
    drop(program);
    // The thread that serves a share drops what it has shared.
    let (is_over, patience) = (|| is_released(before, &owners), Instant::now() + PATIENCE);
    while !is_over() && Instant::now() < patience {
        std::thread::sleep(Duration::from_micros(100));
    }
    assert!(is_over(), "{before:?}, {:?}", counts());
}

/// Returns whether all that was exported has been returned, and each owner was released once. Memory of a CUDA device
/// is leaked, and counted, where there is no driver.
fn is_released(before: Counts, owners: &[Arc<AtomicU32>]) -> bool {
    let after = counts();
    let times = || owners.iter().map(|owner| owner.load(SeqCst));
    assert!(times().all(|times| times <= 1), "an owner was released twice");
    let missing = times().filter(|times| *times == 0).count() as u64;
    // Each view leaks its hold of the owner, and there may be none.
    let leaked = after.leaked - before.leaked;
    after.leased - before.leased == after.released - before.released && missing <= leaked
}

/// Ends what a program has shared.
pub fn close() {
    // SAFETY: it takes no pointer.
    unsafe { tb_share_close() };
}

fn counts() -> Counts {
    let mut counts = Counts::default();
    // SAFETY: the counts are writable.
    assert_eq!(unsafe { tb_stats(&mut counts) }, 0);
    counts
}

/// A call: the program, and the line.
type Call = fn(&mut Program, &Fields<'_>);

const CALLS: &[(&str, Call)] = &[
    ("memory", Program::memory),
    ("dlpack", Program::dlpack),
    ("info", Program::info),
    ("drop", Program::drop_tensor),
    ("transfer", Program::transfer),
    ("delete", Program::delete),
    ("copy-into", Program::copy_into),
    ("share", Program::share),
    ("revoke", Program::revoke),
    ("open", Program::open),
    ("opened", Program::opened),
    ("order", Program::order),
    ("numbers", Program::numbers),
    ("framework", Program::framework),
];

/// A tensor, and what is known of it.
#[derive(Clone, Copy)]
struct Tensor {
    object: Object,
    /// Whether all elements lie in memory of the host that may be read, and are few.
    readable: bool,
}

const NONE: Tensor = Tensor { object: null_mut(), readable: false };

struct Program {
    memory: Box<[u64]>,
    tensors: [Tensor; SLOTS],
    made: [Option<Made>; SLOTS],
    opened: Object,
    /// The ticket of the last share, and of all.
    ticket: [c_char; 513],
    tickets: Vec<[c_char; 513]>,
    /// How often each owner of memory was released.
    owners: Vec<Arc<AtomicU32>>,
}

/// Checks a status, and that a failure is explained. Returns whether the call succeeded.
fn done(status: i32) -> bool {
    assert!((0..=LAST).contains(&status) && status != PANIC, "status {status}: {}", last());
    assert!(status == 0 || !last().is_empty());
    status == 0
}

fn last() -> String {
    // SAFETY: the text lives until the next call.
    unsafe { CStr::from_ptr(tb_error()) }.to_str().expect("messages are UTF-8").to_string()
}

/// Returns the pointer, or null where the line says so.
fn unless<T>(fields: &Fields<'_>, null: &str, pointer: *mut T) -> *mut T {
    if fields.has(null) { null_mut() } else { pointer }
}

fn slot(fields: &Fields<'_>, index: usize) -> usize {
    fields.at(fields.first(), index, 0) as usize % SLOTS
}

/// A stream that exists wherever there is a driver.
fn stream(fields: &Fields<'_>) -> u64 {
    fields.one("stream", 0) % 3
}

/// The parts of a tensor that a line describes.
struct Described {
    shape: Vec<i64>,
    strides: Vec<i64>,
    ndim: i32,
    dtype: DType,
    device: Device,
    data: usize,
    readable: bool,
}

impl Program {
    fn new() -> Self {
        let memory: Box<[u64]> = (0..CAPACITY as u64).collect();
        let tensors = [NONE; SLOTS];
        let (made, opened, ticket) = ([None; SLOTS], null_mut(), [0; 513]);
        Self { memory, tensors, made, opened, ticket, tickets: Vec::new(), owners: Vec::new() }
    }

    fn described(&self, fields: &Fields<'_>, offset: u64) -> Described {
        let mut shape = fields.signed("shape").unwrap_or_else(|| vec![4]);
        let ndim = fields.one("ndim", shape.len() as u64) as i32;
        let mut strides = fields.signed("strides").unwrap_or_else(|| compact(&shape));
        // A shape has as many numbers as the tensor states dimensions, unless those are too many.
        let dimensions = usize::try_from(ndim).ok().filter(|ndim| *ndim <= MAX_NDIM).unwrap_or(shape.len());
        shape.resize(dimensions, 1);
        strides.resize(dimensions, 1);
        let dtype = DType {
            code: fields.at("dtype", 0, 2) as u8,
            bits: fields.at("dtype", 1, 32) as u8,
            lanes: fields.at("dtype", 2, 1) as u16,
        };
        let device = Device { kind: fields.at("device", 0, 1) as i32, index: fields.at("device", 1, 0) as i32 };
        let start = self.memory.as_ptr().expose_provenance();
        let data = unless(fields, "null-data", with_exposed_provenance_mut::<u8>(start)).addr();
        let data = if data == 0 { 0 } else { data.wrapping_add(fields.one("data", MIDDLE) as usize) };
        let kept = if fields.has("null-strides") { compact(&shape) } else { strides.clone() };
        let first = data as i128 + i128::from(offset);
        let inside = extent(first, &shape, &kept, i128::from(dtype.bits) / 8).is_some_and(|bytes| {
            bytes.start >= start as i128 && bytes.end <= (start + size_of_val(&*self.memory)) as i128
        });
        let numel = shape.iter().try_fold(1_i128, |product, length| product.checked_mul(i128::from(*length)));
        let few = shape.contains(&0) || inside && numel.is_some_and(|numel| numel <= MOST);
        // The host reads pinned memory as its own.
        let readable = few && matches!(device.kind, 1 | 3) && data != 0;
        Described { shape, strides, ndim, dtype, device, data, readable }
    }

    /// Makes an owner.
    fn owner(&mut self, shape: &[i64], strides: &[i64]) -> *mut Owner {
        let released = Arc::new(AtomicU32::new(0));
        self.owners.push(released.clone());
        Box::into_raw(Box::new(Owner { released, shape: shape.to_vec(), strides: strides.to_vec() }))
    }

    /// Puts the result of a call into a slot, where it replaces another tensor.
    fn put(&mut self, slot: usize, status: i32, object: Object, readable: bool) {
        if !done(status) {
            assert_eq!(object, UNTOUCHED, "a failed call has written a result");
            return;
        }
        assert!(!object.is_null() && object != UNTOUCHED);
        // SAFETY: the slot's tensor is dropped once.
        unsafe { tb_tensor_drop(self.tensors[slot].object) };
        self.tensors[slot] = Tensor { object, readable };
    }

    fn memory(&mut self, fields: &Fields<'_>) {
        let Described { shape, strides, ndim, dtype, device, data, readable } = self.described(fields, 0);
        let taken = !fields.has("null-memory") && !fields.has("null-release");
        let owner = if taken { self.owner(&[], &[]).cast() } else { null_mut() };
        let memory = Memory {
            size: size_of::<Memory>(),
            data: with_exposed_provenance_mut(data),
            shape: if fields.has("null-shape") { null() } else { shape.as_ptr() },
            strides: if fields.has("null-strides") { null() } else { strides.as_ptr() },
            ndim,
            read_only: fields.one("read-only", 0) as i32,
            dtype,
            device,
            stream: stream(fields),
            release: taken.then_some(release as unsafe extern "C" fn(*mut c_void)),
            owner,
        };
        let mut out = UNTOUCHED;
        let pointer = if fields.has("null-memory") { null() } else { &raw const memory };
        // SAFETY: the pointers are null or to what the header says.
        let status = unsafe { tb_tensor_memory(pointer, unless(fields, "null-out", &raw mut out)) };
        self.put(slot(fields, 0), status, out, readable);
    }

    fn dlpack(&mut self, fields: &Fields<'_>) {
        let offset = fields.one("offset", 0);
        let Described { shape, strides, ndim, dtype, device, data, readable } = self.described(fields, offset);
        let (versioned, mut out) = (fields.one("versioned", 1) as i32, UNTOUCHED);
        let null_out = unless(fields, "null-out", &raw mut out);
        if fields.has("null-managed") {
            // SAFETY: null is allowed.
            let status = unsafe { tb_tensor_dlpack(null_mut(), versioned, stream(fields), null_out) };
            return self.put(slot(fields, 0), status, out, false);
        }
        let owner = self.owner(&shape, &strides);
        // SAFETY: the owner lives until the deleter is called.
        let parts = unsafe { &mut *owner };
        let tensor = DlTensor {
            data: with_exposed_provenance_mut(data),
            device,
            ndim,
            dtype,
            shape: unless(fields, "null-shape", parts.shape.as_mut_ptr()),
            strides: unless(fields, "null-strides", parts.strides.as_mut_ptr()),
            byte_offset: offset,
        };
        let context = owner.cast();
        let managed: *mut c_void = match versioned {
            0 => Box::into_raw(Box::new(Legacy { tensor, context, deleter: Some(delete_legacy) })).cast(),
            _ => {
                let version = [fields.at("version", 0, 1) as u32, fields.at("version", 1, 3) as u32];
                let flags = fields.one("flags", 0);
                let deleter: Option<unsafe extern "C" fn(*mut Versioned)> = Some(delete_versioned);
                Box::into_raw(Box::new(Versioned { version, context, deleter, flags, tensor })).cast()
            }
        };
        // SAFETY: the managed tensor is of this ABI, and taken over; `out` is null or writable.
        let status = unsafe { tb_tensor_dlpack(managed, versioned, stream(fields), null_out) };
        self.put(slot(fields, 0), status, out, readable);
    }

    fn info(&mut self, fields: &Fields<'_>) {
        let mut memory = std::mem::MaybeUninit::<Memory>::uninit();
        let tensor = self.tensors[slot(fields, 0)].object;
        // SAFETY: the tensor is null or alive, `out` is null or writable.
        if done(unsafe { tb_tensor_info(tensor, unless(fields, "null-out", memory.as_mut_ptr())) }) {
            // SAFETY: the call has succeeded.
            let memory = unsafe { memory.assume_init() };
            assert!(
                (0..=MAX_NDIM as i32).contains(&memory.ndim) && (memory.dtype.lanes == 1 || memory.dtype.bits == 4)
            );
            // SAFETY: the shape has so many lengths.
            let shape = unsafe { std::slice::from_raw_parts(memory.shape, memory.ndim as usize) };
            assert!(shape.iter().all(|length| *length >= 0));
        }
    }

    fn drop_tensor(&mut self, fields: &Fields<'_>) {
        let tensor = std::mem::replace(&mut self.tensors[slot(fields, 0)], NONE);
        // SAFETY: the tensor is null or alive, and used no more.
        unsafe { tb_tensor_drop(tensor.object) };
    }

    /// Plans a transfer and then makes it, unless it would read what is no memory. Both must agree.
    fn transfer(&mut self, fields: &Fields<'_>) {
        let tensor = self.tensors[slot(fields, 0)];
        let dtypes: Vec<DType> = fields.all("dtypes").unwrap_or_default().chunks(3).map(dtype).collect();
        let devices: Vec<i32> = fields.all("devices").unwrap_or_default().iter().map(|kind| *kind as i32).collect();
        let axes = fields.signed("axes").unwrap_or_default();
        let name = CString::new(fields.one("name", 0).to_ne_bytes().split(|byte| *byte == 0).next().unwrap_or(&[]));
        let name = name.expect("it was cut at the first NUL");
        let to = Device { kind: fields.at("to", 0, 1) as i32, index: fields.at("to", 1, 0) as i32 };
        let target = Target {
            size: fields.one("target", size_of::<Target>() as u64) as usize,
            name: if fields.has("name") { name.as_ptr() } else { null() },
            dtypes: if fields.has("dtypes") { dtypes.as_ptr() } else { null() },
            dtype_count: counted(fields, "dtype-count", dtypes.len()),
            devices: if fields.has("devices") { devices.as_ptr() } else { null() },
            device_count: counted(fields, "device-count", devices.len()),
            strides: fields.one("strides", 0) as i32,
            ignores_read_only: fields.one("ignores", 0) as i32,
            alignment: fields.one("alignment", 0) as usize,
            unversioned: fields.one("unversioned", 0) as i32,
        };
        let options = Options {
            size: fields.one("options", size_of::<Options>() as u64) as usize,
            copy: fields.one("copy", 0) as i32,
            elements: fields.one("elements", 0) as i32,
            device: if fields.has("to") { &to } else { null() },
            axes: if fields.has("axes") { axes.as_ptr() } else { null() },
            axis_count: counted(fields, "axis-count", axes.len()),
        };
        let target = if fields.has("null-target") { null() } else { &raw const target };
        let options = if fields.has("null-options") { null() } else { &raw const options };
        let size = fields.one("report", size_of::<Report>() as u64) as usize;
        let nothing = Device { kind: -7, index: -7 };
        let report =
            Report { size, reason: null(), copied_by: null(), bytes_copied: 9, owner: 9, reader: 9, device: nothing };
        let (mut planned, mut reported) = (report, report);
        // SAFETY: the pointers are null or to what the header says, in all calls below.
        let is_planned =
            done(unsafe { tb_plan(tensor.object, target, options, unless(fields, "null-report", &raw mut planned)) });
        assert!(is_planned || (planned.bytes_copied, planned.device) == (9, nothing), "a failed plan was reported");
        if fields.has("null-report") || is_planned && !planned.reason.is_null() && !tensor.readable {
            return;
        }
        let mut out = UNTOUCHED;
        let null_out = unless(fields, "null-out", &raw mut out);
        // SAFETY: see above; a tensor that cannot be read is not copied.
        let status = unsafe { tb_transfer(tensor.object, target, options, stream(fields), null_out, &mut reported) };
        if !done(status) {
            assert_eq!(out, UNTOUCHED, "a failed call has written a result");
            let may_fail = fields.has("null-out") || to.kind != 1 || UNFORESEEN.contains(&status);
            assert!(!is_planned || may_fail, "planned, but: {}", last());
            return;
        }
        assert!(is_planned, "what has no plan was transferred");
        assert_eq!((planned.reason, planned.bytes_copied), (reported.reason, reported.bytes_copied));
        assert_eq!(planned.device, reported.device);
        let made =
            Made { managed: out, versioned: fields.has("null-target") || fields.one("unversioned", 0) as i32 == 0 };
        made.check(tensor.readable);
        let old = self.made[slot(fields, 1)].replace(made);
        old.into_iter().for_each(Made::delete);
    }

    fn delete(&mut self, fields: &Fields<'_>) {
        self.made[slot(fields, 0)].take().into_iter().for_each(Made::delete);
    }

    fn copy_into(&mut self, fields: &Fields<'_>) {
        let (from, to) = (self.tensors[slot(fields, 0)], self.tensors[slot(fields, 1)]);
        let exist = !from.object.is_null() && !to.object.is_null();
        if exist && !(from.readable && to.readable) {
            return;
        }
        let axes = fields.signed("axes").unwrap_or_default();
        let pointer = if fields.has("axes") { axes.as_ptr() } else { null() };
        // SAFETY: the tensors are null or can be read and, unless they say otherwise, written.
        done(unsafe { tb_copy_into(from.object, to.object, pointer, counted(fields, "axis-count", axes.len())) });
    }

    fn share(&mut self, fields: &Fields<'_>) {
        let slots = fields.all("share").unwrap_or_default();
        let tensors: Vec<Tensor> = slots.iter().take(8).map(|slot| self.tensors[*slot as usize % SLOTS]).collect();
        if tensors.iter().any(|tensor| !tensor.object.is_null() && !tensor.readable) {
            return;
        }
        let objects: Vec<Object> = tensors.iter().map(|tensor| tensor.object).collect();
        let tree = if fields.has("tree") { c"[0]".as_ptr() } else { null() };
        let seconds = match fields.all("seconds-bits") {
            Some(bits) => f64::from_bits(bits.first().copied().unwrap_or(0)),
            None => fields.one("seconds", 60) as i64 as f64,
        };
        let writing = fields.one("writing", 0) as i32;
        let ticket = unless(fields, "null-ticket", self.ticket.as_mut_ptr());
        let count = counted(fields, "count", objects.len());
        let pointer = if fields.has("null-tensors") { null() } else { objects.as_ptr() };
        // SAFETY: the pointers are null or to what the header says; the ticket has room.
        if done(unsafe { tb_share(pointer, count, tree, seconds, writing, ticket) }) {
            self.tickets.push(self.ticket);
        }
    }

    /// The ticket of the last share, one byte of which `flip` changes.
    fn changed_ticket(&self, fields: &Fields<'_>) -> [c_char; 513] {
        let mut ticket = self.ticket;
        if fields.has("flip") {
            ticket[fields.one("flip", 0) as usize % 512] ^= (1 << (fields.at("flip", 1, 0) % 8)) as c_char;
        }
        ticket
    }

    fn revoke(&mut self, fields: &Fields<'_>) {
        let mut ticket = self.changed_ticket(fields);
        let end = if fields.has("quiet") { tb_share_end } else { tb_revoke };
        // SAFETY: the ticket is null or a C string: its last byte is 0.
        done(unsafe { end(unless(fields, "null-ticket", ticket.as_mut_ptr())) });
    }

    fn open(&mut self, fields: &Fields<'_>) {
        let (mut ticket, mut out) = (self.changed_ticket(fields), UNTOUCHED);
        let null_out = unless(fields, "null-out", &raw mut out);
        // SAFETY: the ticket is null or a C string, `out` is null or writable.
        if done(unsafe { tb_open(unless(fields, "null-ticket", ticket.as_mut_ptr()), null_out) }) {
            // SAFETY: the old object is used no more.
            unsafe { tb_opened_drop(std::mem::replace(&mut self.opened, out)) };
        } else {
            assert_eq!(out, UNTOUCHED);
        }
    }

    fn opened(&mut self, fields: &Fields<'_>) {
        let (index, mut out) = (fields.at("opened", 1, 0) as usize, UNTOUCHED);
        // SAFETY: the object is null or alive.
        unsafe {
            let count = tb_opened_count(self.opened);
            assert!(!self.opened.is_null() || (count, tb_opened_tree(self.opened)) == (0, null()));
            let status = tb_opened_tensor(self.opened, index, unless(fields, "null-out", &raw mut out));
            assert!(status != 0 || index < count);
            self.put(slot(fields, 0), status, out, true);
        }
    }

    fn order(&mut self, fields: &Fields<'_>) {
        let device = Device { kind: fields.at("order", 0, 1) as i32, index: fields.at("order", 1, 0) as i32 };
        // SAFETY: the streams exist wherever there is a driver, and the address is not used.
        unsafe {
            done(tb_order(device, stream(fields), 2));
            done(tb_used(device, unless(fields, "null-data", self.memory.as_mut_ptr().cast()), stream(fields)));
        }
    }

    fn numbers(&mut self, fields: &Fields<'_>) {
        let number = fields.one("numbers", 0) as u32;
        // SAFETY: the functions take numbers.
        let name = unsafe {
            done(tb_require(number));
            tb_status_name(number as i32)
        };
        assert_eq!(name.is_null(), number > LAST as u32);
        // SAFETY: null is allowed.
        done(unsafe { tb_stats(null_mut()) });
    }

    /// All that needs a framework or an interpreter, without one.
    fn framework(&mut self, fields: &Fields<'_>) {
        let number = fields.one("framework", 0);
        let (mut out, mut handle) = (UNTOUCHED, [0; 2]);
        let (nothing, out) = (null_mut(), unless(fields, "null-out", &raw mut out));
        let tensor = self.tensors[slot(fields, 0)].object;
        // SAFETY: the objects are null, and the other pointers null or to what the header says.
        let statuses = unsafe {
            assert!(tb_runtime_version(nothing).is_null());
            tb_external_drop(nothing);
            tb_view_drop(nothing);
            [
                tb_runtime_loaded(number as i32, out),
                tb_runtime_open(unless(fields, "null-folder", c"/nothing/here".as_ptr().cast_mut()), out),
                tb_feed(nothing, tensor, number as i32, out),
                tb_take(nothing, handle.as_ptr(), out),
                tb_external_put_back(nothing),
                tb_external_handle(nothing, handle.as_mut_ptr()),
                tb_external_info(nothing, nothing),
                tb_external_dlpack(nothing, number, number as i32, out),
                tb_external_view(nothing, number, out),
                tb_view_used(nothing, number),
                tb_session_run(nothing, nothing, number as usize, out, number as usize),
                tb_session_close(nothing),
                tb_session_open(nothing, nothing, number as usize, nothing, 1, null(), 1, nothing, out),
                tb_python_open(nothing),
                tb_python_tensor(nothing, out),
                tb_python_capsule(nothing, number, number as i32, out),
            ]
        };
        assert!(statuses.into_iter().all(|status| !done(status)), "{statuses:?}");
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: everything is null or alive, and used no more.
        unsafe {
            self.tensors.iter().for_each(|tensor| tb_tensor_drop(tensor.object));
            tb_opened_drop(self.opened);
            for ticket in &self.tickets {
                // It may have expired.
                tb_revoke(ticket.as_ptr());
            }
        }
        self.made.into_iter().flatten().for_each(Made::delete);
    }
}

fn dtype(numbers: &[u64]) -> DType {
    let at = |index: usize, usual| numbers.get(index).copied().unwrap_or(usual);
    DType { code: at(0, 2) as u8, bits: at(1, 32) as u8, lanes: at(2, 1) as u16 }
}

/// Returns a count that a line states, where there are so many or more than memory holds: C cannot check others.
fn counted(fields: &Fields<'_>, word: &str, own: usize) -> usize {
    let stated = fields.one(word, own as u64) as usize;
    if stated <= own || stated >= 1 << 62 { stated } else { own }
}
