//! A page of words that two processes map, and the roles of the two.

use crate::memory::Mapping;
use std::ops::Range;
use std::ptr::with_exposed_provenance;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Release};

/// The value that every wait has reached: no count is as high, and none is so low that the driver takes it for a higher
/// one.
pub(super) const RELEASED: u64 = 1 << 62;

/// Bytes of a page.
pub(super) const PAGE: usize = 4096;

/// Words of a page: two for each device, the first of them the exporter's.
pub(super) const WORDS: usize = PAGE / size_of::<AtomicU64>();

/// What a stream is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Role {
    /// It waits for the owners of what is shared, and for the processes that give it back.
    Exporter,
    /// It waits for the processes that share, and for the readers here.
    Importer,
}

impl Role {
    /// Returns the word of this role among the two of a device.
    pub(super) fn word(self) -> usize {
        match self {
            Self::Exporter => 0,
            Self::Importer => 1,
        }
    }

    /// Returns the role at the other end.
    pub(super) fn other(self) -> Self {
        match self {
            Self::Exporter => Self::Importer,
            Self::Importer => Self::Exporter,
        }
    }
}

/// A page that is mapped here.
pub(super) struct Page(Arc<Mapping>);

impl Page {
    pub(super) fn new(mapping: Arc<Mapping>) -> Self {
        Self(mapping)
    }

    pub(super) fn bytes(&self) -> Range<usize> {
        self.0.bytes()
    }

    /// Returns the address of a word.
    pub(super) fn address(&self, word: usize) -> usize {
        assert!(word < WORDS, "words are checked when they come in");
        self.bytes().start + word * size_of::<AtomicU64>()
    }

    pub(super) fn word(&self, word: usize) -> &AtomicU64 {
        // SAFETY: the word lies in the mapping, which `self` keeps, whose file cannot be shortened, and which begins at
        // a page of the system. Each side uses the words atomically: this one here, and on the device.
        unsafe { &*with_exposed_provenance::<AtomicU64>(self.address(word)) }
    }

    /// Releases every stream that waits, now or later, for a word of this role.
    pub(super) fn release(&self, role: Role) {
        (role.word()..WORDS).step_by(2).for_each(|word| self.word(word).store(RELEASED, Release));
    }
}
