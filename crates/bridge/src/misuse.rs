//! Programs that must not compile, each next to one that compiles and differs in one line. They are compiled as
//! documentation tests, and are nowhere in the documentation. A nightly toolchain also compares the codes of the
//! errors.

/// Makes two documentation tests of a program: with the line that is right, and with the line that must fail with
/// this error.
macro_rules! misuse {
    ($($name:ident: $before:literal, right: $right:literal, $code:ident: $wrong:literal, $after:literal;)*) => {
        $(
            #[doc = concat!("```\n", $before, "\n", $right, "\n", $after, "\n```")]
            #[doc = ""]
            #[doc = concat!("```compile_fail,", stringify!($code), "\n", $before, "\n", $wrong, "\n", $after, "\n```")]
            #[allow(dead_code, reason = "it carries the tests")]
            struct $name;
        )*
    };
}

misuse! {
    ALeaseIsNotCloned:
        "use truebridge::contract::Lease;
        fn end(lease: Lease) {",
        right: "drop(lease);",
        E0599: "drop(lease.clone()); drop(lease);",
        "}";
    AnExportIsNotUsedAfterItWasHandedOn:
        "use truebridge::{Permutation, contract::Export};
        fn permute(exported: Export, permutation: &Permutation) {
            let permuted = exported.permuted(Some(permutation));",
        right: "println!(\"{:?}\", permuted.map(|permuted| permuted.data()));",
        E0382: "println!(\"{:?}\", permuted.map(|_| exported.data()));",
        "}";
    AnOwnerMayBeDroppedOnAnyThread:
        "use std::{rc::Rc, sync::Arc};
        use truebridge::contract::{Access, Allocation, Memory};
        fn own(bytes: Vec<u8>) {
            let host = Allocation::host(0..0, Access::ReadOnly);",
        right: "let _ = unsafe { Memory::new(host, Arc::new(bytes)) };",
        E0277: "let _ = unsafe { Memory::new(host, Rc::new(bytes)) };",
        "}";
    AnOfferIsAcceptedBeforeItsMemoryIsUsed:
        "use truebridge::{Adapter, Result, contract::Offer};
        fn import<A: Adapter>(adapter: &A, offer: Offer) -> Result<usize> {",
        right: "Ok(offer.accept(adapter.profile(), &adapter.consumer())?.data())",
        E0599: "Ok(offer.data())",
        "}";
    AViewIsDroppedWithItsLastUser:
        "use truebridge::{Layout, contract::Lease};
        fn layout(lease: &Lease) -> Layout {
            let layout = lease.layout();",
        right: "layout.clone()",
        E0521: "fn forever(layout: &'static Layout) -> Layout { layout.clone() } forever(layout)",
        "}";
    AMatchExpectsMorePlans:
        "use truebridge::Plan;
        fn copies(plan: Plan) -> bool {
            match plan {
                Plan::ZeroCopy => false,",
        right: "Plan::Copy(_) => true, _ => true,",
        E0004: "Plan::Copy(_) => true,",
        "} }";
    OptionsAreBuilt:
        "use truebridge::{Device, Options};
        fn down() -> Options {",
        right: "Options::default().with_device(Device::CPU)",
        E0639: "Options { copy: None, device: Some(Device::CPU), order: None, permute: None }",
        "}";
    APromiseToWriteNothingIsUnsafe:
        "use truebridge::Options;
        fn promise() -> Options {",
        right: "unsafe { Options::default().with_read_only(true) }",
        E0133: "Options::default().with_read_only(true)",
        "}";
    MemoryThatNeverChangesIsGuaranteed:
        "use truebridge::contract::{Access, Export};
        fn constant(exported: Export) -> Export {",
        right: "unsafe { exported.restricted(Access::Immutable) }",
        E0133: "exported.restricted(Access::Immutable)",
        "}";
    AConsumerGuaranteesItsStreams:
        "use truebridge::{Device, Result, Stream, contract::{Consumer, Views}};
        struct Mine(Views);",
        right: "unsafe impl Consumer for Mine {",
        E0200: "impl Consumer for Mine {",
        "    fn current_stream(&self, _: Device) -> Result<Option<Stream>> { Ok(None) }
            fn views(&self) -> &Views { &self.0 }
        }";
    FreshMemoryIsWrittenFirst:
        "use truebridge::{Adapter, DType, Device, Order, Result};
        fn fresh<A: Adapter>(adapter: &A) -> Result<A::Tensor> {",
        right: "unsafe { adapter.empty(Device::CPU, DType::FLOAT32, &[3], Order::RowMajor) }",
        E0133: "adapter.empty(Device::CPU, DType::FLOAT32, &[3], Order::RowMajor)",
        "}";
    DescribingMemoryIsUnsafe:
        "use truebridge::contract::{Access, Allocation, Memory};
        fn own(bytes: Vec<u8>) {
            let host = Allocation::host(0x1000..0x2000, Access::ReadWrite);",
        right: "let _ = unsafe { Memory::new(host, bytes) };",
        E0133: "let _ = Memory::new(host, bytes);",
        "}";
}

/// Makes two documentation tests of a call that takes a stream: safe code can keep a stream longer than it lives, so the
/// call compiles only in `unsafe`.
macro_rules! alive {
    (in $before:literal; $($name:ident: $call:literal;)*) => {
        $(
            #[doc = concat!("```\n", $before, "\nlet _ = unsafe { ", $call, " };\n}\n```")]
            #[doc = ""]
            #[doc = concat!("```compile_fail,E0133\n", $before, "\nlet _ = ", $call, ";\n}\n```")]
            #[allow(dead_code, reason = "it carries the tests")]
            struct $name;
        )*
    };
}

alive! {
    in "use truebridge::{Device, Ordering, contract::{DeviceBuffer, Lease}};
        fn after(lease: Lease, device: Device, ordering: &dyn Ordering, buffer: Box<dyn DeviceBuffer>) {
            let Some(stream) = lease.stream() else { return };
            drop(lease);";
    AnOrderIsOfStreamsThatAreAlive: "ordering.order(device, stream, stream)";
    AnOrderOfDevicesIsOfStreamsThatAreAlive: "ordering.order_across((device, stream), (device, stream))";
    AStreamIsAliveWhenItIsWaitedFor: "ordering.synchronize(device, stream)";
    AStreamIsAliveWhenItIsAskedForItsCapture: "ordering.is_captured(device, stream)";
    ACaptureThatEndsIsOfAStreamThatIsAlive: "ordering.defer(device, stream, Box::new(|| true))";
    MemoryIsReleasedAfterAStreamThatIsAlive: "ordering.release_later(device, stream, buffer)";
    MemoriesAreReleasedAfterAStreamThatIsAlive: "ordering.release_all_later(device, stream, vec![buffer])";
    MemoryIsReleasedAfterADeviceWhoseStreamIsAlive: "ordering.release_after_all_work(device, stream, buffer)";
}

alive! {
    in "use truebridge::{Device, contract::{Consumer, Copies, Views}};
        fn later<C: Consumer>(consumer: C, device: Device, copies: &dyn Copies, views: &Views) {
            let Ok(Some(stream)) = consumer.current_stream(device) else { return };
            drop(consumer);";
    AUseIsInAStreamThatIsAlive: "views.used(device, 0x1000, stream, || None)";
    APlanIsForAStreamThatIsAlive: "copies.plan(device, &[], Some(stream))";
    MemoryIsAllocatedInAStreamThatIsAlive: "copies.allocate(device, 16, stream, None)";
}

#[cfg(feature = "cuda")]
alive! {
    in "use truebridge::{Device, Stream, cuda};
        fn driven(device: Device, stream: Stream, link: &dyn cuda::Link) {";
    AnEventIsInAStreamThatIsAlive: "link.record(device, stream)";
    TheLinkIsAskedOfAStreamThatIsAlive: "link.is_captured(device, stream)";
    TheLinkAllocatesInAStreamThatIsAlive: "link.allocate(device, 16, stream)";
    TheDriverIsAskedOfAStreamThatIsAlive: "cuda::works_after_legacy(device, stream)";
}

#[cfg(feature = "cuda")]
alive! {
    in "use truebridge::{Device, Stream, cuda};
        fn shared(device: Device, stream: Stream, sharing: &dyn cuda::Sharing, signal: &cuda::Signal) {";
    ASignalIsRecordedInAStreamThatIsAlive: "sharing.record(device, signal, stream)";
    AStreamThatWaitsForASignalIsAlive: "sharing.wait(device, stream, signal)";
}

#[cfg(feature = "ipc")]
alive! {
    in "use truebridge::{Device, Stream, ipc};
        fn keep(opened: ipc::Opened, streams: &[(Device, Stream)]) {";
    WhatIsOpenedIsKeptForStreamsThatAreAlive: "opened.keep_for(streams)";
}

#[cfg(feature = "dlpack")]
misuse! {
    AManagedTensorIsTrustedByUnsafeCode:
        "use truebridge::dlpack::{Origin, Tensor, versioned};
        fn take(managed: versioned::Dlpack) {",
        right: "let _ = unsafe { Tensor::new(managed, |_, _| Ok(Origin::host())) };",
        E0133: "let _ = Tensor::new(managed, |_, _| Ok(Origin::host()));",
        "}";
    SharedMemoryIsGuaranteed:
        "use truebridge::dlpack::DLPack;
        fn adapter() -> DLPack {",
        right: "unsafe { DLPack::host() }",
        E0133: "DLPack::host()",
        "}";
    AStreamIsGuaranteed:
        "use truebridge::{Device, Stream, dlpack::DLPack};
        fn adapter(stream: Stream) {",
        right: "let _ = unsafe { DLPack::in_stream(Device::cuda(0), stream) };",
        E0133: "let _ = DLPack::in_stream(Device::cuda(0), stream);",
        "}";
    ATensorIsNotUsedAfterItWasHandedOver:
        "use truebridge::dlpack::Tensor;
        fn hand_over(tensor: Tensor) -> usize {
            let address = tensor.data();
            let _managed = tensor.into_managed();",
        right: "address",
        E0382: "tensor.data()",
        "}";
}

#[cfg(feature = "cuda")]
misuse! {
    AnEventOfANumberIsTrustedByUnsafeCode:
        "use truebridge::cuda::Event;
        fn event(number: usize) {",
        right: "let _ = unsafe { Event::new(number) };",
        E0133: "let _ = Event::new(number);",
        "}";
    ASignalOfANumberIsTrustedByUnsafeCode:
        "use truebridge::cuda::Signal;
        fn signal(number: usize) {",
        right: "let _ = unsafe { Signal::new(number) };",
        E0133: "let _ = Signal::new(number);",
        "}";
}

#[cfg(feature = "ipc")]
misuse! {
    MemoryIsFreedByItsOwner:
        "use truebridge::{Device, Stream, ipc};
        fn free(address: usize) {",
        right: "unsafe { ipc::free(address, Device::cuda(0), Stream::LEGACY) }",
        E0133: "ipc::free(address, Device::cuda(0), Stream::LEGACY)",
        "}";
}

#[cfg(feature = "ort")]
misuse! {
    ALibraryIsTrustedByUnsafeCode:
        "use truebridge::{Result, adapters::ort};
        fn load(path: &str) -> Result<()> {",
        right: "unsafe { ort::load(path) }",
        E0133: "ort::load(path)",
        "}";
}

#[cfg(feature = "ndarray")]
misuse! {
    SharedElementsAreGuaranteed:
        "use std::thread;
        use truebridge::adapters::ndarray::{HostArray, NdArray};
        use truebridge::prelude::*;
        fn race(source: HostArray, target: HostArray) {
            let reader = target.clone();
            thread::spawn(move || reader.to_array::<f32>());",
        right: "let ndarray = unsafe { NdArray::new() };",
        E0133: "let ndarray = NdArray::new();",
        "    let _ = copy_into(&ndarray, &ndarray, &source, &target, ordering());
        }";
}

#[cfg(feature = "ipc")]
misuse! {
    MemoryOfOtherProcessesIsGuaranteed:
        "use std::thread;
        use truebridge::ipc::{Ipc, IpcTensor};
        use truebridge::prelude::*;
        fn race(source: IpcTensor, target: IpcTensor) {
            let reader = target.clone();",
        right: "let ipc = unsafe { Ipc::new() };",
        E0133: "let ipc = Ipc::new();",
        "   let other = ipc.clone();
            thread::spawn(move || copy_into(&other, &other, &source, &target, ordering()));
            let _ = transfer(&ipc, &ipc, &reader, ordering(), &Options::copied());
        }";
}

#[cfg(feature = "python")]
misuse! {
    ABorrowEndsWithItsTensor:
        "use truebridge::python::{Borrowed, PyTensor, borrow};
        fn address(tensor: PyTensor<'_>) -> truebridge::Result<*const f32> {
            let borrowed: Borrowed<'_> = borrow(&tensor)?;",
        right: "let address = borrowed.as_ptr(); drop(tensor); Ok(address)",
        E0505: "drop(tensor); let address = borrowed.as_ptr(); Ok(address)",
        "}";
    ABorrowIsNotKept:
        "use truebridge::python::{Borrowed, PyTensor, borrow};
        struct Kept<'a>(Option<Borrowed<'a>>);",
        right: "fn keep<'a>(kept: &mut Kept<'a>, tensor: &'a PyTensor<'_>) { kept.0 = borrow(tensor).ok(); }",
        E0621: "fn keep<'a>(kept: &mut Kept<'a>, tensor: &PyTensor<'_>) { kept.0 = borrow(tensor).ok(); }",
        "";
    ABorrowStaysOnItsThread:
        "use truebridge::python::Borrowed;
        fn sent<T: Send>(value: T) -> T { value }
        fn address(borrowed: Borrowed<'_>) -> usize {",
        right: "sent(borrowed.as_ptr::<f32>().addr())",
        E0277: "sent(borrowed).as_ptr::<f32>().addr()",
        "}";
    AMatchExpectsMoreAdapters:
        "use truebridge::python::AnyAdapter;
        fn is_torch(adapter: &AnyAdapter<'_>) -> bool {
            match adapter {
                AnyAdapter::Torch(_) => true,",
        right: "_ => false,",
        E0004: "AnyAdapter::CuPy(_) | AnyAdapter::NumPy(_) | AnyAdapter::Protocol(_) => false,",
        "} }";
    AnAdapterStaysWithTheGil:
        "use truebridge::python::AnyAdapter;
        fn sent<T: Send>(_: T) {}
        fn name(adapter: AnyAdapter<'_>) {",
        right: "sent(adapter.profile().name.clone());",
        E0277: "sent(adapter);",
        "}";
    ATensorStaysWithTheGil:
        "use truebridge::python::PyTensor;
        fn sent<T: Send>(_: T) {}
        fn keep(tensor: PyTensor<'_>) {",
        right: "sent(tensor.unbind());",
        E0277: "sent(tensor);",
        "}";
}

#[cfg(feature = "tensorflow")]
misuse! {
    ASessionThatIsClosedRunsNoMore:
        "use truebridge::adapters::tensorflow::Session;
        fn last(session: Session) {",
        right: "let _ = (session.run(&[]), session.close());",
        E0382: "let _ = (session.close(), session.run(&[]));",
        "}";
}

/// Makes two documentation tests of a type: a value that is kept compiles, and one that is forgotten is an unused
/// result.
macro_rules! forgotten {
    ($($name:ident: $type:literal;)*) => {
        $(
            #[doc = concat!("```no_run\n", forgotten!(in $type), "let _kept = made();\n```")]
            #[doc = ""]
            #[doc = concat!("```compile_fail\n", forgotten!(in $type), "made();\n```")]
            #[allow(dead_code, reason = "it carries the tests")]
            struct $name;
        )*
    };
    (in $type:literal) => {
        concat!("#![deny(unused_must_use)]\nfn made() -> truebridge::", $type, " { unimplemented!() }\n")
    };
}

forgotten! {
    ForgottenExport: "contract::Export";
    ForgottenLease: "contract::Lease";
    ForgottenOffer: "contract::Offer<'static>";
    ForgottenResult: "contract::Output<'static, ()>";
    ForgottenPlanOfCopies: "Prepared";
}

#[cfg(feature = "ipc")]
forgotten! {
    ForgottenTicket: "ipc::Ticket";
    ForgottenNames: "ipc::Client";
}

#[cfg(feature = "python")]
forgotten! {
    ForgottenBorrow: "python::Borrowed<'static>";
}
