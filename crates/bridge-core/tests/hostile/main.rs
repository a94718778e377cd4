//! Hostile managed tensors at the DLPack codec. AddressSanitizer runs it as part of the audit.
#![cfg(feature = "dlpack")]

mod codec;

#[test]
fn any_managed_tensor_is_taken_or_refused() {
    bridge_fuzz::fuzz("codec", codec::case);
}
