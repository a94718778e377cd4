//! Makes the tests of the feature `tch` find the libtorch that `tch` was built against.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // Set by the build script of `torch-sys`. Programs that depend on this crate choose a libtorch themselves.
    if let Ok(folder) = std::env::var("DEP_TCH_LIBTORCH_LIB") {
        // The linker would leave out `libtorch.so`, from which no symbol is used, and with it CUDA.
        println!("cargo:rustc-link-arg=-Wl,-rpath,{folder},--no-as-needed,-L{folder},-ltorch,--as-needed");
    }
}
