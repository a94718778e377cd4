//! Tickets: a process passes one to another, which opens a share with it.

use crate::memory::failed;
use bridge_core::{Error, ErrorKind, Result};
use rustix::rand::{GetRandomFlags, getrandom};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::time::{SystemTime, UNIX_EPOCH};
use subtle::ConstantTimeEq;

/// The most bytes of a ticket's text.
pub const MAX_TICKET: usize = 512;

/// The version of tickets and of messages.
pub const VERSION: u32 = 4;

/// The most letters of the description in a ticket.
const MAX_ABOUT: usize = 120;

/// 128 random bits. A process that knows them may open the share.
#[derive(Clone, Copy)]
pub struct Token([u8; 16]);

/// Returns random numbers from the system.
pub(crate) fn random() -> Result<[u8; 16]> {
    let mut bytes = [0; 16];
    let filled = getrandom(&mut bytes, GetRandomFlags::empty()).map_err(failed("cannot read random numbers"))?;
    match filled {
        16 => Ok(bytes),
        _ => Err(Error::new(ErrorKind::Missing, "the system gave too few random numbers: try again")),
    }
}

impl Token {
    /// Returns a new token, from the system's random numbers.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Missing`] where the system has none.
    pub fn random() -> Result<Self> {
        random().map(Self)
    }
}

/// Compares in a time that does not depend on the bits.
impl PartialEq for Token {
    fn eq(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl Eq for Token {}

/// Does not show the bits.
impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

impl Serialize for Token {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{:032x}", u128::from_be_bytes(self.0)))
    }
}

impl<'de> Deserialize<'de> for Token {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let digits = text.len() == 32 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        let number = digits.then(|| u128::from_str_radix(&text, 16).ok()).flatten();
        let number = number.ok_or_else(|| serde::de::Error::custom("a token is 32 hexadecimal digits"))?;
        Ok(Self(number.to_be_bytes()))
    }
}

/// Lets every process that has it open one share. It is text of at most [`MAX_TICKET`] bytes, holds no code, and may be
/// passed on by any means and opened many times, until it expires or the share is revoked.
///
/// [`Display`](fmt::Display) describes it, without the token. [`text`](Self::text) is what to pass on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Fields")]
#[must_use = "without its ticket no process opens what was shared"]
pub struct Ticket {
    /// Always [`VERSION`].
    #[serde(rename = "truebridge")]
    version: u32,
    /// An absolute path.
    socket: String,
    share: u64,
    token: Token,
    /// Seconds since 1970.
    expires: u64,
    /// Without control characters.
    about: String,
}

/// A [`Ticket`] as it is read.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields {
    truebridge: u32,
    socket: String,
    share: u64,
    token: Token,
    expires: u64,
    about: String,
}

impl TryFrom<Fields> for Ticket {
    type Error = &'static str;

    fn try_from(read: Fields) -> std::result::Result<Self, Self::Error> {
        let Fields { truebridge: version, socket, share, token, expires, about } = read;
        if version != VERSION {
            return Err("it is of another version");
        }
        if !Path::new(&socket).is_absolute() || socket.contains('\0') {
            return Err("its socket is not an absolute path");
        }
        if about.chars().any(char::is_control) {
            return Err("its description has control characters");
        }
        let ticket = Self { version, socket, share, token, expires, about };
        if ticket.text().len() > MAX_TICKET { Err("it is too long") } else { Ok(ticket) }
    }
}

impl Ticket {
    pub(crate) fn new(socket: &Path, share: u64, token: Token, expires: u64, about: &str) -> Result<Self> {
        let socket = socket.to_str().ok_or_else(|| {
            Error::new(
                ErrorKind::Argument,
                "the folder of the sockets is not valid UTF-8: name another in TRUEBRIDGE_IPC",
            )
        })?;
        let about = about.chars().filter(|letter| !letter.is_control()).take(MAX_ABOUT).collect();
        let mut ticket = Self { version: VERSION, socket: socket.into(), share, token, expires, about };
        while ticket.text().len() > MAX_TICKET && ticket.about.pop().is_some() {}
        Ok(ticket)
    }

    /// Returns the text to pass to another process: one line of JSON.
    pub fn text(&self) -> String {
        serde_json::to_string(self).expect("numbers and strings are JSON")
    }

    /// Returns the socket of the process that shares.
    pub fn socket(&self) -> &Path {
        Path::new(&self.socket)
    }

    /// Returns its description of the tensors.
    pub(crate) fn about(&self) -> &str {
        &self.about
    }

    pub(crate) fn share(&self) -> (u64, Token) {
        (self.share, self.token)
    }

    /// Returns the seconds until the ticket expires, by this machine's clock; `None` afterwards.
    pub fn remaining(&self) -> Option<u64> {
        self.expires.checked_sub(now())
    }
}

/// Returns the seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

impl fmt::Display for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.remaining() {
            Some(seconds) => write!(f, "{}, expires in {seconds} s", self.about),
            None => write!(f, "{}, expired", self.about),
        }
    }
}

impl FromStr for Ticket {
    type Err = Error;

    /// Reads the text of a ticket.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Argument`] for other text, [`ErrorKind::Version`] for a ticket of another version.
    fn from_str(text: &str) -> Result<Self> {
        #[derive(Deserialize)]
        struct Version {
            truebridge: u32,
        }
        let no_ticket = |why: &dyn fmt::Display| {
            let text = format!("this is not a ticket ({why}): pass the whole text of one, ticket.text in Python");
            Error::new(ErrorKind::Argument, text)
        };
        if text.len() > MAX_TICKET {
            return Err(no_ticket(&format_args!("it is longer than {MAX_TICKET} bytes")));
        }
        // Without this, serde would accept a list of the fields for a struct.
        if !text.trim_start().starts_with('{') {
            return Err(no_ticket(&"it does not begin with a brace"));
        }
        let Version { truebridge: version } =
            serde_json::from_str(text).map_err(|error| no_ticket(&error).caused_by(error))?;
        if version != VERSION {
            let text = format!(
                "the ticket is of version {version}, and this process knows {VERSION}: use one version of truebridge in both"
            );
            return Err(Error::new(ErrorKind::Version, text));
        }
        serde_json::from_str(text).map_err(|error| no_ticket(&error).caused_by(error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ticket(about: &str) -> Ticket {
        let token = Token(*b"0123456789abcdef");
        Ticket::new(Path::new("/run/user/1000/truebridge/42.sock"), 7, token, 4_000_000_000, about).unwrap()
    }

    #[test]
    fn the_text_is_a_golden_one() {
        let text = include_str!("../../../fixtures/ipc/ticket.json").trim_end();
        assert_eq!(ticket("torch float32 [64, 256] on cpu").text(), text);
        assert_eq!(text.parse::<Ticket>().unwrap(), ticket("torch float32 [64, 256] on cpu"));
    }

    #[test]
    fn a_ticket_is_short_and_plain() {
        for about in ["x".repeat(1000), "\u{1F600}\"\\".repeat(300), "a\nb\0c".into()] {
            let ticket = ticket(&about);
            assert!(ticket.text().len() <= MAX_TICKET);
            assert!(!ticket.to_string().contains(char::is_control));
            assert_eq!(ticket.text().parse::<Ticket>().unwrap(), ticket);
        }
        let path = Path::new("/").join("p".repeat(107));
        let longest = Ticket::new(&path, u64::MAX, Token([255; 16]), u64::MAX, &"\"".repeat(500)).unwrap();
        assert!(longest.text().len() <= MAX_TICKET);
    }

    #[test]
    fn a_ticket_expires() {
        let until = |expires| Ticket::new(Path::new("/x"), 7, Token([0; 16]), expires, "x").unwrap();
        assert_eq!((until(1_700_000_000).remaining(), until(u64::MAX).remaining().is_some()), (None, true));
        assert_eq!(until(1_700_000_000).to_string(), "x, expired");
    }

    #[test]
    fn the_token_is_not_shown() {
        let ticket = ticket("x");
        let hidden = "30313233";
        assert!(ticket.text().contains(hidden));
        assert!(!format!("{ticket} {ticket:?}").contains(hidden));
    }

    #[test]
    fn other_text_is_refused() {
        let good = ticket("x").text();
        let bad = [
            ("", ErrorKind::Argument),
            ("{}", ErrorKind::Argument),
            ("[1]", ErrorKind::Argument),
            (&good[..good.len() - 1], ErrorKind::Argument),
            (&good.replace("\"truebridge\":4", "\"truebridge\":2"), ErrorKind::Version),
            (&good.replace("/run", "run"), ErrorKind::Argument),
            (&good.replace("/run", "/r\\u0000un"), ErrorKind::Argument),
            (&good.replace("30313233", "3031323X"), ErrorKind::Argument),
            (&good.replace("30313233", "+0313233"), ErrorKind::Argument),
            (&good.replace("\"share\":7", "\"share\":-7"), ErrorKind::Argument),
            (&good.replace("\"share\":7", "\"share\":7,\"more\":1"), ErrorKind::Argument),
            (&good.replace("\"x\"", "\"\\u001b[31m\""), ErrorKind::Argument),
            (&" ".repeat(MAX_TICKET + 1), ErrorKind::Argument),
            (&(" ".repeat(MAX_TICKET) + &good), ErrorKind::Argument),
        ];
        for (text, kind) in bad {
            assert_eq!(text.parse::<Ticket>().unwrap_err().kind(), kind, "{text}");
        }
    }
}
