//! Watching one child process: its messages, its silence, its death.

use crate::protocol::Message;
use std::collections::VecDeque;
use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use std::{fmt, io, thread};

/// Names of the signals that end a process, by number (signal(7), Linux).
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

/// How many of the last lines of a worker's standard error are kept.
const LAST_WORDS: usize = 4;

/// Starts of the lines that Python prints after the reason when it aborts: they would displace it.
const TRACE: &[&str] = &["Python runtime state:", "Current thread", "Thread 0x", "File \"", "Extension modules:"];

/// How a worker ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// By an exit code.
    Exit(i32),
    /// By a signal.
    Signal(i32),
    /// Killed after it was silent for this time.
    Silent(Duration),
    /// Killed after it ran for this time.
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
    /// For shrinking the cases in which workers of a pair died, in all.
    pub shrinking: Duration,
}

/// A worker. Dropping it kills the worker.
pub struct Watch {
    child: Child,
    messages: Receiver<Message>,
    errors: Option<JoinHandle<VecDeque<String>>>,
    started: Instant,
    patience: Patience,
}

impl Watch {
    /// Starts a program, the first element of `program`, with the others as arguments and with these variables set.
    ///
    /// # Errors
    ///
    /// It does not start.
    pub fn start(program: &[OsString], environment: &[(&str, String)], patience: Patience) -> io::Result<Self> {
        let (name, arguments) = program.split_first().ok_or(io::ErrorKind::InvalidInput)?;
        let mut command = Command::new(name);
        command
            .args(arguments)
            .envs(environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn()?;
        let (output, errors) = (child.stdout.take(), child.stderr.take());
        let (send, messages) = channel();
        thread::spawn(move || {
            // Other lines come from a framework that prints.
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

    /// Waits for the next message.
    ///
    /// # Errors
    ///
    /// The worker has ended, or was killed because it was late.
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

    /// Returns the last lines of its standard error. Call it when the worker has ended.
    pub fn last_words(&mut self) -> String {
        let lines = self.errors.take().and_then(|errors| errors.join().ok()).unwrap_or_default();
        Vec::from(lines).join(" | ")
    }

    /// Waits for its end. Kills it where it is `late`, or has closed its output and still runs.
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
        // Neither has an effect on a child that was waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
