//! Another process: this test program again, which carries out commands, line by line.

use super::{LONG, PATIENCE, host, share};
use bridge_core::{Adapter, ErrorKind, Options, Result, transfer};
use bridge_ipc::{Client, Exporter, Ipc, IpcTensor, Message, Settings, Ticket, Writing, open, process};
use bridge_ndarray::{HostArray, NdArray};
use rustix::process::{Pid, Resource, Rlimit, Signal, WaitOptions, getrlimit, kill_process, setrlimit, waitpid};
use std::fs::{File, Permissions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, channel};

/// Returns the adapter.
fn ndarray() -> NdArray {
    // SAFETY: the memory of a tensor is used on one thread at a time.
    unsafe { NdArray::new() }
}

/// Set in a process that runs only one test.
const ALONE: &str = "TRUEBRIDGE_TEST_ALONE";

/// Names the folder of the child's own exporter.
const FOLDER: &str = "TRUEBRIDGE_TEST_CHILD";

/// Names the users that the child lets in, separated by commas.
const USERS: &str = "TRUEBRIDGE_TEST_USERS";

/// What comes before an answer, among what the test program prints.
const ANSWER: &str = "answer: ";

/// Runs this test in a process without other tests, and returns `false` there.
///
/// A child has what its parent has open, a fork forever and a program until it starts. So a test that forks, or that
/// needs a file or a socket that no other process has open, disturbs others or is disturbed by them.
pub fn runs_alone() -> bool {
    if std::env::var_os(ALONE).is_some() {
        return false;
    }
    let thread = std::thread::current();
    let test = thread.name().expect("the harness names a test's thread after it");
    let mut command = Command::new(std::env::current_exe().unwrap());
    let done = command.args(["--exact", test, "--nocapture"]).env(ALONE, "").output().unwrap();
    let said = String::from_utf8_lossy(&[done.stdout, done.stderr].concat()).into_owned();
    assert!(done.status.success() && said.contains("1 passed"), "{said}");
    true
}

/// A child, ended with this value.
pub struct Child {
    process: std::process::Child,
    stdin: ChildStdin,
    answers: Receiver<String>,
}

impl Child {
    pub fn new(folder: &Path) -> Self {
        Self::of(Command::new(std::env::current_exe().unwrap()), folder)
    }

    /// Returns a child of another user, whose exporter lets these users in. This process is the superuser's.
    pub fn of_user(user: u32, folder: &Path, users: &[u32]) -> Self {
        // That user may have no access to where the program is.
        let program = folder.join(format!("program-{user}"));
        std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
        std::fs::set_permissions(&program, Permissions::from_mode(0o755)).unwrap();
        let users: Vec<_> = users.iter().map(u32::to_string).collect();
        let mut command = Command::new(program);
        command.uid(user).gid(user).current_dir("/").env(USERS, users.join(","));
        Self::of(command, &folder.join(format!("of-{user}")))
    }

    fn of(mut command: Command, folder: &Path) -> Self {
        command.args(["--exact", "child::other_process", "--ignored", "--nocapture"]).env(FOLDER, folder);
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (stdin, stdout) = (process.stdin.take().unwrap(), process.stdout.take().unwrap());
        let (sender, answers) = channel();
        std::thread::spawn(move || {
            let lines = BufReader::new(stdout).lines().map_while(|line| line.ok());
            let said = lines.filter_map(|line| Some(line.split_once(ANSWER)?.1.to_string()));
            said.map_while(|answer| sender.send(answer).ok()).for_each(drop);
        });
        Self { process, stdin, answers }
    }

    /// Tells the child to do something, and returns its answer.
    pub fn ask(&mut self, line: &str) -> String {
        self.tell(line);
        self.answers.recv_timeout(PATIENCE).unwrap_or_else(|error| panic!("{line}: {error}"))
    }

    /// Tells the child to do something, and does not wait.
    pub fn tell(&mut self, line: &str) {
        writeln!(self.stdin, "{line}").unwrap();
    }

    /// Stops the child, or lets it go on.
    pub fn send(&self, signal: Signal) {
        let process = Pid::from_child(&self.process);
        kill_process(process, signal).unwrap();
        if signal == Signal::STOP {
            waitpid(Some(process), WaitOptions::UNTRACED).unwrap();
        }
    }

    /// Ends the child at once, wherever it is.
    pub fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The program of a child. It is not a test.
#[test]
#[ignore = "the program of the other processes"]
fn other_process() {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    let users = std::env::var(USERS).unwrap_or_default();
    let users = users.split(',').filter_map(|user| user.parse().ok()).collect::<Vec<_>>();
    let settings = Settings::default().with_folder(folder).with_users(users);
    let exporter = Exporter::new(settings).unwrap();
    let mut tensors: Vec<Option<IpcTensor>> = Vec::new();
    let mut client = None;
    for line in std::io::stdin().lines().map_while(|line| line.ok()) {
        let (verb, argument) = line.split_once(' ').unwrap_or((&line, ""));
        let answer = obey(&exporter, &mut client, &mut tensors, verb, argument)
            .unwrap_or_else(|error| format!("{:?}", error.kind()));
        println!("\n{ANSWER}{answer}");
    }
}

/// Files that are open for nothing.
static CROWD: Mutex<Vec<File>> = Mutex::new(Vec::new());

fn obey(
    exporter: &Exporter,
    client: &mut Option<Client>,
    tensors: &mut Vec<Option<IpcTensor>>,
    verb: &str,
    argument: &str,
) -> Result<String> {
    let number = argument.parse::<usize>().unwrap_or_default();
    match verb {
        // Opens a ticket, and says what its bytes are.
        "open" => {
            let opened = open(&argument.parse::<Ticket>()?)?;
            let tensor = opened.tensors.into_iter().next().unwrap();
            let text = read(&tensor)?;
            tensors.push(Some(tensor));
            Ok(text)
        }
        "read" => read(tensors[number].as_ref().unwrap()),
        "write" => {
            let mut array = seen(tensors[number].as_ref().unwrap())?;
            // SAFETY: the view is writable, and no other thread of this process uses it.
            unsafe { array.view_mut::<u8>()? }.fill(9);
            Ok("written".into())
        }
        "drop" => {
            tensors[number] = None;
            Ok("dropped".into())
        }
        "share" => {
            let bytes = argument.bytes().map(|byte| byte - b'0').collect();
            Ok(share(exporter, bytes, Writing::Private, LONG)?.text())
        }
        // Accepts a user, in both directions.
        "accept" => {
            process::configure(Settings::default().with_users(vec![number as u32]))?;
            Ok("accepted".into())
        }
        "connect" => {
            *client = Some(Client::connect(Path::new(argument))?);
            Ok("connected".into())
        }
        "put" => {
            let bytes = argument.bytes().map(|byte| byte - b'0').collect();
            let ticket = share(exporter, bytes, Writing::Never, LONG)?;
            Ok(client.as_ref().unwrap().put("weights", &ticket, 1)?.to_string())
        }
        // Has as many files open as it may, until "room".
        "crowd" => {
            let limits = getrlimit(Resource::Nofile);
            setrlimit(Resource::Nofile, Rlimit { current: Some(64), ..limits }).unwrap();
            CROWD.lock().unwrap().extend(std::iter::from_fn(|| File::open("/dev/null").ok()));
            Ok("full".into())
        }
        "room" => {
            CROWD.lock().unwrap().clear();
            Ok("empty".into())
        }
        // Leaves a fork, which has open what this process has, until no more lines come.
        "fork" => {
            // SAFETY: the child calls only functions of the system, and exits.
            if unsafe { libc::fork() } == 0 {
                let mut byte = 0u8;
                // SAFETY: the pointer is to one byte.
                while unsafe { libc::read(0, (&raw mut byte).cast(), 1) } > 0 {}
                // SAFETY: it ends the child at once.
                unsafe { libc::_exit(0) };
            }
            Ok("forked".into())
        }
        "leases" => Ok(exporter.held().leases.to_string()),
        // Passes on what was opened.
        "pass" => {
            let (from, tensor) = (ipc(), tensors[number].as_ref().unwrap());
            let message = Message::of(&[(&from, tensor)], Some(Writing::Never), &host(), &Options::default())
                .map_err(|failed| failed.error)?;
            let copied = message.transfers()[0].bytes_copied;
            Ok(format!("{copied} {}", message.share(exporter, LONG, None)?.text()))
        }
        _ => panic!("{verb}"),
    }
}

/// Returns the adapter.
pub fn ipc() -> Ipc {
    // SAFETY: the tests write to shared memory in one process and thread at a time, and read it afterwards.
    unsafe { Ipc::new() }
}

/// Returns the tensor for `ndarray`, in place.
pub fn seen(tensor: &IpcTensor) -> Result<HostArray> {
    let options = Options::in_place();
    Ok(transfer(&ipc(), &ndarray(), tensor, &host(), &options)?.0)
}

/// Returns the bytes of a tensor as digits.
pub fn read(tensor: &IpcTensor) -> Result<String> {
    Ok(seen(tensor)?.to_array::<u8>()?.iter().map(|byte| char::from(b'0' + byte)).collect())
}

/// Returns whether the memory is no longer shared.
pub fn is_gone(tensor: &IpcTensor) -> bool {
    tensor.check().is_err_and(|error| error.kind() == ErrorKind::Gone) && ipc().export(tensor).is_err()
}
