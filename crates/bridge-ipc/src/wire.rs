//! Messages between processes, and their frames.
//!
//! A frame is sixteen bytes and a body: `TB`, the version as one byte, 0, the length of the body in bytes as an
//! unsigned 32-bit number, and the number of the question as one of 64 bits, both lowest byte first. The body is JSON.
//! docs/design/ipc.md specifies it.

use crate::memory::Writing;
use crate::ticket::{Token, VERSION};
use bridge_core::DType;
use serde::de::DeserializeOwned;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::sync::Arc;

/// Bytes of a frame before its body.
pub(crate) const HEADER: usize = 16;

/// Bytes of a header before the number: every version begins with them.
const PREFIX: usize = 8;

/// The number of a message that is neither a question nor an answer.
pub(crate) const UNASKED: u64 = 0;

/// The most bytes of the body of a request.
pub(crate) const MAX_REQUEST: usize = 4 << 10;

/// The most bytes of the body of an answer.
pub(crate) const MAX_ANSWER: usize = 16 << 20;

/// The most descriptors that Linux sends at once (`SCM_MAX_FD`).
pub(crate) const FILES_AT_ONCE: usize = 253;

/// The most descriptors that come with an answer, in four sends: fewer than a process may have under way by default
/// (`RLIMIT_NOFILE`, 1024).
pub(crate) const MAX_FILES: usize = 4 * FILES_AT_ONCE;

/// Messages from a process that opens a share.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Request {
    /// Asks for a lease on a share. A store passes the memory on to other processes, which may use it after its end.
    Open {
        share: u64,
        token: Token,
        #[serde(default, skip_serializing_if = "is_not")]
        persistent: bool,
    },
    /// Returns a lease, after these points. There is no answer. A store that ends returns those that are `lost`: other
    /// processes may still use the memory.
    Return {
        lease: u64,
        #[serde(default, skip_serializing_if = "is_not")]
        lost: bool,
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        points: Vec<Point>,
    },
}

/// Messages from the process that shares.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case", try_from = "Read")]
pub(crate) enum Answer {
    /// A lease, and its content. The descriptors of the segments come with the frame.
    Opened { lease: u64, content: Content },
    /// No lease.
    Refused { why: Why },
    /// The share was revoked: processes with a lease on it return it soon.
    Revoked { share: u64 },
}

/// An [`Answer`] as it is read: field by field, because serde would read an enum with a tag into memory first.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Read {
    is: Is,
    lease: Option<u64>,
    content: Option<Content>,
    why: Option<Why>,
    share: Option<u64>,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Is {
    Opened,
    Refused,
    Revoked,
}

impl TryFrom<Read> for Answer {
    type Error = &'static str;

    fn try_from(read: Read) -> Result<Self, Self::Error> {
        match read {
            Read { is: Is::Opened, lease: Some(lease), content: Some(content), why: None, share: None } => {
                Ok(Self::Opened { lease, content })
            }
            Read { is: Is::Refused, why: Some(why), lease: None, content: None, share: None } => {
                Ok(Self::Refused { why })
            }
            Read { is: Is::Revoked, share: Some(share), lease: None, content: None, why: None } => {
                Ok(Self::Revoked { share })
            }
            _ => Err("an answer lacks a field, or has one of another"),
        }
    }
}

/// Why a process gets no lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Why {
    /// It is of another user.
    Denied,
    /// The share never existed or has ended, or the token belongs to another one.
    Unknown,
    /// There are as many connections or leases as allowed.
    Busy,
    /// It violates this protocol.
    Protocol,
    /// It speaks another version.
    Version,
    /// The driver failed there.
    Failed,
    /// A store has no room for more bytes.
    Full,
    /// The memory ends with its process, so that a store cannot keep it.
    NotPersistent,
}

pub(crate) fn is_not(flag: &bool) -> bool {
    !flag
}

/// What a share holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Content {
    pub(crate) segments: Vec<Segment>,
    pub(crate) tensors: Arc<[Described]>,
    /// The work to wait for before the tensors are touched.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) points: Vec<Point>,
    /// The tree of the tensors, as the process that made the share describes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tree: Option<String>,
    /// Whether a store shares it: descriptors keep its memory, also after the end of that process.
    #[serde(default, skip_serializing_if = "is_not")]
    pub(crate) persistent: bool,
}

impl Content {
    /// Returns how many descriptors come with it: those of its segments, and the page of its points.
    pub(crate) fn files(&self) -> usize {
        let page = self.points.iter().any(|point| matches!(point, Point::Word { .. }));
        self.segments.iter().fold(usize::from(page), |sum, segment| sum.saturating_add(segment.files()))
    }
}

/// Memory that holds tensors, and how to open it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "transport", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Segment {
    /// A sealed file in memory: one descriptor.
    File { nbytes: usize, writing: Writing },
    /// Memory of a device, by a handle of the driver and its number in the process with this random number. No
    /// descriptor.
    Handle { device: Uuid, process: Hex<16>, handle: Hex<64>, number: u64, nbytes: usize, writing: Writing },
    /// Memory of a device, from a pool: its descriptor, and the driver's name of the allocation in this process.
    Pool { device: Uuid, process: Hex<16>, pointer: Hex<64>, nbytes: usize, writing: Writing },
    /// Virtual memory of a device: allocations mapped side by side, each with its length in bytes and its number in the
    /// process with this random number. A descriptor for each.
    Files { device: Uuid, process: Hex<16>, parts: Vec<(usize, u64)>, writing: Writing },
}

/// What names a device in every process.
pub(crate) type Uuid = Hex<16>;

/// A point in the work of a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, deny_unknown_fields)]
pub(crate) enum Point {
    /// A word of the connection's page, by its number, reaches a value. The page is a descriptor of the answer.
    Word { device: Uuid, word: usize, value: u64 },
    /// An event of the driver, by its handle.
    Event { device: Uuid, event: Hex<64> },
}

/// Bytes as hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Hex<const N: usize>(pub(crate) [u8; N]);

impl<const N: usize> Serialize for Hex<N> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let digit = |nibble: u8| char::from_digit(nibble.into(), 16).expect("a nibble is a digit");
        let text: String = self.0.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect();
        serializer.serialize_str(&text)
    }
}

impl<'de, const N: usize> Deserialize<'de> for Hex<N> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let nibble = |digit: u8| char::from(digit).to_digit(16).filter(|_| !digit.is_ascii_uppercase());
        let byte = |pair: &[u8]| Some((nibble(pair[0])? << 4 | nibble(pair[1])?) as u8);
        let bytes: Option<Vec<u8>> =
            text.as_bytes().chunks(2).map(|pair| (pair.len() == 2).then(|| byte(pair))?).collect();
        let bytes = bytes.and_then(|bytes| bytes.try_into().ok());
        bytes.map(Self).ok_or_else(|| D::Error::custom(format_args!("expected {N} bytes in hexadecimal")))
    }
}

impl Segment {
    /// Returns who may write to it.
    pub(crate) fn writing(&self) -> Writing {
        match self {
            Self::File { writing, .. }
            | Self::Handle { writing, .. }
            | Self::Pool { writing, .. }
            | Self::Files { writing, .. } => *writing,
        }
    }

    /// Returns the same memory for other processes, which may write as `as_asked` says.
    pub(crate) fn with_writing(mut self, as_asked: Writing) -> Self {
        match &mut self {
            Self::File { writing, .. }
            | Self::Handle { writing, .. }
            | Self::Pool { writing, .. }
            | Self::Files { writing, .. } => *writing = as_asked,
        }
        self
    }

    /// Returns its length in bytes; `None` for lengths that no memory has.
    #[cfg(feature = "cuda")]
    pub(crate) fn nbytes(&self) -> Option<usize> {
        match self {
            Self::File { nbytes, .. } | Self::Handle { nbytes, .. } | Self::Pool { nbytes, .. } => Some(*nbytes),
            Self::Files { parts, .. } => {
                parts.iter().try_fold(0usize, |sum, (nbytes, _)| sum.checked_add(*nbytes)).filter(|sum| *sum > 0)
            }
        }
    }

    /// Returns whether descriptors keep its memory: it needs no process.
    pub(crate) fn outlives(&self) -> bool {
        matches!(self, Self::File { .. } | Self::Files { .. })
    }

    /// Returns how many descriptors come with it.
    pub(crate) fn files(&self) -> usize {
        match self {
            Self::File { .. } | Self::Pool { .. } => 1,
            Self::Handle { .. } => 0,
            Self::Files { parts, .. } => parts.len(),
        }
    }
}

/// A tensor in a segment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Described {
    pub(crate) segment: usize,
    /// From the start of the segment to its first element, in bytes.
    pub(crate) offset: usize,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<i64>,
    /// In elements.
    pub(crate) strides: Vec<i64>,
}

/// Returns a message as a frame: a question with its number, the answer to the question of that number, or a notice
/// ([`UNASKED`]).
pub(crate) fn frame(number: u64, message: &impl Serialize) -> Vec<u8> {
    let mut bytes = vec![b'T', b'B', VERSION as u8, 0, 0, 0, 0, 0];
    bytes.extend(number.to_le_bytes());
    serde_json::to_writer(&mut bytes, message).expect("messages are numbers and strings");
    let len = u32::try_from(bytes.len() - HEADER).expect("contents are bounded when they are shared");
    bytes[4..PREFIX].copy_from_slice(&len.to_le_bytes());
    bytes
}

/// The bytes that have come in, as frames.
#[derive(Debug)]
pub(crate) struct Frames {
    bytes: Vec<u8>,
    /// The most bytes of a body.
    limit: usize,
}

impl Frames {
    pub(crate) fn new(limit: usize) -> Self {
        Self { bytes: Vec::new(), limit }
    }

    pub(crate) fn add(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Returns how many bytes are missing to the end of the next frame's header, or of its body once that is known. Not 0
    /// after [`Self::next`] has found no whole frame.
    pub(crate) fn missing(&self) -> usize {
        let whole = match self.bytes.first_chunk::<HEADER>() {
            Some([_, _, _, _, a, b, c, d, ..]) => HEADER + u32::from_le_bytes([*a, *b, *c, *d]) as usize,
            None => HEADER,
        };
        whole.saturating_sub(self.bytes.len())
    }

    /// Returns the next message and its number, once it is whole.
    ///
    /// # Errors
    ///
    /// [`Why::Version`] and [`Why::Protocol`]. What comes after cannot be read then.
    pub(crate) fn next<M: DeserializeOwned>(&mut self) -> Result<Option<(u64, M)>, Why> {
        let Some((header, rest)) = self.bytes.split_first_chunk::<PREFIX>() else { return Ok(None) };
        let [b'T', b'B', version, 0, len @ ..] = *header else { return Err(Why::Protocol) };
        if u32::from(version) != VERSION {
            return Err(Why::Version);
        }
        let len = u32::from_le_bytes(len) as usize;
        if len > self.limit {
            return Err(Why::Protocol);
        }
        let Some((number, rest)) = rest.split_first_chunk() else { return Ok(None) };
        let Some(body) = rest.get(..len) else { return Ok(None) };
        let number = u64::from_le_bytes(*number);
        let message = serde_json::from_slice(body).map_err(|_| Why::Protocol)?;
        self.bytes.drain(..HEADER + len);
        Ok(Some((number, message)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn returned(lease: u64) -> Request {
        Request::Return { lease, lost: false, points: Vec::new() }
    }

    fn token() -> Token {
        serde_json::from_str("\"000102030405060708090a0b0c0d0e0f\"").unwrap()
    }

    fn opened() -> Answer {
        let tensors = vec![
            Described { segment: 0, offset: 0, dtype: DType::FLOAT32, shape: vec![2, 3], strides: vec![3, 1] },
            Described { segment: 0, offset: 64, dtype: DType::BFLOAT16, shape: vec![], strides: vec![] },
        ];
        let segments = vec![Segment::File { nbytes: 128, writing: Writing::Private }];
        Answer::Opened {
            lease: 1,
            content: Content {
                segments,
                tensors: tensors.into(),
                points: Vec::new(),
                tree: Some("[0,1]".into()),
                persistent: false,
            },
        }
    }

    /// One message a line, as another program would send it.
    #[test]
    fn messages_are_golden_ones() {
        let event = vec![Point::Event { device: Hex([1; 16]), event: Hex([0x2f; 64]) }];
        let points = |word| vec![Point::Word { device: Hex([1; 16]), word, value: 12 }];
        let requests = [
            Request::Open { share: 7, token: token(), persistent: false },
            Request::Open { share: 7, token: token(), persistent: true },
            returned(1),
            Request::Return { lease: 1, lost: false, points: points(3) },
            Request::Return { lease: 1, lost: false, points: event.clone() },
            Request::Return { lease: 1, lost: true, points: Vec::new() },
        ];
        let segments = vec![
            Segment::Handle {
                device: Hex([1; 16]),
                process: Hex([2; 16]),
                handle: Hex([0xa0; 64]),
                number: 918,
                nbytes: 2 << 20,
                writing: Writing::Shared,
            },
            Segment::Files {
                device: Hex([1; 16]),
                process: Hex([2; 16]),
                parts: vec![(2 << 20, 54), (20 << 20, 55)],
                writing: Writing::Never,
            },
            Segment::Pool {
                device: Hex([1; 16]),
                process: Hex([2; 16]),
                pointer: Hex([0xb0; 64]),
                nbytes: 4096,
                writing: Writing::Shared,
            },
        ];
        let on_a_device =
            Content { segments, tensors: Arc::default(), points: points(2), tree: None, persistent: false };
        let by_events = Content { segments: Vec::new(), points: event, ..on_a_device.clone() };
        let kept = Content { points: Vec::new(), persistent: true, ..by_events.clone() };
        let answers = [
            opened(),
            Answer::Opened { lease: 2, content: on_a_device },
            Answer::Opened { lease: 3, content: by_events },
            Answer::Opened { lease: 4, content: kept },
            Answer::Refused { why: Why::Unknown },
            Answer::Refused { why: Why::Denied },
            Answer::Revoked { share: 7 },
        ];
        let lines = |lines: Vec<String>| lines.join("\n") + "\n";
        let requests = lines(requests.iter().map(|message| serde_json::to_string(message).unwrap()).collect());
        let answers = lines(answers.iter().map(|message| serde_json::to_string(message).unwrap()).collect());
        assert_eq!(requests + &answers, include_str!("../../../fixtures/ipc/messages.jsonl"));
    }

    /// Handles of the driver have any bytes.
    #[test]
    fn every_byte_is_read_from_its_digits() {
        for first in [0u8, 64, 128, 192] {
            let bytes = Hex::<64>(std::array::from_fn(|i| first + i as u8));
            let text = serde_json::to_string(&bytes).unwrap();
            assert_eq!(serde_json::from_str::<Hex<64>>(&text).unwrap(), bytes, "{text}");
        }
        assert_eq!(serde_json::from_str::<Hex<2>>("\"0fA0\"").ok(), None, "one text for each value");
    }

    /// Messages up to the limit are accepted: what is sent is compared with the same number.
    #[test]
    fn a_frame_as_long_as_the_limit_is_read() {
        let message = frame(7, &returned(1));
        let read = |limit| {
            let mut frames = Frames::new(limit);
            frames.add(&message);
            frames.next::<Request>()
        };
        let length = message.len() - HEADER;
        assert_eq!(read(length), Ok(Some((7, returned(1)))));
        assert_eq!(read(length - 1), Err(Why::Protocol));
    }

    #[test]
    fn an_answer_has_its_own_fields_and_no_others() {
        let read = serde_json::from_str::<Answer>;
        assert_eq!(read(r#"{"share":7,"is":"revoked"}"#).unwrap(), Answer::Revoked { share: 7 });
        for wrong in [
            r#"{"is":"revoked"}"#,
            r#"{"is":"revoked","share":7,"lease":1}"#,
            r#"{"is":"refused","why":"busy","share":7}"#,
            r#"{"is":"refused","share":7}"#,
            r#"{"is":"opened","lease":1}"#,
            r#"{"is":"opened","lease":1,"content":{"segments":[],"tensors":[]},"why":"busy"}"#,
            r#"{"is":"opened","lease":1,"content":{"segments":[],"tensors":[]},"more":1}"#,
        ] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
        assert!(read(r#"{"is":"opened","lease":1,"content":{"segments":[],"tensors":[]}}"#).is_ok());
    }

    #[test]
    fn a_frame_of_another_kind_is_refused() {
        let good = frame(7, &returned(1));
        let with = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            let mut frames = Frames::new(MAX_REQUEST);
            frames.add(&bytes);
            frames.next::<Request>()
        };
        assert_eq!(with(0, b'T'), Ok(Some((7, returned(1)))));
        assert_eq!(with(0, b'X'), Err(Why::Protocol));
        assert_eq!(with(2, 1), Err(Why::Version));
        assert_eq!(with(3, 1), Err(Why::Protocol));
        assert_eq!(with(6, 1), Err(Why::Protocol), "longer than allowed");
        assert_eq!(with(PREFIX, 8), Ok(Some((8, returned(1)))));
        assert_eq!(with(HEADER, b'!'), Err(Why::Protocol));
    }

    proptest! {
        /// Messages are read as they were written, wherever the stream is cut.
        #[test]
        fn frames_survive_any_cut(leases in prop::collection::vec(any::<u64>(), 0..6), cuts in prop::collection::vec(1usize..40, 1..20)) {
            let bytes: Vec<u8> = leases.iter().flat_map(|lease| frame(*lease, &returned(*lease))).collect();
            let (mut frames, mut found, mut rest) = (Frames::new(MAX_REQUEST), Vec::new(), &bytes[..]);
            for cut in cuts.iter().cycle() {
                let (now, later) = rest.split_at(rest.len().min(*cut));
                frames.add(now);
                rest = later;
                while let Some(message) = frames.next::<Request>().unwrap() {
                    found.push(message);
                }
                if rest.is_empty() {
                    break;
                }
            }
            prop_assert_eq!(found, leases.into_iter().map(|lease| (lease, returned(lease))).collect::<Vec<_>>());
        }

        /// Hostile bytes are refused, or more bytes are waited for; no more of a frame is kept than the limit.
        #[test]
        fn any_bytes_are_read(bytes in prop::collection::vec(any::<u8>(), 0..200), framed in any::<bool>()) {
            let mut frames = Frames::new(MAX_REQUEST);
            if framed {
                frames.add(&[b'T', b'B', VERSION as u8, 0, bytes.len() as u8, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
            }
            frames.add(&bytes);
            while let Ok(Some(_)) = frames.next::<Request>() {}
        }
    }
}
