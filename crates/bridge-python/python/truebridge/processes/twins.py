"""Methods for asyncio: the call runs in a thread, and the event loop goes on."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from concurrent.futures import ThreadPoolExecutor
    from typing import ParamSpec, TypeVar

    _Arguments = ParamSpec("_Arguments")
    _Result = TypeVar("_Result")


def twin(
    method: Callable[_Arguments, _Result], *, is_whole: bool = False
) -> Callable[_Arguments, Coroutine[Any, Any, _Result]]:
    """Return a method that does the same in a thread, under the same name with ``_async`` at its end.

    With ``is_whole`` a cancelled call ends only when the method has returned, so that it cannot follow a later one.
    """

    @functools.wraps(method)
    async def twin(*args: _Arguments.args, **keywords: _Arguments.kwargs) -> _Result:
        import asyncio

        call = asyncio.ensure_future(asyncio.to_thread(method, *args, **keywords))
        if not is_whole:
            return await call
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            while not call.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([call])
            # An error of the call goes with it.
            call.exception()
            raise

    twin.__name__, twin.__qualname__ = f"{method.__name__}_async", f"{method.__qualname__}_async"
    return twin


@functools.cache
def watchers(_process: int) -> ThreadPoolExecutor:
    """Return the threads of this process that wait for versions.

    Those of ``asyncio.to_thread`` are few, and other calls need them.
    """
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(1 << 10, thread_name_prefix="truebridge-watch")
