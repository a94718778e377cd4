//! How the transfers of cases ended.

use serde::{Deserialize, Serialize};

/// How the transfers of a property ended: for each way, the cases in which at least one did so. Most cases have one
/// transfer; those of `life` and the round trips have several, and may count more than once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Coverage {
    /// In place.
    pub in_place: u32,
    /// As a copy.
    pub copied: u32,
    /// With an error.
    pub refused: u32,
    /// Cases that showed what the property is for, where that is more than how a transfer ends: see `round_trip` and
    /// `read_only`.
    #[serde(default)]
    pub shown: u32,
}

impl Coverage {
    /// Adds what another counts.
    pub fn add(&mut self, other: Self) {
        self.in_place += other.in_place;
        self.copied += other.copied;
        self.refused += other.refused;
        self.shown += other.shown;
    }
}
