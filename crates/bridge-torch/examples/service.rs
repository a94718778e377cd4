//! A service that holds a frozen graph of TensorFlow 1.15, and answers requests with tensors of `tch`. Nothing is copied,
//! and there is no Python in the process.
//!
//! ```sh
//! LIBTORCH_USE_PYTORCH=1 cargo run -p truebridge-torch --no-default-features --features tch --example service
//! ```
//!
//! `cargo xtask setup` fetches TensorFlow 1.15; an argument names another folder, and a second one another graph from
//! `x:0` to `y:0`. The graph here is `y = 2 x + 1`.

use bridge_core::{DType, HostOnly, Options, Ordering, Result, transfer};
use bridge_tensorflow::{GraphEdges, Input, Runtime, Session, SessionOptions};
use bridge_torch::Tch;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use tch::{Device, Kind, Tensor};

/// A tensor to feed, and where its answer is sent.
struct Request {
    x: Tensor,
    answer: Sender<Result<Tensor>>,
}

/// Answers requests in turn, until no client is left.
fn serve(session: &Session, edges: &GraphEdges, requests: Receiver<Request>) {
    // SAFETY: the memory of a tensor is used on one thread at a time: a request takes its tensor along.
    let (tch, ordering): (_, Arc<dyn Ordering>) = (unsafe { Tch::new() }, Arc::new(HostOnly));
    // Without `copy`, a transfer that needs one is an error.
    let in_place = Options::in_place();
    for Request { x, answer } in requests {
        let run = || {
            let tch = tch.as_ref().map_err(|error| bridge_core::Error::new(error.kind(), error.to_string()))?;
            let (fed, _) = transfer(tch, edges, &x, &ordering, &in_place)?;
            assert_eq!(fed.address(), x.data_ptr().addr(), "TensorFlow reads where tch has the tensor");
            let y = session.run(&[("x:0", &fed)])?.remove(0);
            Ok(transfer(edges, tch, &y, &ordering, &in_place)?.0)
        };
        // A client that has left needs no answer.
        let _ = answer.send(run());
    }
}

/// Sends tensors, and compares the answers with what `tch` computes itself.
fn ask(service: &Sender<Request>, client: i64) -> Result<()> {
    for length in [16, 1 << 10, 1 << 20] {
        let x = Tensor::arange(length, (Kind::Float, Device::Cpu)) + client;
        let (answer, received) = channel();
        service.send(Request { x: x.shallow_clone(), answer }).expect("the service runs");
        let y = received.recv().expect("the service answers")?;
        assert!(y.allclose(&(2i64 * x + 1i64), 0.0, 0.0, false), "client {client}, {length} elements");
        println!("client {client}: {length} elements in place, the last is {}", y.double_value(&[length - 1]));
    }
    Ok(())
}

fn main() -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut arguments = std::env::args_os().skip(1).map(PathBuf::from);
    let folder = arguments.next().unwrap_or_else(|| root.join("target/tensorflow1/tensorflow_core"));
    let graph = arguments.next().unwrap_or_else(|| root.join("crates/bridge-tensorflow/tests/data/line.pb"));
    let graph = std::fs::read(&graph).unwrap_or_else(|error| panic!("{}: {error}", graph.display()));

    // SAFETY: the user names the folder of a TensorFlow.
    let tensorflow = unsafe { Runtime::open(&folder) }?;
    let x = Input::new("x:0", DType::FLOAT32, &[None])?;
    let session = Session::open(tensorflow, &graph, &[x], &["y:0"], &SessionOptions::default())?;
    let edges = GraphEdges::new(tensorflow)?;

    let (service, requests) = channel();
    thread::scope(|scope| {
        scope.spawn(|| serve(&session, &edges, requests));
        let clients: Vec<_> = (0..3)
            .map(|client| {
                let service = service.clone();
                scope.spawn(move || ask(&service, client))
            })
            .collect();
        drop(service);
        clients.into_iter().try_for_each(|client| client.join().expect("a client does not panic"))
    })
}
