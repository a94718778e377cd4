//! A hostile process that opens: the exporter is real.

use super::super::wire::{Answer, numbered};
use super::channel::Channel;
use super::{BYTES, Beside, Random, SHARES};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use std::collections::VecDeque;
use std::fs::File;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;

/// Returns a lease after a point on a device that the connection does not use.
const RETURN: &str =
    r#"{"do":"return","lease":1,"points":[{"device":"01010101010101010101010101010101","word":1,"value":1}]}"#;

/// What a question is answered.
struct Asked {
    number: u64,
    /// `None`: it is refused.
    share: Option<u64>,
}

pub fn play(random: &mut Random, beside: &Beside) -> &'static str {
    for _ in 0..1 + random.below(4) {
        let socket = UnixStream::connect(beside.tickets[0].socket()).unwrap();
        let mischief = [0, 3, 30][random.below(3)];
        calls(Channel::new(socket, mischief), random, beside);
    }
    "caller"
}

fn opens(ticket: &bridge_ipc::Ticket, is_forged: bool) -> String {
    let ticket: serde_json::Value = serde_json::from_str(&ticket.text()).unwrap();
    let token = if is_forged { "0".repeat(32).into() } else { ticket["token"].clone() };
    format!(r#"{{"do":"open","share":{},"token":{token}}}"#, ticket["share"])
}

/// Opens tickets and returns leases by the protocol, except where the channel breaks it, and leaves some answers unread.
/// As long as it has kept to the protocol, each answer is that of its question.
fn calls(mut channel: Channel, random: &mut Random, beside: &Beside) {
    let (mut number, mut asked, mut bytes) = (0, VecDeque::new(), Vec::new());
    let (mut files, mut leases, reads) = (VecDeque::new(), Vec::new(), random.below(4) > 0);
    for _ in 0..50 + random.below(400) {
        let questions = [0, 0, 0, 1, 1, 1, 1, 2, 3, 60][random.below(10)];
        for _ in 0..questions {
            let (share, is_forged) = (random.below(SHARES as usize), random.below(8) == 0);
            number += 1 + random.below(2) as u64;
            channel.say(number, &opens(&beside.tickets[share], is_forged), Vec::new());
            asked.push_back(Asked { number, share: (!is_forged).then_some(share as u64) });
        }
        if random.below(3) == 0 && !leases.is_empty() {
            let lease: u64 = leases.swap_remove(random.below(leases.len()));
            channel.say(0, &format!(r#"{{"do":"return","lease":{lease}}}"#), Vec::new());
        }
        if random.below(200) == 0 {
            // It does so without a channel's mischief.
            channel.is_honest = false;
            match random.below(4) {
                3 => channel.say(0, RETURN, Vec::new()),
                0 => channel
                    .waiting
                    .push_back(Answer { bytes: numbered(0, br#"{"do":"return","lease":1}"#), files: vec![] }),
                1 => channel.say(0, &opens(&beside.tickets[0], false), Vec::new()),
                _ => drop(channel.socket().shutdown(Shutdown::Write)),
            }
        }
        let goes_on = channel.step(random);
        if reads && channel.is_honest {
            receive(channel.socket(), &mut bytes, &mut files);
            while let Some((number, body)) = next(&mut bytes) {
                let Asked { number: expected, share } = asked.pop_front().expect("an answer that was not asked for");
                assert_eq!(number, expected);
                let said: serde_json::Value = serde_json::from_str(&body).unwrap();
                assert_eq!(said["is"] == "opened", share.is_some(), "{body}");
                if let Some(share) = share {
                    let file: File = files.pop_front().expect("a descriptor comes with a lease");
                    let mut elements = [0; BYTES];
                    file.read_exact_at(&mut elements, 0).unwrap();
                    assert_eq!(elements, [share as u8; BYTES]);
                    leases.push(said["lease"].as_u64().unwrap());
                }
            }
        }
        if goes_on.is_none() {
            break;
        }
    }
}

/// Takes the next whole frame.
fn next(bytes: &mut Vec<u8>) -> Option<(u64, String)> {
    let len = u32::from_le_bytes(bytes.get(4..8)?.try_into().unwrap()) as usize;
    let number = u64::from_le_bytes(bytes.get(8..16)?.try_into().unwrap());
    let body = String::from_utf8(bytes.get(16..16 + len)?.to_vec()).unwrap();
    bytes.drain(..16 + len);
    Some((number, body))
}

/// Reads what has come, with its descriptors.
fn receive(socket: &UnixStream, bytes: &mut Vec<u8>, files: &mut VecDeque<File>) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let (mut control, mut chunk) = (RecvAncillaryBuffer::new(&mut space), [0; 4096]);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    if let Ok(received) = recvmsg(socket, &mut [IoSliceMut::new(&mut chunk)], &mut control, flags) {
        bytes.extend(&chunk[..received.bytes]);
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(came) = message {
                files.extend(came.map(File::from));
            }
        }
    }
}
