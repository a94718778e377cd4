//! Numbers that look random, and inputs that are damaged with them.

/// What is put into an input.
const ODD: [&str; 23] = [
    "-1",
    "0",
    "1",
    "2",
    "64",
    "65",
    "2147483648",
    "4294967296",
    "4611686018427387904",
    "9223372036854775807",
    "-9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "1e999",
    "null",
    "true",
    "[]",
    "{}",
    "\"\"",
    "\\",
    "\u{0}",
    ",",
    "[[[[[[[[",
];

/// Numbers that look random (SplitMix64).
#[derive(Debug, Clone)]
pub struct Random(pub u64);

impl Random {
    /// Returns 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number below `end`; 0 where that is 0.
    pub fn below(&mut self, end: usize) -> usize {
        (self.bits() % end.max(1) as u64) as usize
    }

    /// Returns one of these.
    pub fn one<'a, T: ?Sized>(&mut self, of: &[&'a T]) -> &'a T {
        of[self.below(of.len())]
    }

    /// Returns one of these inputs, damaged in up to four places.
    pub fn damaged(&mut self, inputs: &[&[u8]]) -> Vec<u8> {
        let mut bytes = self.one(inputs).to_vec();
        for _ in 0..self.below(5) {
            self.damage(&mut bytes, inputs);
        }
        bytes
    }

    fn damage(&mut self, bytes: &mut Vec<u8>, inputs: &[&[u8]]) {
        let (at, end) = (self.below(bytes.len() + 1), self.below(bytes.len() + 1));
        let range = at.min(end)..at.max(end);
        match self.below(8) {
            0 => drop(bytes.splice(range, self.one(&ODD).bytes())),
            1 => drop(bytes.splice(at..at, self.one(&ODD).bytes())),
            2 => drop(bytes.drain(range.start..range.end.min(range.start + 8))),
            3 => bytes.extend(bytes[range].to_vec()),
            4 => {
                // The end of one input after the start of another.
                let other = self.one(inputs);
                let cut = self.below(other.len() + 1);
                bytes.truncate(at);
                bytes.extend(&other[cut..]);
            }
            5 => {
                let flipped = 1 << self.below(8);
                bytes.get_mut(at).into_iter().for_each(|byte| *byte ^= flipped);
            }
            _ => {
                // A number becomes another one.
                let start = bytes[at..].iter().position(u8::is_ascii_digit).map_or(bytes.len(), |first| at + first);
                let digits = bytes[start..].iter().take_while(|byte| byte.is_ascii_digit()).count();
                bytes.splice(start..start + digits, self.one(&ODD).bytes());
            }
        }
    }
}
