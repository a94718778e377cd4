//! Streams: their order, and the use of a view in another one.

use crate::on_device::{in_streams, stream_on};
use crate::pointers::non_null;
use crate::reader::VIEWS;
use crate::status::{Status, answer, refused};
use crate::tensor::CDevice;
use bridge_core::{Device, Error, ErrorKind};
use std::ffi::c_void;

/// Makes work that is submitted to the stream later from now on wait, on the device, for all work that is in the stream
/// earlier now. No host thread waits.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_order(device: CDevice, earlier: u64, later: u64) -> Status {
    answer(|| {
        let device = Device::from(device);
        if !in_streams(device) {
            let text = format!("{device} has no streams: pass the CUDA device that both belong to");
            return Err(Error::new(ErrorKind::Device, text));
        }
        // SAFETY: the caller names streams that are alive.
        unsafe { bridge_cuda::ordering().order(device, stream_on(device, earlier)?, stream_on(device, later)?) }
    })
}

/// Records that the views at this address, and what is made of them, are also used in this stream: the owner waits for
/// it, too, before the memory is reused. data is any address in the view, such as that of its first element. The stream
/// must live as long as the view. TB_ARGUMENT where this library has made no view of the address. Host memory needs no
/// record.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tb_used(device: CDevice, data: *const c_void, stream: u64) -> Status {
    answer(|| {
        let device = Device::from(device);
        if !in_streams(device) {
            return Ok(());
        }
        non_null(data, "data")?;
        // SAFETY: the caller names a stream that lives as long as the views.
        let views = unsafe {
            let stream = stream_on(device, stream)?.on_any_thread();
            VIEWS.used(device, data.addr(), stream, || None)
        };
        match views {
            0 => Err(refused(
                "this library has made no view of the address: pass an address in a managed tensor of tb_transfer",
            )),
            _ => Ok(()),
        }
    })
}
