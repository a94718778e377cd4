"""The properties: those of the suite that concern the frameworks' own method, each a template of a program.

The first character of a line says what an exception in it means: in a line with ``!`` the interchange was refused, in a
line with ``?`` its result cannot be used, in any other the program could not run. What follows is Python; ``$name`` is
filled in from the rows of the two frameworks, and a line of which nothing remains is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from truebridge_conformance.scoreboard import sentences
from truebridge_conformance.scoreboard.frameworks import GPU, HOST, INTERFACE
from truebridge_conformance.scoreboard.sentences import Sentence

#: Of which kind the call is: with ``copy=``, or with the host as the device.
COPY, TO_HOST = "copy", "host"

#: What a program needs of its two frameworks: an object with ``__dlpack__``, a way to see whether memory is shared, a
#: target that writes to its tensors, a GPU's streams, a target that has no tensors where the source's is.
OBJECT, SHARED, WRITTEN, RACES, ELSEWHERE = "object", "shared", "written", "races", "elsewhere"

ANY = ("Exception",)


@dataclass(frozen=True, eq=False)
class Property:
    """One property."""

    name: str
    #: What it states, in one line.
    doc: str
    template: str
    #: What it rests on, and what instead where tensors are converted by another protocol than DLPack.
    sentence: Sentence
    sentences: Mapping[str, Sentence] = field(default_factory=dict)
    #: The tensor that it is about, where it is not a plain one, and the list that arrives.
    special: str = ""
    expected: str = ""
    #: Which call takes the tensor, and the value of ``copy=``.
    takes: str = ""
    copy: str = ""
    #: Exceptions by which the sentence lets the interchange be refused.
    refusal: tuple[str, ...] = ()
    on: tuple[str, ...] = (HOST, GPU)
    needs: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    #: Whether tensors of many dtypes are made.
    typed: bool = False
    #: Whether the report shows it. The others check the snippets.
    shown: bool = True


LAYOUT = """
  x = $special
! y = $take
? got = $list_y
? print("right" if got == $expected else f"wrong: {got}")
"""

SHAPE = """
  x = $special
! y = $take
? got = $shape_y, $list_y
? print("right" if got == $expected else f"wrong: {got}")
"""

DTYPES = """
  refused, wrong = [], []
  for name in "$expected".split():
      try: x = $typed
      except Exception: continue  # the producer does not have it
      try: y = $take
      except Exception: refused.append(name); continue
      try: got = $dtype_y, $list_y
      except Exception: continue  # the target takes it, and cannot show it
      if got != (name, [1] * 4): wrong.append(f"{name} as {got}")
  print(f"wrong: {wrong}" if wrong else f"refused: {' '.join(refused)}" if refused else "right")
"""

IN_PLACE = """
  x = $aligned
! y = $take
? $touch
? $settle
? print("right" if $same else "wrong: copied")
"""

COPY_TRUE = """
  x = $aligned
! y = $take
? $touch
? $settle
? print("wrong: not copied" if $same else "right")
"""

COPY_FALSE = """
  x = $special
! y = $take
? $touch
? $settle
? print("right" if $same else "wrong: copied")
"""

READ_ONLY = """
  x = $special
  with warnings.catch_warnings(record=True) as caught:
      warnings.simplefilter("always")
!     y = $take
  words = [str(one.message) for one in caught if re.search("writ|read.?only|immutable", str(one.message))]
! $fill_y
? $settle_y
? seen = f"right: a warning came first: {words[0]}" if words else "wrong: the memory was written to"
? print(seen if 9 in $list_x else "right: a copy was written to")
"""

LIFETIME = """
  wrong, new = 0, []
  for _ in range(8):
      x = $ones
!     y = $take
      del x; gc.collect()
      new += [$twos for _ in range(20)]
?     wrong += $list_y != [1.0] * 256
  print(f"wrong: {wrong} of 8 views lost their memory" if wrong else "right")
"""

THREAD = """
  x = $ones
! y = [$take]
? t = threading.Thread(target=y.clear)
? t.start(); t.join(); gc.collect()
? got = $list_x
? print("right" if got == [1.0] * 256 else f"wrong: {got[:4]}")
"""

ONCE = """
  x = $ones
  c = $capsule
  $again
  y = $take_again
! z = $take_again
? print("wrong: the capsule was taken twice")
"""

UNSUPPORTED = """
  x = $made
! y = $take
? print(f"wrong: it was taken as {type(y)}")
"""

ORDER = """
  x, stale, waited = $ones, 0, 0
  with $streams:
      for i in range(2, $end):
          $wait
          $slow_x
          $write_i
!         t = time.perf_counter(); y = $take; waited += time.perf_counter() - t > 0.01
?         $copied
?         stale += bool(($array_z != i).any())
  waits = f"waits: the host waits in {waited} of $repeat" if waited > $half else "right"
  print(f"wrong: {stale} of $repeat reads are stale" if stale else waits)
"""

RELEASE = """
  wrong = reused = 0
  with $streams:
      for i in range($repeat):
          x = $ones
          $wait
          $remember
!         y = $take
?         $slow_y
?         $copied
          del x, y
          new = [$twos for _ in range(4)]
          $count
?         wrong += bool(($array_z != 1).any())
  print(f"wrong: {wrong} of $repeat reads see what was written later" if wrong else $unbroken)
"""

CONTROL = """
  x = $ones
  with $streams:
      for i in range(2, 6):
          $wait
          t = time.perf_counter()
          $slow_x
          $write_i
          y = x
          $copied
          queued = time.perf_counter() - t
          got, total = $array_z, time.perf_counter() - t
  said = f"{queued * 1000:.1f} ms to queue work of {total * 1000:.1f} ms"
  print(("right" if (got == i).all() and queued < total / 2 and total > 0.015 else "wrong") + ": " + said)
"""

CONTROL_VALUES = """
  y = $made
  $placed
  got = $list_y
  print("right" if got == $expected else f"wrong: {got}")
"""

_ROWS = "[[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0], [8.0, 9.0, 10.0, 11.0]]"
_MEMORY = {INTERFACE: sentences.INTERFACE_DATA}
_STRIDES = {INTERFACE: sentences.STRIDES}

PROPERTIES = (
    Property(
        name="control",
        doc="the snippets themselves: a framework with its own tensor",
        template=CONTROL_VALUES,
        sentence=sentences.CONTAINS,
        expected=_ROWS,
        shown=False,
    ),
    Property(
        name="control of streams",
        doc="the snippets of the races themselves: slow work is queued at once, and seen in its stream",
        template=CONTROL,
        sentence=sentences.HANDOFF,
        on=(GPU,),
        needs=(RACES,),
        imports=("import time",),
        shown=False,
    ),
    Property(
        name="values",
        doc="the elements arrive",
        template=LAYOUT,
        sentence=sentences.CONTAINS,
        sentences=_MEMORY,
        expected=_ROWS,
    ),
    Property(
        name="dtypes",
        doc="each dtype of the array API arrives as itself",
        template=DTYPES,
        sentence=sentences.DTYPES,
        sentences=_MEMORY,
        expected="bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float32 float64 complex64 complex128",
        typed=True,
    ),
    Property(
        name="small floats",
        doc="float16, bfloat16 and float8 arrive as themselves",
        template=DTYPES,
        sentence=sentences.SMALL,
        sentences=_MEMORY,
        expected="float16 bfloat16 float8_e4m3fn float8_e5m2",
        typed=True,
    ),
    Property(
        name="transposed",
        doc="a transposed matrix arrives",
        template=LAYOUT,
        sentence=sentences.LAYOUT,
        sentences=_STRIDES,
        special="transposed",
        expected="[[0.0, 4.0, 8.0], [1.0, 5.0, 9.0], [2.0, 6.0, 10.0], [3.0, 7.0, 11.0]]",
    ),
    Property(
        name="stepped",
        doc="every second column arrives",
        template=LAYOUT,
        sentence=sentences.LAYOUT,
        sentences=_STRIDES,
        special="stepped",
        expected="[[0.0, 2.0], [4.0, 6.0], [8.0, 10.0]]",
    ),
    Property(
        name="negative",
        doc="reversed rows arrive, whose stride is negative",
        template=LAYOUT,
        sentence=sentences.LAYOUT,
        sentences=_STRIDES,
        special="negative",
        expected="[[8.0, 9.0, 10.0, 11.0], [4.0, 5.0, 6.0, 7.0], [0.0, 1.0, 2.0, 3.0]]",
    ),
    Property(
        name="broadcast",
        doc="a repeated row arrives, whose stride is 0",
        template=LAYOUT,
        sentence=sentences.LAYOUT,
        sentences=_STRIDES,
        special="broadcast",
        expected="[[0.0, 1.0, 2.0, 3.0]] * 3",
    ),
    Property(
        name="offset",
        doc="rows from the second on arrive, whose address is divisible by 16 and not by 64",
        template=LAYOUT,
        sentence=sentences.ALIGNMENT,
        sentences=_MEMORY,
        special="offset",
        expected="[[4.0, 5.0, 6.0, 7.0], [8.0, 9.0, 10.0, 11.0]]",
    ),
    Property(
        name="empty",
        doc="a tensor without elements arrives",
        template=SHAPE,
        sentence=sentences.EMPTY,
        sentences={INTERFACE: sentences.INTERFACE_EMPTY},
        special="empty",
        expected="((0, 3), [])",
    ),
    Property(
        name="scalar",
        doc="a tensor without dimensions arrives",
        template=SHAPE,
        sentence=sentences.SCALAR,
        sentences=_MEMORY,
        special="scalar",
        expected="((), 7.0)",
    ),
    Property(
        name="deferred",
        doc="an operation that the producer has deferred is done: the imaginary part of a conjugate",
        template=LAYOUT,
        sentence=sentences.CONTAINS,
        sentences=_MEMORY,
        special="deferred",
        expected="[-2.0, -4.0]",
    ),
    Property(
        name="byte order",
        doc="elements of the other byte order are refused, or arrive",
        template=LAYOUT,
        sentence=sentences.ENDIANNESS,
        special="byte order",
        expected="[0.0, 1.0, 2.0, 3.0]",
        refusal=ANY,
        on=(HOST,),
    ),
    Property(
        name="in place",
        doc="compact, aligned memory is shared",
        template=IN_PLACE,
        sentence=sentences.VIEW,
        sentences=_MEMORY,
        needs=(SHARED,),
    ),
    Property(
        name="copy=True",
        doc="a copy that is asked for is made",
        template=COPY_TRUE,
        sentence=sentences.ALWAYS_COPY,
        takes=COPY,
        copy="True",
        needs=(SHARED,),
    ),
    Property(
        name="copy=False",
        doc="every second column is shared, or refused with the error that the text names",
        template=COPY_FALSE,
        sentence=sentences.NEVER_COPY,
        special="stepped",
        takes=COPY,
        copy="False",
        refusal=("BufferError", "ValueError"),
        needs=(SHARED,),
    ),
    Property(
        name="read-only",
        doc="a view of read-only memory that can be written to is refused or warned of",
        template=READ_ONLY,
        sentence=sentences.READ_ONLY,
        imports=("import re", "import warnings"),
        special="read-only",
        refusal=ANY,
        needs=(WRITTEN,),
    ),
    Property(
        name="lifetime",
        doc="the view keeps the memory when the producer's tensor is dropped",
        template=LIFETIME,
        sentence=sentences.BOTH,
        needs=(OBJECT,),
        imports=("import gc",),
    ),
    Property(
        name="thread",
        doc="the view can be dropped on another thread",
        template=THREAD,
        sentence=sentences.DELETER,
        needs=(OBJECT,),
        imports=("import gc", "import threading"),
    ),
    Property(
        name="once",
        doc="a capsule that was taken is not taken again",
        template=ONCE,
        sentence=sentences.ONCE,
        refusal=ANY,
        needs=(OBJECT,),
    ),
    Property(
        name="no such device",
        doc="a tensor where the target has none is refused",
        template=UNSUPPORTED,
        sentence=sentences.UNSUPPORTED,
        sentences=_MEMORY,
        refusal=ANY,
        on=(GPU,),
        needs=(ELSEWHERE,),
    ),
    Property(
        name="to the host",
        doc="a tensor of a GPU arrives on the host where that is asked for",
        template=LAYOUT,
        sentence=sentences.TO_HOST,
        expected=_ROWS,
        takes=TO_HOST,
        on=(GPU,),
    ),
    Property(
        name="order",
        doc="the target's stream sees what the producer's stream had still to write",
        template=ORDER,
        sentence=sentences.HANDOFF,
        sentences={INTERFACE: sentences.INTERFACE_HANDOFF},
        on=(GPU,),
        needs=(RACES,),
        imports=("import time",),
    ),
    Property(
        name="release order",
        doc="memory is reused only after the last reader",
        template=RELEASE,
        sentence=sentences.RELEASE,
        sentences={INTERFACE: sentences.INTERFACE_RELEASE},
        on=(GPU,),
        needs=(RACES,),
    ),
)

#: The properties by name.
BY_NAME = {row.name: row for row in PROPERTIES}
