//! The paths of the host that need neither Python nor a device, for `cargo xtask counts`, which runs this program under
//! callgrind. It prints the name of each path, in the order in which they are counted, and the calls.

#[path = "callgrind.rs"]
mod callgrind;

use bridge_core::dlpack::{DLPack, Origin, Tensor, export, versioned};
use bridge_core::{Adapter, DType, Device, HostOnly, Options, Order, Ordering, Permutation, Result};
use bridge_core::{copy_into, plan, transfer, transfer_all};
use bridge_ipc::{Exporter, Message, Settings, Ticket, Writing};
use bridge_ndarray::{HostArray, NdArray};
use callgrind::{truebridge_counted, truebridge_instrument};
use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

/// Calls before those that are counted, which fill caches and pools, and those that are counted.
const WARM_UP: usize = 100;
const CALLS: usize = 200;

/// A path, and its name in the kept file.
type Named<'a> = (&'static str, Box<dyn FnMut() -> Result<()> + 'a>);

fn main() -> Result<()> {
    let Some(folder) = std::env::args().nth(1) else {
        eprintln!("usage: counts FOLDER: cargo xtask counts runs it");
        std::process::exit(2);
    };
    // SAFETY: the memory of a tensor is used on one thread at a time, and no shared tensor is written to.
    let (dlpack, ndarray) = unsafe { (DLPack::host(), NdArray::new()) };
    let exporter = Exporter::new(Settings::default().with_folder(folder))?;
    let mut paths = transfers(&dlpack, &ndarray)?;
    paths.extend(codec(&dlpack, &ndarray)?);
    paths.extend(copies(&ndarray)?);
    paths.extend(tickets(&ndarray, &exporter)?);
    truebridge_instrument();
    for (name, path) in &mut paths {
        for _ in 0..WARM_UP {
            path()?;
        }
        truebridge_counted(call_often, (&raw mut *path).expose_provenance());
        println!("{CALLS} {name}");
    }
    Ok(())
}

/// Calls the path at this address.
extern "C" fn call_often(path: usize) {
    let path = std::ptr::with_exposed_provenance_mut::<Box<dyn FnMut() -> Result<()>>>(path);
    // SAFETY: the address is that of a path of `main`, which does not use it meanwhile.
    let path = unsafe { &mut *path };
    for _ in 0..CALLS {
        path().expect("it has passed before");
    }
}

fn host() -> Arc<dyn Ordering> {
    Arc::new(HostOnly)
}

/// Plans and transfers in place.
fn transfers<'a>(dlpack: &'a DLPack, ndarray: &'a NdArray) -> Result<Vec<Named<'a>>> {
    let array = || HostArray::from(vec![1.0_f32; 64]);
    // SAFETY: the elements are numbers, of any bits.
    let image = unsafe { dlpack.empty(Device::CPU, DType::FLOAT32, &[2, 3, 4, 5], Order::RowMajor) }?;
    let (exported, one, nested, many) = (ndarray.export(&array())?, array(), array(), vec![array(); 100]);
    let permuted = Options::default().with_permute(Permutation::new(&[0, 2, 3, 1])?);
    let (first, second, third, fourth) = (host(), host(), host(), host());
    Ok(vec![
        ("plan", Box::new(move || plan(black_box(&exported), dlpack.profile(), &Options::default()).map(drop))),
        (
            "transfer in place",
            Box::new(move || transfer(ndarray, dlpack, black_box(&one), &first, &Options::in_place()).map(drop)),
        ),
        (
            "transfer of a permuted tensor",
            Box::new(move || transfer(dlpack, ndarray, black_box(&image), &second, &permuted).map(drop)),
        ),
        (
            "transfer of a view and back",
            Box::new(move || {
                let (view, _) = transfer(ndarray, dlpack, black_box(&nested), &third, &Options::in_place())?;
                transfer(dlpack, ndarray, &view, &third, &Options::in_place()).map(drop)
            }),
        ),
        (
            "transfer of 100 tensors",
            Box::new(move || {
                let tensors: Vec<(&dyn Adapter<Tensor = HostArray>, _)> =
                    many.iter().map(|one| (ndarray as _, one)).collect();
                let done = transfer_all(&tensors, dlpack, &fourth, &Options::in_place());
                done.map(drop).map_err(|failed| failed.error)
            }),
        ),
    ])
}

/// Managed tensors of DLPack, as a capsule holds them.
fn codec<'a>(dlpack: &'a DLPack, ndarray: &'a NdArray) -> Result<Vec<Named<'a>>> {
    // SAFETY: the elements are numbers, of any bits.
    let tensor = unsafe { dlpack.empty(Device::CPU, DType::FLOAT32, &[2, 3, 4, 5], Order::RowMajor) }?;
    let (array, ordering) = (HostArray::from(vec![1.0_f32; 64]), host());
    Ok(vec![
        (
            "DLPack, out and in",
            Box::new(move || {
                let managed: versioned::Dlpack = black_box(&tensor).clone().into_managed();
                // SAFETY: the tensor was made here, and its memory is that of the host.
                unsafe { export(managed, |_, _| Ok(Origin::host())) }.map(drop)
            }),
        ),
        (
            "DLPack, a view out and in",
            Box::new(move || {
                let (view, _) = transfer(ndarray, dlpack, black_box(&array), &ordering, &Options::in_place())?;
                let managed: versioned::Dlpack = view.into_managed();
                // SAFETY: as above.
                unsafe { Tensor::new(managed, |_, _| Ok(Origin::host())) }.map(drop)
            }),
        ),
    ])
}

/// Copies that are so small that to plan them is most of the work.
fn copies(ndarray: &NdArray) -> Result<Vec<Named<'_>>> {
    // SAFETY: the elements are numbers, of any bits.
    let empty = |shape: &[i64], order| unsafe { ndarray.empty(Device::CPU, DType::FLOAT32, shape, order) };
    let (rows, columns) = (empty(&[8, 8], Order::RowMajor)?, empty(&[8, 8], Order::ColumnMajor)?);
    let (same, fresh) = (empty(&[8, 8], Order::RowMajor)?, empty(&[2, 3, 4, 5], Order::RowMajor)?);
    let ordering = bridge_cuda::ordering();
    let to = empty(&[8, 8], Order::RowMajor)?;
    let permuted = Options::copied().with_permute(Permutation::new(&[0, 2, 3, 1])?);
    Ok(vec![
        ("copy of 8 × 8 into a tensor", {
            let rows = rows.clone();
            Box::new(move || copy_into(ndarray, ndarray, black_box(&rows), &same, ordering).map(drop))
        }),
        (
            "transposed copy of 8 × 8 into a tensor",
            Box::new(move || copy_into(ndarray, ndarray, black_box(&columns), &to, ordering).map(drop)),
        ),
        (
            "permuted copy of 120 elements",
            Box::new(move || transfer(ndarray, ndarray, black_box(&fresh), ordering, &permuted).map(drop)),
        ),
    ])
}

/// Tickets. What opens one waits for a thread of the exporter, and so does what puts a name or finds one: how often it
/// waits is the scheduler's choice, and each time takes 17,000 instructions.
fn tickets<'a>(ndarray: &'a NdArray, exporter: &'a Exporter) -> Result<Vec<Named<'a>>> {
    let share = move || {
        let array = HostArray::from(vec![1.0_f32; 64]);
        let message = Message::of(&[(ndarray as _, &array)], Some(Writing::Never), &host(), &Options::default())
            .map_err(|failed| failed.error)?;
        message.share(exporter, Duration::from_secs(3600), None)
    };
    // Tokens are random, and take more instructions or fewer.
    let texts = (0..64).map(|_| share().map(|ticket| ticket.text())).collect::<Result<Vec<_>>>()?;
    Ok(vec![
        ("share and revoke", Box::new(move || exporter.revoke(&share()?).map(drop))),
        ("64 tickets from text", Box::new(move || texts.iter().try_for_each(|text| text.parse::<Ticket>().map(drop)))),
    ])
}
