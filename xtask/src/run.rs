//! Running other programs.

use std::ffi::OsStr;
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
