//! A hostile server of names: the program that puts and gets is real.

use super::super::channel::interrupted_at;
use super::channel::Channel;
use super::exporter::listen;
use super::{Beside, ErrorKind, Folder, LONG, Limits, PATIENCE, Random, Writing, share, wait_for};
use bridge_ipc::{Client, Ticket};
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const NAMES: [&str; 3] = ["a", "b", "c"];

pub fn play(random: &mut Random, _: &Beside) -> &'static str {
    let (folder, sharing) = (Folder::new(), Folder::new());
    std::fs::create_dir(folder.path()).unwrap();
    let path = folder.path().join("hostile");
    let listener = UnixListener::bind(&path).unwrap();
    let mischief = [0, 0, 3, 30][random.below(4)];
    let seeds = Mutex::new(Random(random.bits()));
    let drawn = || Random(seeds.lock().unwrap().bits());
    let (ended, exporter) = (AtomicBool::new(false), Arc::new(sharing.exporter(Limits::default())));
    std::thread::scope(|scope| {
        scope.spawn(|| listen(&listener, &ended, |socket| serve(Channel::new(socket, mischief), &mut drawn())));
        for _ in 0..1 + random.below(3) {
            let client = Client::connect(&path).unwrap();
            std::thread::scope(|scope| {
                for _ in 0..2 {
                    scope.spawn(|| asks(&client, &exporter, &mut drawn()));
                }
            });
            drop(client);
            wait_for(&exporter, |held| held.shares == 0);
        }
        ended.store(true, Relaxed);
    });
    "names"
}

/// Puts and gets, and sometimes gives up.
fn asks(client: &Client, exporter: &Arc<bridge_ipc::Exporter>, random: &mut Random) {
    for _ in 0..3 + random.below(12) {
        let name = NAMES[random.below(NAMES.len())];
        let (start, patience) = (Instant::now(), Duration::from_millis(random.below(150) as u64));
        let failed = interrupted_at(start + patience, || match random.below(3) {
            0 => {
                let ticket = share(exporter, vec![7], Writing::Never, LONG).unwrap();
                client.put_share(exporter, name, &ticket, 1).err()
            }
            1 => client.list().err(),
            _ => match client.get(name, None) {
                Ok((_, ticket)) => {
                    assert!(ticket.to_string().starts_with(&format!("{name},")), "get({name}) returned {ticket}");
                    None
                }
                Err(error) => Some(error),
            },
        });
        assert!(start.elapsed() < PATIENCE, "a question took {:?}", start.elapsed());
        failed.into_iter().for_each(|error| assert_ne!(error.kind(), ErrorKind::Argument, "{error}"));
    }
}

/// Answers as it should, but for the channel.
fn serve(mut channel: Channel, random: &mut Random) {
    let (mut version, mut put) = (0, Vec::<serde_json::Value>::new());
    let good: Ticket = include_str!("../../../../../fixtures/ipc/ticket.json").parse().unwrap();
    let good: serde_json::Value = serde_json::from_str(&good.text()).unwrap();
    let mut turn = || {
        channel.read()?;
        while let Some((number, body)) = channel.heard() {
            let said: serde_json::Value = serde_json::from_str(&body).unwrap();
            version += 1;
            let body = match (said["do"].as_str().unwrap(), random.below(6)) {
                (_, 0) => r#"{"is":"refused","why":"busy"}"#.into(),
                ("put", _) => {
                    put.push(said["ticket"].clone());
                    format!(r#"{{"is":"stored","version":{version}}}"#)
                }
                ("list", _) => r#"{"is":"listed","names":[]}"#.into(),
                (_, 1) => r#"{"is":"missing"}"#.into(),
                _ => {
                    let mut ticket = good.clone();
                    ticket["about"] = said["name"].clone();
                    format!(r#"{{"is":"found","version":{version},"ticket":{ticket}}}"#)
                }
            };
            channel.say(number, &body, Vec::new());
        }
        if random.below(10) == 0 && !put.is_empty() {
            let ticket = put.swap_remove(random.below(put.len()));
            channel.say(0, &format!(r#"{{"is":"displaced","ticket":{ticket}}}"#), Vec::new());
        }
        channel.step(random)
    };
    while turn().is_some() {}
}
