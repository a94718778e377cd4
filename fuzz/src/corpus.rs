//! Corpora: `fixtures/fuzz/TARGET.txtar`, an archive of text in the format `txtar`.

use std::path::Path;

/// Returns the inputs of a target and their names, in the order of the file.
///
/// # Panics
///
/// Where the target has none.
pub fn corpus(target: &str) -> Vec<(String, Vec<u8>)> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../fixtures/fuzz/{target}.txtar"));
    let text = std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    let inputs = unpacked(&text);
    assert!(!inputs.is_empty(), "{} is empty", file.display());
    inputs
}

/// Returns what an archive of this format contains: the lines below each `-- NAME --`. A comment may precede the first
/// name.
pub fn unpacked(text: &str) -> Vec<(String, Vec<u8>)> {
    let mut inputs: Vec<(String, Vec<u8>)> = Vec::new();
    for line in text.split_inclusive('\n') {
        if let Some(name) = line.trim_end().strip_prefix("-- ").and_then(|rest| rest.strip_suffix(" --")) {
            inputs.push((name.trim().to_owned(), Vec::new()));
        } else if let Some((_, input)) = inputs.last_mut() {
            input.extend_from_slice(line.as_bytes());
        }
    }
    inputs
}

#[cfg(test)]
mod tests {
    use super::unpacked;

    #[test]
    fn an_archive_has_names_and_inputs() {
        let inputs = unpacked("a comment\n-- one --\nfirst\n-- not a name\n-- two --\n-- empty, last --\n\n");
        let expected = [("one", "first\n-- not a name\n"), ("two", ""), ("empty, last", "\n")];
        assert_eq!(inputs, expected.map(|(name, input)| (name.to_owned(), input.as_bytes().to_vec())));
    }
}
