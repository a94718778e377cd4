//! The interface as a program in C sees it: what `truebridge.h` declares.

use std::ffi::{c_char, c_void};

/// `tb_dtype`
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DType {
    pub code: u8,
    pub bits: u8,
    pub lanes: u16,
}

/// `tb_device`
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Device {
    pub kind: i32,
    pub index: i32,
}

/// `tb_memory`
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Memory {
    pub size: usize,
    pub data: *mut c_void,
    pub shape: *const i64,
    pub strides: *const i64,
    pub ndim: i32,
    pub read_only: i32,
    pub dtype: DType,
    pub device: Device,
    pub stream: u64,
    pub release: Option<unsafe extern "C" fn(*mut c_void)>,
    pub owner: *mut c_void,
}

/// `tb_target`
#[repr(C)]
pub struct Target {
    pub size: usize,
    pub name: *const c_char,
    pub dtypes: *const DType,
    pub dtype_count: usize,
    pub devices: *const i32,
    pub device_count: usize,
    pub strides: i32,
    pub ignores_read_only: i32,
    pub alignment: usize,
    pub unversioned: i32,
}

/// `tb_options`
#[repr(C)]
pub struct Options {
    pub size: usize,
    pub copy: i32,
    pub elements: i32,
    pub device: *const Device,
    pub axes: *const i64,
    pub axis_count: usize,
}

/// `tb_report`
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Report {
    pub size: usize,
    pub reason: *const c_char,
    pub copied_by: *const c_char,
    pub bytes_copied: u64,
    pub owner: u64,
    pub reader: u64,
    pub device: Device,
}

/// `tb_counts`
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Counts {
    pub leased: u64,
    pub released: u64,
    pub pending: u64,
    pub leaked: u64,
    pub unclaimed: u64,
    pub reclaimed: u64,
}

/// `DLTensor` of `dlpack.h`
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct DlTensor {
    pub data: *mut c_void,
    pub device: Device,
    pub ndim: i32,
    pub dtype: DType,
    pub shape: *mut i64,
    pub strides: *mut i64,
    pub byte_offset: u64,
}

/// `DLManagedTensor`
#[repr(C)]
pub struct Legacy {
    pub tensor: DlTensor,
    pub context: *mut c_void,
    pub deleter: Option<unsafe extern "C" fn(*mut Legacy)>,
}

/// `DLManagedTensorVersioned`
#[repr(C)]
pub struct Versioned {
    pub version: [u32; 2],
    pub context: *mut c_void,
    pub deleter: Option<unsafe extern "C" fn(*mut Versioned)>,
    pub flags: u64,
    pub tensor: DlTensor,
}

/// An object of the library.
pub type Object = *mut c_void;

unsafe extern "C" {
    pub fn tb_require(abi: u32) -> i32;
    pub fn tb_error() -> *const c_char;
    pub fn tb_status_name(status: i32) -> *const c_char;
    pub fn tb_stats(out: *mut Counts) -> i32;
    pub fn tb_tensor_memory(memory: *const Memory, out: *mut Object) -> i32;
    pub fn tb_tensor_dlpack(managed: *mut c_void, versioned: i32, stream: u64, out: *mut Object) -> i32;
    pub fn tb_tensor_info(tensor: Object, out: *mut Memory) -> i32;
    pub fn tb_tensor_drop(tensor: Object);
    pub fn tb_plan(tensor: Object, target: *const Target, options: *const Options, report: *mut Report) -> i32;
    pub fn tb_transfer(
        tensor: Object,
        target: *const Target,
        options: *const Options,
        stream: u64,
        out: *mut *mut c_void,
        report: *mut Report,
    ) -> i32;
    pub fn tb_copy_into(from: Object, to: Object, axes: *const i64, axis_count: usize) -> i32;
    pub fn tb_order(device: Device, earlier: u64, later: u64) -> i32;
    pub fn tb_used(device: Device, data: *const c_void, stream: u64) -> i32;
    pub fn tb_share(
        tensors: *const Object,
        count: usize,
        tree: *const c_char,
        seconds: f64,
        writing: i32,
        ticket: *mut c_char,
    ) -> i32;
    pub fn tb_revoke(ticket: *const c_char) -> i32;
    pub fn tb_share_end(ticket: *const c_char) -> i32;
    pub fn tb_share_close();
    pub fn tb_open(ticket: *const c_char, out: *mut Object) -> i32;
    pub fn tb_opened_count(opened: Object) -> usize;
    pub fn tb_opened_tree(opened: Object) -> *const c_char;
    pub fn tb_opened_tensor(opened: Object, index: usize, out: *mut Object) -> i32;
    pub fn tb_opened_drop(opened: Object);
    pub fn tb_runtime_loaded(series: i32, out: *mut Object) -> i32;
    pub fn tb_runtime_open(folder: *const c_char, out: *mut Object) -> i32;
    pub fn tb_runtime_version(runtime: Object) -> *const c_char;
    pub fn tb_feed(runtime: Object, tensor: Object, copy: i32, out: *mut Object) -> i32;
    pub fn tb_take(runtime: Object, handle: *const i32, out: *mut Object) -> i32;
    pub fn tb_external_put_back(external: Object) -> i32;
    pub fn tb_external_handle(external: Object, handle: *mut i32) -> i32;
    pub fn tb_external_info(external: Object, out: *mut c_void) -> i32;
    pub fn tb_external_drop(external: Object);
    pub fn tb_external_dlpack(external: Object, stream: u64, versioned: i32, out: *mut *mut c_void) -> i32;
    pub fn tb_external_view(external: Object, stream: u64, out: *mut Object) -> i32;
    pub fn tb_view_used(view: Object, stream: u64) -> i32;
    pub fn tb_view_drop(view: Object);
    pub fn tb_session_run(
        session: Object,
        feeds: *const c_void,
        count: usize,
        outputs: *mut Object,
        wanted: usize,
    ) -> i32;
    pub fn tb_session_close(session: Object) -> i32;
    pub fn tb_session_open(
        runtime: Object,
        graph_def: *const c_void,
        size: usize,
        inputs: *const c_void,
        input_count: usize,
        outputs: *const *const c_char,
        output_count: usize,
        with: *const c_void,
        out: *mut Object,
    ) -> i32;
    pub fn tb_python_open(python: *const c_void) -> i32;
    pub fn tb_python_tensor(capsule: Object, out: *mut Object) -> i32;
    pub fn tb_python_capsule(external: Object, stream: u64, versioned: i32, out: *mut Object) -> i32;
}
