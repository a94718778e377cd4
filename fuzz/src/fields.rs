//! Inputs that are words and numbers.

/// A text such as `ndim 2 shape 4 -1 null-strides`: words, each with the numbers after it. Any text is one. Numbers
/// that do not fit into 64 bits are cut to them.
#[derive(Debug, Clone, Default)]
pub struct Fields<'a>(Vec<(&'a str, Vec<u64>)>);

impl<'a> Fields<'a> {
    /// Reads a text. A number at its start belongs to no word.
    pub fn of(text: &'a str) -> Self {
        let mut fields: Vec<(&str, Vec<u64>)> = Vec::new();
        for word in text.split_ascii_whitespace() {
            match (word.parse::<i128>(), fields.last_mut()) {
                (Ok(number), Some((_, numbers))) => numbers.push(number as u64),
                (Ok(_), None) => (),
                (Err(_), _) => fields.push((word, Vec::new())),
            }
        }
        Self(fields)
    }

    /// Returns the first word.
    pub fn first(&self) -> &'a str {
        self.0.first().map_or("", |(word, _)| word)
    }

    /// Returns whether a word is there.
    pub fn has(&self, word: &str) -> bool {
        self.all(word).is_some()
    }

    /// Returns the numbers of a word.
    pub fn all(&self, word: &str) -> Option<&[u64]> {
        self.0.iter().find(|(found, _)| *found == word).map(|(_, numbers)| &numbers[..])
    }

    /// Returns the numbers of a word as signed ones.
    pub fn signed(&self, word: &str) -> Option<Vec<i64>> {
        self.all(word).map(|numbers| numbers.iter().map(|number| *number as i64).collect())
    }

    /// Returns the number of a word at an index, or what it usually is.
    pub fn at(&self, word: &str, index: usize, usual: u64) -> u64 {
        self.all(word).and_then(|numbers| numbers.get(index)).copied().unwrap_or(usual)
    }

    /// Returns the first number of a word, or what it usually is.
    pub fn one(&self, word: &str, usual: u64) -> u64 {
        self.at(word, 0, usual)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_have_the_numbers_after_them() {
        let fields = Fields::of("5 copy\nshape 2 -1 18446744073709551616 null-data shape 7");
        assert_eq!(fields.first(), "copy");
        assert_eq!(fields.signed("shape"), Some(vec![2, -1, 0]), "the first of two");
        assert_eq!((fields.all("copy"), fields.all("strides")), (Some(&[][..]), None));
        assert_eq!((fields.one("shape", 9), fields.at("shape", 3, 9), fields.has("null-data")), (2, 9, true));
        assert_eq!(Fields::of("").first(), "");
    }
}
