//! Running other programs.

use serde_json::Value;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus};

/// A message for the user.
pub type Error = String;
/// Shorthand.
pub type Result<T> = std::result::Result<T, Error>;

/// The top of the repository.
pub fn root() -> PathBuf {
    // Cargo sets it for the programs that it runs.
    let own = std::env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| PathBuf::from("xtask"), PathBuf::from);
    own.parent().unwrap_or(&own).to_path_buf()
}

/// The target folder of cargo, which also holds everything that this program makes.
pub fn target() -> PathBuf {
    let chosen = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    root().join(chosen.unwrap_or_else(|| "target".into()))
}

/// Returns a program that starts at the top of the repository.
pub fn program(name: impl AsRef<OsStr>, arguments: &[&str]) -> Command {
    let mut command = Command::new(name);
    command.args(arguments).current_dir(root());
    command
}

/// Returns a call of the cargo that runs this program.
pub fn cargo(arguments: &[&str]) -> Command {
    without_nvcc(program(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()), arguments))
}

/// Makes a call of cargo type-check candle's CUDA kernels without a toolkit, and `tch` without libtorch: `xtask/nvcc`
/// stands in for the compiler, and nothing that needs the kernels links. The architecture is one that no build is for, so that a real build in the same
/// folder compiles every kernel again.
pub fn without_nvcc(mut command: Command) -> Command {
    command.env("NVCC", root().join("xtask/nvcc")).env("CUDA_COMPUTE_CAP", "20").env("TRUEBRIDGE_DOC_ONLY", "1");
    command
}

/// Runs a program with its output shown.
pub fn status(command: &mut Command) -> Result<ExitStatus> {
    command.status().map_err(|error| format!("{} does not start: {error}", command.get_program().display()))
}

/// Runs a program with its output shown, which must succeed.
pub fn run(command: &mut Command) -> Result<()> {
    match status(command)? {
        status if status.success() => Ok(()),
        status => Err(format!("{} ended with {status}", command.get_program().display())),
    }
}

/// Returns what a program prints, if it runs and succeeds.
pub fn ask(command: &mut Command) -> Option<String> {
    let output = command.output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Returns the exit code for the status of another program.
pub fn code(status: ExitStatus) -> ExitCode {
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    code.map_or(ExitCode::FAILURE, ExitCode::from)
}

/// Adds the path to the error of an operation.
pub fn at<T>(path: &Path, result: std::io::Result<T>) -> Result<T> {
    result.map_err(|error| format!("{}: {error}", path.display()))
}

/// Removes a folder with what is in it, if it is there.
pub fn remove(folder: &Path) -> Result<()> {
    if folder.exists() { at(folder, fs::remove_dir_all(folder)) } else { Ok(()) }
}

/// Makes a folder that is empty.
pub fn empty(folder: &Path) -> Result<()> {
    remove(folder)?;
    at(folder, fs::create_dir_all(folder))
}

/// Returns an error that says how to install a tool, unless this call of it succeeds.
pub fn needs(mut call: Command, tool: &str, how: &str) -> Result<()> {
    ask(&mut call).map(drop).ok_or_else(|| format!("{tool} is not installed: {how}"))
}

/// Returns an error unless a nightly toolchain is installed.
pub fn needs_nightly() -> Result<()> {
    needs(program("cargo", &["+nightly", "--version"]), "a nightly toolchain", "rustup toolchain install nightly")
}

/// Returns JSON as files have it.
pub fn pretty(value: &Value) -> Result<String> {
    serde_json::to_string_pretty(value).map(|text| text + "\n").map_err(|error| error.to_string())
}

/// The folder of cargo in the user's home.
pub fn cargo_home() -> Option<PathBuf> {
    let named = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    named.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")))
}
