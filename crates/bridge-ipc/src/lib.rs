//! Tensors of one process in another: tickets, leases, and their memory.
//!
//! A process puts tensors of any framework into a [`Message`] and shares it through its [`Exporter`], for a [`Ticket`]:
//! a line of text. Another process [`open`]s the ticket, and imports the tensors in place, in any framework that it
//! uses. The first process keeps the memory until the ticket has expired and every process that opened it has dropped
//! the tensors or has ended.
//!
//! ```
//! use bridge_core::{HostOnly, Options, Ordering, transfer};
//! use bridge_ipc::{Exporter, Ipc, Message, Settings, Ticket, Writing, open};
//! use bridge_ndarray::{HostArray, NdArray};
//! use ndarray::array;
//! use std::sync::Arc;
//! use std::time::Duration;
//!
//! let ordering: Arc<dyn Ordering> = Arc::new(HostOnly);
//! # let folder = std::env::temp_dir().join(format!("truebridge-doc-{}", std::process::id()));
//! # let settings = Settings::default().with_folder(folder.clone());
//! # let _ = "
//! let settings = Settings::default();
//! # ";
//! let exporter = Exporter::new(settings)?;
//! // SAFETY: the program uses the memory of a tensor on one thread at a time.
//! let (from, tensor) = (unsafe { NdArray::new() }, HostArray::from(array![[1.0f32, 2.0], [3.0, 4.0]]));
//! let message = Message::of(&[(&from, &tensor)], Some(Writing::Private), &ordering, &Options::default());
//! let message = message.map_err(|failed| failed.error)?;
//! let ticket = message.share(&exporter, Duration::from_secs(60), None)?.text();
//!
//! // Usually in another process.
//! let opened = open(&ticket.parse::<Ticket>()?)?;
//! // SAFETY: the program uses the memory of a tensor on one thread at a time, and each process has its own.
//! let (ipc, to) = unsafe { (Ipc::new(), NdArray::new()) };
//! let (seen, done) = transfer(&ipc, &to, &opened.tensors[0], &ordering, &Options::default())?;
//! assert_eq!(done.bytes_copied, 0);
//! assert_eq!(seen.to_array::<f32>()?, array![[1.0, 2.0], [3.0, 4.0]].into_dyn());
//! assert_eq!(exporter.held().leases, 1);
//! # drop((seen, opened, exporter));
//! # let _ = std::fs::remove_dir(folder);
//! # Ok::<(), bridge_core::Error>(())
//! ```
//!
//! # Memory
//!
//! Tensors on the host are copied once, into sealed memory of the system (`memfd_create`), whose descriptor goes
//! through the socket. [`Writing`] says who may write to it. With the feature `cuda`, tensors on a GPU are shared in
//! place where their allocator allows that ([`transport`]), in stream order in both directions; without it they are
//! refused.
//!
//! # Who may open
//!
//! The socket lies in a folder that only this user may enter, and a ticket has 128 random bits. The system says which
//! user is at the other end, and both ends refuse users that are not named ([`process::configure`]). A process with a
//! ticket sees the tensors of its share, and nothing else of the process that shares.

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod allocations;
mod channel;
#[cfg(feature = "cuda")]
mod device;
#[cfg(not(feature = "cuda"))]
#[path = "no_device.rs"]
mod device;
mod exporter;
mod importer;
mod memory;
mod message;
#[cfg(all(test, shuttle))]
mod models;
mod names;
mod own;
pub mod process;
mod publication;
mod server;
mod settings;
mod socket;
mod sync;
mod tensor;
mod ticket;
mod wire;

pub use allocations::{Spec, allocate, empty, free};
pub use channel::while_waiting;
pub use exporter::{Exporter, Held};
pub use importer::{Leases, Opened, StaysMapped, check, is_leasing, open};
pub use memory::Writing;
pub use message::{Message, Transport, transport};
pub use names::{About, Client, LISTED, Listed, Names, Watch, check_name};
pub use publication::{Draft, Publication};
pub use settings::{Limits, Settings};
pub use tensor::{Ipc, IpcTensor};
pub use ticket::{MAX_TICKET, Ticket, Token};
