"""The properties: those of the suite that concern the frameworks' own method, each a template of a program.

The first character of a line says what an exception in it means: in a line with ``!`` the interchange was refused, in a
line with ``?`` its result cannot be used, in any other the program could not run. What follows is Python; ``$name`` is
filled in from the rows of the two frameworks, and a line of which nothing remains is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from truebridge_conformance.scoreboard import sentences
from truebridge_conformance.scoreboard.frameworks import GPU, HOST
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
    #: What it rests on, where tensors are converted by DLPack.
    sentence: Sentence
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

#: Strides, which are special tensors of these names: what arrives.
STRIDES = (
    (
        "transposed",
        "a transposed matrix arrives",
        "[[0.0, 4.0, 8.0], [1.0, 5.0, 9.0], [2.0, 6.0, 10.0], [3.0, 7.0, 11.0]]",
    ),
    ("stepped", "every second column arrives", "[[0.0, 2.0], [4.0, 6.0], [8.0, 10.0]]"),
    (
        "negative",
        "reversed rows arrive, whose stride is negative",
        "[[8.0, 9.0, 10.0, 11.0], [4.0, 5.0, 6.0, 7.0], [0.0, 1.0, 2.0, 3.0]]",
    ),
    ("broadcast", "a repeated row arrives, whose stride is 0", "[[0.0, 1.0, 2.0, 3.0]] * 3"),
)

PROPERTIES = (
    Property(
        "control",
        "the snippets themselves: a framework with its own tensor",
        CONTROL_VALUES,
        sentences.CONTAINS,
        expected=_ROWS,
        shown=False,
    ),
    Property(
        "control of streams",
        "the snippets of the races themselves: slow work is queued at once, and seen in its stream",
        CONTROL,
        sentences.HANDOFF,
        on=(GPU,),
        needs=(RACES,),
        imports=("import time",),
        shown=False,
    ),
    Property("values", "the elements arrive", LAYOUT, sentences.CONTAINS, expected=_ROWS),
    Property(
        "dtypes",
        "each dtype of the array API arrives as itself",
        DTYPES,
        sentences.DTYPES,
        expected="bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float32 float64 complex64 complex128",
        typed=True,
    ),
    Property(
        "small floats",
        "float16, bfloat16 and float8 arrive as themselves",
        DTYPES,
        sentences.SMALL,
        expected="float16 bfloat16 float8_e4m3fn float8_e5m2",
        typed=True,
    ),
    *(
        Property(name, doc, LAYOUT, sentences.LAYOUT, special=name, expected=expected)
        for name, doc, expected in STRIDES
    ),
    Property(
        "offset",
        "rows from the second on arrive, whose address is divisible by 16 and not by 64",
        LAYOUT,
        sentences.ALIGNMENT,
        special="offset",
        expected="[[4.0, 5.0, 6.0, 7.0], [8.0, 9.0, 10.0, 11.0]]",
    ),
    Property(
        "empty", "a tensor without elements arrives", SHAPE, sentences.EMPTY, special="empty", expected="((0, 3), [])"
    ),
    Property(
        "scalar", "a tensor without dimensions arrives", SHAPE, sentences.SCALAR, special="scalar", expected="((), 7.0)"
    ),
    Property(
        "deferred",
        "an operation that the producer has deferred is done: the imaginary part of a conjugate",
        LAYOUT,
        sentences.CONTAINS,
        special="deferred",
        expected="[-2.0, -4.0]",
    ),
    Property(
        "byte order",
        "elements of the other byte order are refused, or arrive",
        LAYOUT,
        sentences.ENDIANNESS,
        special="byte order",
        expected="[0.0, 1.0, 2.0, 3.0]",
        refusal=ANY,
        on=(HOST,),
    ),
    Property("in place", "compact, aligned memory is shared", IN_PLACE, sentences.VIEW, needs=(SHARED,)),
    Property(
        "copy=True",
        "a copy that is asked for is made",
        COPY_TRUE,
        sentences.ALWAYS_COPY,
        takes=COPY,
        copy="True",
        needs=(SHARED,),
    ),
    Property(
        "copy=False",
        "every second column is shared, or refused with the error that the text names",
        COPY_FALSE,
        sentences.NEVER_COPY,
        special="stepped",
        takes=COPY,
        copy="False",
        refusal=("BufferError", "ValueError"),
        needs=(SHARED,),
    ),
    Property(
        "read-only",
        "a view of read-only memory that can be written to is refused or warned of",
        READ_ONLY,
        sentences.READ_ONLY,
        imports=("import re", "import warnings"),
        special="read-only",
        refusal=ANY,
        needs=(WRITTEN,),
    ),
    Property(
        "lifetime",
        "the view keeps the memory when the producer's tensor is dropped",
        LIFETIME,
        sentences.BOTH,
        needs=(OBJECT,),
        imports=("import gc",),
    ),
    Property(
        "thread",
        "the view can be dropped on another thread",
        THREAD,
        sentences.DELETER,
        needs=(OBJECT,),
        imports=("import gc", "import threading"),
    ),
    Property("once", "a capsule that was taken is not taken again", ONCE, sentences.ONCE, refusal=ANY, needs=(OBJECT,)),
    Property(
        "no such device",
        "a tensor where the target has none is refused",
        UNSUPPORTED,
        sentences.UNSUPPORTED,
        refusal=ANY,
        on=(GPU,),
        needs=(ELSEWHERE,),
    ),
    Property(
        "to the host",
        "a tensor of a GPU arrives on the host where that is asked for",
        LAYOUT,
        sentences.TO_HOST,
        expected=_ROWS,
        takes=TO_HOST,
        on=(GPU,),
    ),
    Property(
        "order",
        "the target's stream sees what the producer's stream had still to write",
        ORDER,
        sentences.HANDOFF,
        on=(GPU,),
        needs=(RACES,),
        imports=("import time",),
    ),
    Property(
        "release order",
        "memory is reused only after the last reader",
        RELEASE,
        sentences.RELEASE,
        on=(GPU,),
        needs=(RACES,),
    ),
)

#: The properties by name.
BY_NAME = {row.name: row for row in PROPERTIES}
