//! The header declares what the library defines.

use crate::external::CInfo;
use crate::session::{CInput, CNamed, CSessionOptions};
use crate::stats::CCounts;
use crate::tensor::{CDType, CDevice, CMemory};
use crate::transfer::{COptions, CReport, CTarget};
use bridge_pyo3::interpreter::Functions;
use std::collections::BTreeSet;
use std::io::Write;
use std::mem::offset_of;
use std::process::{Command, Stdio};

const HEADER: &str = include_str!("../include/truebridge.h");

/// The sources with functions for C.
const SOURCES: &[&str] = &[
    include_str!("external.rs"),
    include_str!("lib.rs"),
    include_str!("python.rs"),
    include_str!("session.rs"),
    include_str!("stats.rs"),
    include_str!("status.rs"),
    include_str!("streams.rs"),
    include_str!("tensor.rs"),
    include_str!("ticket.rs"),
    include_str!("transfer.rs"),
    include_str!("view.rs"),
];

/// Returns the names of the interface in a text that a parenthesis follows.
fn functions(text: &str) -> BTreeSet<&str> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let names = text.match_indices("tb_").filter(|(at, _)| !text[..*at].ends_with(is_name)).filter_map(|(at, _)| {
        let name = text[at..].split(|c| !is_name(c)).next()?;
        text[at + name.len()..].starts_with('(').then_some(name)
    });
    names.collect()
}

#[test]
fn every_function_is_declared_and_defined() {
    let marker = "extern \"C\" fn ";
    let defined = SOURCES.iter().flat_map(|source| source.split(marker).skip(1));
    let defined: BTreeSet<_> =
        defined.filter_map(|rest| rest.split('(').next()).filter(|name| name.starts_with("tb_")).collect();
    let declared = functions(HEADER);
    assert_eq!(declared, defined);
    assert!(declared.len() > 20 && declared.contains("tb_session_run"), "{declared:?}");
}

#[test]
fn every_status_is_declared_with_its_number() {
    let declared = HEADER.lines().filter_map(|line| line.trim().strip_prefix("TB_")?.split_once(" = "));
    let statuses = declared.take_while(|(name, _)| !name.starts_with("COPY_IF"));
    let mut count = 0;
    for (name, number) in statuses {
        let number = number.split([',', ' ']).next().unwrap().parse().unwrap();
        let known = crate::status::tb_status_name(number);
        assert!(!known.is_null(), "{name}");
        // SAFETY: the library returns static C strings for its statuses.
        let known = unsafe { std::ffi::CStr::from_ptr(known) }.to_str().unwrap();
        assert_eq!(known, name.to_lowercase());
        count += 1;
    }
    assert!(crate::status::tb_status_name(count).is_null(), "{count} are declared");
}

#[test]
fn the_version_is_one() {
    let declared = HEADER.lines().find_map(|line| line.strip_prefix("#define TB_ABI "));
    assert_eq!(declared, Some(crate::tb_abi().to_string().as_str()));
}

/// Returns assertions for the C compiler: the size of a structure, and the offsets of its fields.
macro_rules! layout {
    ($name:literal, $type:ty, $($field:ident),*) => {
        [format!("_Static_assert(sizeof({}) == {}, \"\");\n", $name, size_of::<$type>())].into_iter()
            $(.chain([format!(
                "_Static_assert(offsetof({}, {}) == {}, \"\");\n", $name, stringify!($field), offset_of!($type, $field)
            )]))*
            .collect::<String>()
    };
}

#[test]
fn structures_are_laid_out_alike() {
    let asserted = [
        layout!("tb_dtype", CDType, code, bits, lanes),
        layout!("tb_device", CDevice, kind, index),
        layout!(
            "tb_memory",
            CMemory,
            size,
            data,
            shape,
            strides,
            ndim,
            read_only,
            dtype,
            device,
            stream,
            release,
            owner
        ),
        layout!("tb_info", CInfo, data, stream, dtype, device, ndim, read_only, shape),
        layout!("tb_counts", CCounts, leased, released, pending, leaked, unclaimed, reclaimed),
        layout!("tb_input", CInput, name, shape, ndim, dtype, device),
        layout!(
            "tb_session_options",
            CSessionOptions,
            no_memory_growth,
            memory_fraction,
            visible_devices,
            visible_device_count,
            config,
            config_size
        ),
        layout!("tb_named", CNamed, name, tensor),
        layout!(
            "tb_target",
            CTarget,
            size,
            name,
            dtypes,
            dtype_count,
            devices,
            device_count,
            strides,
            ignores_read_only,
            alignment,
            unversioned
        ),
        layout!("tb_options", COptions, size, copy, elements, device, axes, axis_count),
        layout!("tb_report", CReport, size, reason, copied_by, bytes_copied, owner, reader, device),
        layout!(
            "tb_python",
            Functions,
            is_initialized,
            gil_state_ensure,
            gil_state_release,
            gil_state_get_this_thread_state,
            err_fetch,
            err_restore,
            err_occurred,
            err_write_unraisable,
            capsule_new,
            capsule_is_valid,
            capsule_get_pointer,
            capsule_set_name
        ),
    ];
    let program = format!("{HEADER}\n{}", asserted.concat());
    for (language, more) in [("c", ""), ("c++", "#define _Static_assert static_assert\n")] {
        let mut compiler = Command::new("cc");
        compiler.args(["-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-pedantic", "-x", language, "-"]);
        let mut compiler =
            compiler.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("there is a C compiler");
        let mut input = compiler.stdin.take().unwrap();
        input.write_all(format!("{more}{program}").as_bytes()).unwrap();
        drop(input);
        let output = compiler.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}
