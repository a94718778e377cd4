//! Makes the tests and examples of this crate find the libtorch that `tch` was built against, and refuses to build a
//! program without one.

/// Set where nothing is linked: by docs.rs, and by `cargo xtask` for lints and documentation.
const TYPE_CHECKS: [&str; 2] = ["DOCS_RS", "TRUEBRIDGE_DOC_ONLY"];

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    TYPE_CHECKS.iter().for_each(|name| println!("cargo:rerun-if-env-changed={name}"));
    let is_doc_only =
        ["DOC_ONLY", "TCH"].iter().all(|name| std::env::var_os(format!("CARGO_FEATURE_{name}")).is_some());
    // Cargo enables a feature for all crates of a build: one crate could leave every other without libtorch.
    if is_doc_only && TYPE_CHECKS.iter().all(|name| std::env::var_os(name).is_none()) {
        println!(
            "cargo::error=the feature doc-only links no libtorch: leave it out, or set TRUEBRIDGE_DOC_ONLY=1 to type-check"
        );
    }
    // Set by the build script of `torch-sys`. Programs that depend on this crate choose a libtorch themselves.
    if let Ok(folder) = std::env::var("DEP_TCH_LIBTORCH_LIB") {
        // The linker would leave out `libtorch.so`, from which no symbol is used, and with it CUDA.
        println!("cargo:rustc-link-arg=-Wl,-rpath,{folder},--no-as-needed,-L{folder},-ltorch,--as-needed");
    }
}
