//! The C header, out of the sources of the C library.

use crate::run::{Result, at, root};
use cbindgen::{Builder, Config, DocumentationStyle, EnumConfig, ExportConfig, Language, RenameRule, Style};
use std::fs;

/// The crate with the functions, and its header.
const CRATE: &str = "crates/bridge-capi";

/// The sources of types that the interface takes from another crate.
const OTHERS: [&str; 1] = ["crates/bridge-pyo3/src/interpreter/gate/functions.rs"];

/// The names of types in Rust and in C.
const TYPES: &[(&str, &str)] = &[
    ("CCopy", "tb_copy"),
    ("CCounts", "tb_counts"),
    ("CDType", "tb_dtype"),
    ("CDevice", "tb_device"),
    ("CElements", "tb_elements"),
    ("CExternal", "tb_external"),
    ("CInfo", "tb_info"),
    ("CInput", "tb_input"),
    ("CMemory", "tb_memory"),
    ("CNamed", "tb_named"),
    ("COpened", "tb_opened"),
    ("COptions", "tb_options"),
    ("CReport", "tb_report"),
    ("CRuntime", "tb_runtime"),
    ("CSession", "tb_session"),
    ("CSessionOptions", "tb_session_options"),
    ("CStrides", "tb_strides"),
    ("CTarget", "tb_target"),
    ("CTensor", "tb_tensor"),
    ("CView", "tb_view"),
    ("CWriting", "tb_writing"),
    ("Functions", "tb_python"),
    ("Object", "tb_object"),
    ("Status", "tb_status"),
];

/// Types that no function names: their numbers are passed as int32_t.
const NUMBERS: [&str; 4] = ["CCopy", "CElements", "CStrides", "CWriting"];

/// Writes the header, or with `check` compares it with what is checked in.
pub fn write(check: bool) -> Result<()> {
    let path = root().join(CRATE).join("include/truebridge.h");
    let header = generated()?;
    if !check {
        return at(&path, fs::write(&path, header));
    }
    match at(&path, fs::read_to_string(&path))? == header {
        true => Ok(()),
        false => Err(format!("{} is out of date: run cargo xtask generate header", path.display())),
    }
}

fn generated() -> Result<String> {
    let opening = root().join(CRATE).join("include/opening.txt");
    let opening = at(&opening, fs::read_to_string(&opening))?;
    // The modules of a library are found by themselves.
    let sources = OTHERS.map(|file| root().join(file)).into_iter().chain([root().join(CRATE).join("src/lib.rs")]);
    let builder = sources.fold(Builder::new(), Builder::with_src);
    let bindings = builder.with_config(config(&opening)).generate().map_err(|error| error.to_string())?;
    let mut header = Vec::new();
    bindings.write(&mut header);
    let header = String::from_utf8(header).map_err(|error| error.to_string())?;
    // The numbers of a status are named without their type.
    Ok(on_one_line(&header.replace("TB_STATUS_", "TB_")))
}

/// Joins the lines of comments of one line.
fn on_one_line(header: &str) -> String {
    let lines: Vec<_> = header.lines().collect();
    let (mut joined, mut at) = (String::new(), 0);
    while at < lines.len() {
        let comment = lines[at].trim() == "/*" && lines.get(at + 2).is_some_and(|line| line.trim() == "*/");
        let (line, taken) = match comment {
            true => (format!("{} {} */", lines[at], lines[at + 1].trim()), 3),
            false => (lines[at].into(), 1),
        };
        joined += &line;
        joined.push('\n');
        at += taken;
    }
    joined
}

fn config(opening: &str) -> Config {
    Config {
        language: Language::C,
        style: Style::Both,
        header: Some(opening.trim_end().into()),
        include_guard: Some("TRUEBRIDGE_H".into()),
        no_includes: true,
        sys_includes: vec!["stddef.h".into(), "stdint.h".into()],
        cpp_compat: true,
        usize_is_size_t: true,
        documentation_style: DocumentationStyle::C,
        line_length: 120,
        tab_width: 2,
        export: ExportConfig {
            include: NUMBERS.map(String::from).into(),
            rename: TYPES.iter().map(|(rust, c)| (rust.to_string(), c.to_string())).collect(),
            ..ExportConfig::default()
        },
        enumeration: EnumConfig { rename_variants: RenameRule::QualifiedScreamingSnakeCase, ..EnumConfig::default() },
        ..Config::default()
    }
}
