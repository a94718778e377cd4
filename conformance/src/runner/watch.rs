//! Watching one child process: its messages, its silence, its death.

use super::protocol::Message;
use std::collections::VecDeque;
use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use std::{fmt, io, thread};

/// The signals that a process dies of, by number (signal(7), Linux).
const SIGNALS: &[(i32, &str)] = &[
    (4, "SIGILL"),
    (5, "SIGTRAP"),
    (6, "SIGABRT"),
    (7, "SIGBUS"),
    (8, "SIGFPE"),
    (9, "SIGKILL"),
    (11, "SIGSEGV"),
    (15, "SIGTERM"),
    (31, "SIGSYS"),
];

/// So many of the last lines that a worker wrote to its standard error are kept.
const LAST_WORDS: usize = 4;

/// How the lines begin that Python adds when it dies, after it has said why: they would drive that out.
const TRACE: &[&str] = &["Python runtime state:", "Current thread", "Thread 0x", "File \"", "Extension modules:"];

/// How a worker ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// By itself.
    Exit(i32),
    /// By a signal.
    Signal(i32),
    /// It said nothing for so long, and was killed.
    Silent(Duration),
    /// It went on for so long, and was killed.
    Overdue(Duration),
}

impl From<ExitStatus> for Ending {
    fn from(status: ExitStatus) -> Self {
        status.signal().map_or_else(|| Self::Exit(status.code().unwrap_or(-1)), Self::Signal)
    }
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exit(code) => write!(f, "the process ended with exit code {code}"),
            Self::Signal(number) => match SIGNALS.iter().find(|(known, _)| known == number) {
                Some((_, name)) => write!(f, "the process died of {name}"),
                None => write!(f, "the process died of signal {number}"),
            },
            Self::Silent(time) => write!(f, "the process hung for {} s and was killed", time.as_secs_f64()),
            Self::Overdue(time) => write!(f, "the process took longer than {} s and was killed", time.as_secs_f64()),
        }
    }
}

/// How long a worker may take.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    /// Between two messages.
    pub silence: Duration,
    /// In all.
    pub whole: Duration,
}

/// A worker, which is killed when this is dropped.
pub struct Watch {
    child: Child,
    messages: Receiver<Message>,
    errors: Option<JoinHandle<VecDeque<String>>>,
    started: Instant,
    patience: Patience,
}

impl Watch {
    /// Starts `program`, its first element, with the others as arguments, and with these variables set.
    ///
    /// # Errors
    ///
    /// It does not start.
    pub fn start(program: &[OsString], environment: &[(&str, &str)], patience: Patience) -> io::Result<Self> {
        let (name, arguments) = program.split_first().ok_or(io::ErrorKind::InvalidInput)?;
        let mut command = Command::new(name);
        command
            .args(arguments)
            .envs(environment.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn()?;
        let (output, errors) = (child.stdout.take(), child.stderr.take());
        let (send, messages) = channel();
        thread::spawn(move || {
            // A line that is no message is what a framework prints: nothing to do with us.
            let lines = output.into_iter().flat_map(|output| BufReader::new(output).split(b'\n')).map_while(Result::ok);
            for message in lines.filter_map(|line| serde_json::from_slice(&line).ok()) {
                if send.send(message).is_err() {
                    break;
                }
            }
        });
        let errors = thread::spawn(move || {
            let mut last = VecDeque::new();
            let lines = errors.into_iter().flat_map(|errors| BufReader::new(errors).split(b'\n')).map_while(Result::ok);
            for line in lines.map(|line| String::from_utf8_lossy(&line).trim().to_owned()) {
                if !line.is_empty() && !TRACE.iter().any(|start| line.starts_with(start)) {
                    last.push_back(line);
                }
                if last.len() > LAST_WORDS {
                    last.pop_front();
                }
            }
            last
        });
        Ok(Self { child, messages, errors: Some(errors), started: Instant::now(), patience })
    }

    /// Waits for what it says next.
    ///
    /// # Errors
    ///
    /// It is gone.
    pub fn next(&mut self) -> Result<Message, Ending> {
        let left = self.patience.whole.saturating_sub(self.started.elapsed());
        self.messages.recv_timeout(left.min(self.patience.silence)).map_err(|error| match error {
            RecvTimeoutError::Disconnected => self.reap(None),
            RecvTimeoutError::Timeout if left <= self.patience.silence => {
                self.reap(Some(Ending::Overdue(self.patience.whole)))
            }
            RecvTimeoutError::Timeout => self.reap(Some(Ending::Silent(self.patience.silence))),
        })
    }

    /// The last lines that it wrote to its standard error. Call it when the worker has ended.
    pub fn last_words(&mut self) -> String {
        let lines = self.errors.take().and_then(|errors| errors.join().ok()).unwrap_or_default();
        Vec::from(lines).join(" | ")
    }

    /// Sees it off: kills it where `late` says why, or where it has closed its output and still does not end.
    fn reap(&mut self, late: Option<Ending>) -> Ending {
        let patience = Instant::now() + Duration::from_secs(10);
        while late.is_none() && Instant::now() < patience {
            match self.child.try_wait() {
                Ok(Some(status)) => return status.into(),
                Ok(None) => thread::sleep(Duration::from_millis(5)),
                Err(_) => break,
            }
        }
        let _ = self.child.kill();
        let status = self.child.wait();
        late.or_else(|| status.ok().map(Ending::from)).unwrap_or(Ending::Exit(-1))
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // Neither does anything to a child that has been waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
