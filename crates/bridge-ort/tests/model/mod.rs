//! A model of ONNX, written as `onnx.proto` describes it.

/// A field of protobuf that holds bytes: a message or a string.
fn bytes(number: u8, content: &[u8]) -> Vec<u8> {
    assert!(content.len() < 128, "one byte holds the length");
    [&[number << 3 | 2, content.len() as u8], content].concat()
}

/// A field of protobuf that holds a small number.
fn varint(number: u8, value: u8) -> Vec<u8> {
    vec![number << 3, value]
}

/// A `ValueInfoProto`: a matrix of float32, of any lengths.
fn matrix(name: &str) -> Vec<u8> {
    let dimension = |name: &str| bytes(1, &bytes(2, name.as_bytes()));
    let shape = [dimension("rows"), dimension("columns")].concat();
    let tensor = [varint(1, 1), bytes(2, &shape)].concat();
    [bytes(1, name.as_bytes()), bytes(2, &bytes(1, &tensor))].concat()
}

/// Returns the model `y = x + x`.
pub fn doubling() -> Vec<u8> {
    let node = [bytes(1, b"x"), bytes(1, b"x"), bytes(2, b"y"), bytes(4, b"Add")].concat();
    let graph = [bytes(1, &node), bytes(2, b"doubling"), bytes(11, &matrix("x")), bytes(12, &matrix("y"))].concat();
    let operators = varint(2, 13);
    [varint(1, 8), bytes(7, &graph), bytes(8, &operators)].concat()
}
