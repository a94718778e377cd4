//! A simulated device, and frameworks on it: the protocol runs here without a GPU.
//!
//! Work submitted to a stream of [`SimDevice`] runs later, in any order that the recorded waits allow, while the host
//! runs ahead. Vector clocks record which work is ordered before which, so that a missing wait is found even in a run
//! in which it does no harm. [`SimFramework`] is a framework with a caching allocator and an adapter, in several
//! [habits](Habits).

mod clock;
mod copies;
mod device;
mod framework;
mod memory;
mod pool;
mod subject;
mod tables;
mod tensor;

pub use device::{SimDevice, SimOrdering};
pub use framework::{HABITS, Habits, SimFramework};
pub use tensor::SimTensor;
