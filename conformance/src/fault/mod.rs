//! Planted faults. Where the suite does not find one, the suite has failed.

mod faulty;
mod real;
mod subject;

pub use faulty::{Breakable, Faulty};
pub use real::{REAL_FAULTS, RealFault};

use crate::habits::Habits;
use serde::{Deserialize, Serialize};

/// Which part of a pair has the fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The one that exports.
    Source,
    /// The one that imports.
    Target,
    /// Neither: the ordering or its copies have it.
    Ordering,
    /// Neither: what brings a tensor across has it.
    Conversion,
}

/// A fault, where it is planted, and the property that must find it.
#[derive(Debug, Clone, Copy)]
pub struct Planted {
    /// The fault.
    pub fault: Fault,
    /// Its name in reports.
    pub name: &'static str,
    /// The property that must fail.
    pub caught_by: &'static str,
    /// The part that has it.
    pub role: Role,
    /// The source.
    pub from: Habits,
    /// The target.
    pub to: Habits,
}

macro_rules! faults {
    ($($(#[$doc:meta])* $fault:ident = $name:literal, $property:literal, $role:ident of $from:ident -> $to:ident;)*) => {
        /// A mistake that an adapter, an ordering or a copy can make.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Fault {
            $($(#[$doc])* $fault,)*
        }

        /// Every fault.
        pub const FAULTS: &[Planted] = &[$(Planted {
            fault: Fault::$fault,
            name: $name,
            caught_by: $property,
            role: Role::$role,
            from: Habits::$from,
            to: Habits::$to,
        },)*];
    };
}

faults! {
    /// Strides are exported in bytes instead of elements.
    StridesInBytes = "strides_in_bytes", "shape", Source of Generous -> Generous;
    /// The offset of the first element is lost.
    OffsetDropped = "offset_dropped", "values", Source of Generous -> Generous;
    /// Shape and strides are exported in the wrong order.
    ShapeReversed = "shape_reversed", "shape", Source of Generous -> Generous;
    /// A tensor without elements loses its other dimensions.
    EmptyFlattened = "empty_flattened", "shape", Source of Generous -> Generous;
    /// The dtype is the next narrower one.
    DtypeNarrowed = "dtype_narrowed", "dtype", Source of Generous -> Generous;
    /// The dtype has the right size and the wrong kind.
    DtypeMistaken = "dtype_mistaken", "dtype", Source of Generous -> Generous;
    /// The profile lists dtypes that the framework does not have.
    DtypeOverclaimed = "dtype_overclaimed", "dtype", Target of Generous -> Common;
    /// Read-only memory is exported as writable.
    ReadOnlyLost = "read_only_lost", "read_only", Source of Generous -> Generous;
    /// Memory that was imported as read-only is exported as writable.
    ReadOnlyForgotten = "read_only_forgotten", "read_only", Target of Generous -> Immutable;
    /// Writable memory is exported as read-only.
    ReadOnlyInvented = "read_only_invented", "read_only", Source of Generous -> Generous;
    /// The profile claims that read-only is kept, and it is not.
    ReadOnlyOverclaimed = "read_only_overclaimed", "read_only", Target of Generous -> Common;
    /// A deferred operation is not reported.
    PendingDropped = "pending_dropped", "values", Source of Generous -> Generous;
    /// The memory is reported on another device.
    WrongDevice = "wrong_device", "identity", Source of Generous -> Generous;
    /// The profile claims negative strides, which the import does not accept.
    NegativeStridesAccepted = "negative_strides_accepted", "values", Target of Generous -> Common;
    /// The profile claims any alignment, which the import does not accept.
    AlignmentIgnored = "alignment_ignored", "values", Target of Generous -> Strict;
    /// The profile claims an alignment that is not a power of two.
    AlignmentOdd = "alignment_odd", "subject", Target of Generous -> Strict;
    /// The profile claims any alignment, which no tensor of the framework shows.
    AlignmentAny = "alignment_any", "subject", Target of Generous -> Common;
    /// The profile demands an alignment that no tensor has, so everything is copied.
    AlignmentInvented = "alignment_invented", "aliasing", Target of Generous -> Common;
    /// The profile demands four times the alignment that the framework needs, so much is copied.
    AlignmentOverstated = "alignment_overstated", "profile", Target of Generous -> Strict;
    /// The profile demands compact memory of a framework that follows strides, so much is copied.
    StridesOverstated = "strides_overstated", "profile", Target of Generous -> Common;
    /// The profile leaves out a dtype whose tensors the framework makes.
    DtypeUnderclaimed = "dtype_underclaimed", "subject", Source of Generous -> Generous;
    /// The profile claims that read-only is lost, and the framework has read-only tensors.
    ReadOnlyUnderclaimed = "read_only_underclaimed", "subject", Target of Generous -> Generous;
    /// The profile refuses negative strides, which tensors of the framework have.
    StridesUnderclaimed = "strides_underclaimed", "subject", Target of Generous -> Generous;
    /// What the suite reads of a view is in the order of memory, not in that of the strides.
    ReadUnstrided = "read_unstrided", "subject", Source of Generous -> Generous;
    /// The export leaves out the dimensions after the 32nd.
    DimensionsDropped = "dimensions_dropped", "shape", Source of Generous -> Generous;
    /// A view of read-only memory is exported as writable.
    ReadOnlyReturned = "read_only_returned", "life", Target of Generous -> Generous;
    /// The import panics on tensors of two dimensions.
    Panic = "panic", "values", Target of Generous -> Generous;
    /// The import wraps a copy.
    SilentCopy = "silent_copy", "identity", Target of Generous -> Generous;
    /// The copy is the tensor itself.
    CopyNotFresh = "copy_not_fresh", "values", Source of Generous -> Generous;
    /// The copy is one that was made before the last write.
    CopyStale = "copy_stale", "aliasing", Source of Generous -> Generous;
    /// The copy is made in a stream that is not reported.
    CopyElsewhere = "copy_elsewhere", "order", Source of Generous -> Generous;
    /// The memory is exported without a stream.
    StreamForgotten = "stream_forgotten", "order", Source of Generous -> Common;
    /// The memory is exported with the default stream instead of the current one.
    StreamMistaken = "stream_mistaken", "order", Source of Generous -> Common;
    /// The consumer reports the default stream as its current one.
    WaitSkipped = "wait_skipped", "order", Target of Generous -> Common;
    /// The consumer waits by itself, and never reports the stream in which it uses the view.
    ReleaseNotOrdered = "release_not_ordered", "release_order", Target of Generous -> Common;
    /// The consumer forgets the streams that were recorded for a view.
    ViewsNotNoted = "views_not_noted", "release_order", Target of Generous -> Generous;
    /// The export of a view is not recorded.
    ExportNotNoted = "export_not_noted", "release_order", Target of Generous -> Generous;
    /// Of several views over one memory only some are recorded.
    SecondViewNotNoted = "second_view_not_noted", "release_order", Target of Generous -> Common;
    /// What keeps a stream alive is looked up by a handle that an earlier stream had.
    StreamKeptByHandle = "stream_kept_by_handle", "release_order", Target of Generous -> Common;
    /// The memory does not keep the stream that it is exported in.
    OwnerStreamNotKept = "owner_stream_not_kept", "release_order", Source of Common -> Generous;
    /// Reuse in stream order is claimed because another view of the memory is known.
    ReuseBorrowed = "reuse_borrowed", "release_order", Target of Common -> Generous;
    /// Reuse in the order of the stream is claimed, and the allocator reuses memory in that of another.
    ReuseOverclaimed = "reuse_overclaimed", "release_order", Source of Common -> Generous;
    /// The memory is released while a view still uses it.
    EarlyRelease = "early_release", "life", Source of Generous -> Generous;
    /// The memory is released twice.
    DoubleRelease = "double_release", "life", Source of Generous -> Generous;
    /// A copy leaves out the elements after the last whole tile.
    TileEdgeSkipped = "tile_edge_skipped", "copy", Ordering of Generous -> Generous;
    /// The index of a copy wraps at 2^31.
    IndexWraps = "index_wraps", "far", Ordering of Generous -> Generous;
    /// A copy runs in the default stream, which was not ordered.
    CopyOutsideStream = "copy_outside_stream", "order", Ordering of Generous -> Common;
    /// The memory between the two halves of a copy is reused before it has been read.
    StagingReusedEarly = "staging_reused_early", "staging", Ordering of Generous -> Common;
    /// Copies of many pieces leave one out.
    PieceLeftOut = "piece_left_out", "torn", Ordering of Generous -> Common;
    /// The memory that says which pieces are copied is reused for the next launch, before the last one has read it.
    TableReusedEarly = "table_reused_early", "torn", Ordering of Generous -> Common;
    /// Copies of many pieces do not wait for the writer of the sources.
    UpdateNotOrdered = "update_not_ordered", "torn", Ordering of Generous -> Common;
    /// The writer of the sources does not wait for copies of many pieces.
    UpdateNotAwaited = "update_not_awaited", "torn", Ordering of Generous -> Common;
    /// Memory that is returned together is dropped at once, instead of after the work that uses it.
    GroupReleasedEarly = "group_released_early", "batch", Ordering of Common -> Generous;
    /// Memory that is returned together a moment later is not ordered after its reader.
    FlushNotOrdered = "flush_not_ordered", "batch", Ordering of Generous -> Common;
    /// What is to be called in a moment is never called.
    FlushForgotten = "flush_forgotten", "batch", Ordering of Generous -> Common;
    /// The framework's own view of a view does not keep the memory.
    PartOrphaned = "part_orphaned", "life", Target of Generous -> Generous;
    /// A length wraps at 2^31.
    LengthWraps = "length_wraps", "huge", Source of Generous -> Generous;
    /// An import keeps its view where an import of another thread finds it.
    SharedSlot = "shared_slot", "threads", Target of Generous -> Common;
    /// The consumer reports a stream of the current device, which is not the tensor's.
    StreamOfCurrentDevice = "stream_of_current_device", "devices", Target of Generous -> Common;
    /// What was exported is never released, where the conversion fails.
    ExportLost = "export_lost", "failure", Conversion of Generous -> Generous;
    /// A wait between a captured stream and another is not refused, and not made.
    CaptureIgnored = "capture_ignored", "graph", Ordering of Generous -> Common;
    /// Within a capture no stream waits for another one.
    WaitSkippedInCapture = "wait_skipped_in_a_capture", "graph", Ordering of Generous -> Common;
    /// Streams that wait for the default stream are taken to wait for every other one.
    BlockingNotOrdered = "blocking_not_ordered", "order", Ordering of Generous -> Common;
    /// One reference to the view is never dropped.
    Leak = "leak", "life", Target of Generous -> Generous;
}

/// The outcome of a planted fault.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FaultReport {
    /// The fault.
    pub fault: String,
    /// The property that must fail.
    pub must_be_caught_by: String,
    /// The properties that failed.
    pub caught_by: Vec<String>,
}

impl FaultReport {
    /// Returns whether the property that must find it did.
    pub fn is_caught(&self) -> bool {
        self.caught_by.contains(&self.must_be_caught_by)
    }

    /// Returns what a report says where that property did not find it.
    #[cfg(feature = "runner")]
    pub(crate) fn missed(&self) -> String {
        let others = if self.caught_by.is_empty() { "no property".into() } else { self.caught_by.join(", ") };
        format!("{} must find it, and does not; found by {others}", self.must_be_caught_by)
    }
}
