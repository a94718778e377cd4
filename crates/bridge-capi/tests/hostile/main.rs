//! Hostile calls of the C functions: null pointers, sizes, numbers and layouts that nothing has, in any order.

mod calls;
mod interface;
mod managed;

#[test]
fn any_calls_are_answered() {
    bridge_fuzz::fuzz("capi", calls::case);
    calls::close();
}
