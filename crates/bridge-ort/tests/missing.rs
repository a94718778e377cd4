//! What is not an ONNX Runtime, in its own process, which loads none.

use bridge_core::ErrorKind;

#[test]
fn a_library_that_is_not_there_is_an_error() {
    for path in ["/nowhere/libonnxruntime.so", "libc.so.6", file!()] {
        // SAFETY: none of them is a library, but the C library, which is loaded already.
        let refused = unsafe { bridge_ort::load(path) }.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Missing, "{refused}");
        assert!(refused.to_string().contains("set ORT_DYLIB_PATH"), "{refused}");
    }
}
