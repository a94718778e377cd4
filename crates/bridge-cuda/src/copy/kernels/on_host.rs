//! The kernels themselves, compiled for the host by the compiler that `CXX` names: a process is their device.

use super::table::{KERNELS, Kernel};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::{env, fs, process, slice, thread};

/// The compiler's arguments, and those for its sanitizers, which it may not have.
const ARGUMENTS: &[&str] = &["-std=c++17", "-O1", "-g", "-fno-strict-aliasing", "-rdynamic", "-w"];
const SANITIZERS: &[&str] = &["-fsanitize=address,undefined", "-fno-sanitize-recover=all"];

/// What the names of the program begin with.
const NAME: &str = "kernels-on-host-";

/// The program of `on_host.cpp`. It stays next to the tests for the next run.
static PROGRAM: LazyLock<PathBuf> = LazyLock::new(|| {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (source, kernels) = (package.join("src/copy/kernels/on_host.cpp"), package.join("kernels"));
    let compiler = env::var("CXX").unwrap_or_else(|_| "c++".into());
    let mut hasher = DefaultHasher::new();
    let mut sources = files(&kernels);
    sources.sort();
    sources.iter().chain([&source]).for_each(|file| fs::read(file).unwrap().hash(&mut hasher));
    (&compiler, ARGUMENTS, SANITIZERS).hash(&mut hasher);
    let program = env::current_exe().unwrap().with_file_name(format!("{NAME}{:016x}", hasher.finish()));
    if !program.exists() {
        let made = program.with_extension(process::id().to_string());
        let compiles = |more: &[&str]| {
            let mut compile = Command::new(&compiler);
            compile.args(ARGUMENTS).args(more).arg("-I").arg(&kernels).arg(&source).arg("-o").arg(&made).arg("-ldl");
            compile.stderr(Stdio::null()).status().is_ok_and(|status| status.success())
        };
        if !compiles(SANITIZERS) {
            eprintln!("{compiler} has no sanitizers: accesses beyond memory may go unnoticed");
            assert!(compiles(&[]), "{compiler} compiles the kernels");
        }
        fs::rename(made, &program).unwrap();
        // Those that other processes make now have an extension.
        let is_old = |file: &&PathBuf| {
            let name = file.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with(NAME) && file.extension().is_none() && **file != program
        };
        files(program.parent().unwrap()).iter().filter(is_old).for_each(|file| drop(fs::remove_file(file)));
    }
    program
});

fn files(folder: &Path) -> Vec<PathBuf> {
    let all = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    all.filter(|file| file.is_file()).collect()
}

/// Devices that tests have used, for the next ones.
static USED: Mutex<Vec<Running>> = Mutex::new(Vec::new());

struct Running {
    child: Child,
    commands: ChildStdin,
    answers: ChildStdout,
}

/// A device on the host. Its memory is freed with this value. A launch that fails panics with what the process says.
pub(super) struct OnHost {
    running: Option<Running>,
    launches: u64,
}

impl Default for OnHost {
    fn default() -> Self {
        let used = USED.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let running = used.unwrap_or_else(|| {
            // Fibers leave their stacks without returns, which one of the checks takes for errors.
            let options = "detect_leaks=0:detect_stack_use_after_return=0";
            let mut program = Command::new(&*PROGRAM);
            program.env("ASAN_OPTIONS", options).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
            let mut child = program.spawn().unwrap();
            let (commands, answers) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
            Running { child, commands, answers }
        });
        Self { running: Some(running), launches: 0 }
    }
}

impl OnHost {
    /// Returns the address of memory with these bytes, so many bytes beyond a multiple of 16.
    pub fn memory(&mut self, bytes: &[u8], beyond: usize) -> usize {
        self.command(b'm', &[beyond, bytes.len()], bytes);
        usize::from_le_bytes(self.answer(size_of::<usize>()).try_into().unwrap())
    }

    pub fn launch<P: Copy>(&mut self, kernel: Kernel, blocks: u32, shared: u32, parameters: &P) {
        let name = KERNELS[kernel as usize].0.to_bytes();
        // SAFETY: parameters of kernels have no padding: their sizes are the sums of those of their fields.
        let bytes = unsafe { slice::from_raw_parts(std::ptr::from_ref(parameters).cast(), size_of::<P>()) };
        self.launches += 1;
        let numbers =
            [blocks as usize, kernel.threads() as usize, shared as usize, self.launches as usize, bytes.len()];
        let numbers: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        self.command(b'l', &[name.len()], &[name, &numbers, bytes].concat());
        self.answer(1);
    }

    /// Returns so many bytes from an address on.
    pub fn read(&mut self, at: usize, length: usize) -> Vec<u8> {
        self.command(b'r', &[at, length], &[]);
        self.answer(length)
    }

    fn command(&mut self, kind: u8, numbers: &[usize], bytes: &[u8]) {
        let numbers = [usize::from(kind)].into_iter().chain(numbers.iter().copied());
        let command: Vec<u8> = numbers.flat_map(usize::to_le_bytes).chain(bytes.iter().copied()).collect();
        if self.running.as_mut().unwrap().commands.write_all(&command).is_err() {
            self.fail();
        }
    }

    fn answer(&mut self, length: usize) -> Vec<u8> {
        let mut answer = vec![0; length];
        if self.running.as_mut().unwrap().answers.read_exact(&mut answer).is_err() {
            self.fail();
        }
        answer
    }

    fn fail(&mut self) -> ! {
        let mut why = String::new();
        let said = self.running.as_mut().and_then(|running| running.child.stderr.take());
        let _ = said.map(|mut said| said.read_to_string(&mut why));
        panic!("the kernel fails: {why}");
    }
}

impl Drop for OnHost {
    fn drop(&mut self) {
        if thread::panicking() {
            let mut running = self.running.take().unwrap();
            let _ = (running.child.kill(), running.child.wait());
        } else {
            self.command(b'f', &[], &[]);
            USED.lock().unwrap_or_else(PoisonError::into_inner).extend(self.running.take());
        }
    }
}
