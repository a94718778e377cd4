//! Random histories of real processes, against a model.

use super::child::Child;
use super::{Folder, LONG, share, wait_for};
use bridge_ipc::{Exporter, Limits, Ticket, Writing};
use proptest::prelude::*;
use std::collections::BTreeSet;

/// A step. Indices choose among what there is, modulo their number.
#[derive(Debug, Clone)]
enum Step {
    Share,
    Open {
        child: usize,
        share: usize,
    },
    Drop {
        child: usize,
        lease: usize,
    },
    Revoke {
        share: usize,
    },
    /// A child is killed, and another takes its place. With `busy`, it has just been told to open a share.
    Kill {
        child: usize,
        busy: Option<usize>,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let index = 0usize..8;
    prop_oneof![
        2 => Just(Step::Share),
        6 => (index.clone(), index.clone()).prop_map(|(child, share)| Step::Open { child, share }),
        4 => (index.clone(), index.clone()).prop_map(|(child, lease)| Step::Drop { child, lease }),
        1 => index.clone().prop_map(|share| Step::Revoke { share }),
        1 => (index.clone(), prop::option::of(index)).prop_map(|(child, busy)| Step::Kill { child, busy }),
    ]
}

struct Known {
    ticket: Ticket,
    bytes: String,
    open: bool,
}

/// A child, and its leases: the share of each that it has not dropped.
struct Reader {
    child: Child,
    leases: Vec<Option<usize>>,
}

impl Reader {
    fn new(folder: &Folder) -> Self {
        Self { child: Child::new(folder.path()), leases: Vec::new() }
    }
}

fn agree(exporter: &Exporter, shares: &[Known], readers: &[Reader]) {
    let leased: Vec<usize> = readers.iter().flat_map(|reader| reader.leases.iter().flatten().copied()).collect();
    let used: BTreeSet<usize> = leased.iter().copied().collect();
    let kept = (0..shares.len()).filter(|n| shares[*n].open || used.contains(n)).count();
    wait_for(exporter, |held| (held.shares, held.leases) == (kept, leased.len()));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, max_shrink_iters: 20, ..ProptestConfig::default() })]

    /// Whatever processes do and whenever they die, the exporter keeps a share exactly as long as it can be opened or
    /// is leased, readers see the right bytes, and what was revoked is refused.
    #[test]
    fn tables_and_processes_agree(steps in prop::collection::vec(step(), 1..40)) {
        let folder = Folder::new();
        let exporter = folder.exporter(Limits::default());
        let mut shares: Vec<Known> = Vec::new();
        let mut readers: Vec<Reader> = (0..2).map(|_| Reader::new(&folder)).collect();
        for step in steps {
            match step {
                Step::Share => {
                    let bytes: Vec<u8> = (0..5).map(|i| (shares.len() as u8 + i) % 10).collect();
                    let text = bytes.iter().map(|byte| char::from(b'0' + byte)).collect();
                    let ticket = share(&exporter, bytes, Writing::Private, LONG).unwrap();
                    shares.push(Known { ticket, bytes: text, open: true });
                }
                Step::Open { child, share } if !shares.is_empty() => {
                    let (reader, number) = (&mut readers[child % 2], share % shares.len());
                    let answer = reader.child.ask(&format!("open {}", shares[number].ticket.text()));
                    match shares[number].open {
                        true => {
                            prop_assert_eq!(&answer, &shares[number].bytes);
                            reader.leases.push(Some(number));
                        }
                        false => prop_assert_eq!(answer, "Gone"),
                    }
                }
                Step::Drop { child, lease } if !readers[child % 2].leases.is_empty() => {
                    let reader = &mut readers[child % 2];
                    let lease = lease % reader.leases.len();
                    reader.child.ask(&format!("drop {lease}"));
                    reader.leases[lease] = None;
                }
                Step::Revoke { share } if !shares.is_empty() => {
                    let number = share % shares.len();
                    exporter.revoke(&shares[number].ticket).unwrap();
                    shares[number].open = false;
                }
                Step::Kill { child, busy } => {
                    let reader = &mut readers[child % 2];
                    if let Some(number) = busy.filter(|_| !shares.is_empty()) {
                        reader.child.tell(&format!("open {}", shares[number % shares.len()].ticket.text()));
                    }
                    reader.child.kill();
                    *reader = Reader::new(&folder);
                }
                _ => (),
            }
            agree(&exporter, &shares, &readers);
        }
        drop(readers);
        wait_for(&exporter, |held| (held.leases, held.connections) == (0, 0));
    }
}
