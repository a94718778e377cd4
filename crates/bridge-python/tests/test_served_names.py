"""Names of tensors for other processes, on the host."""

import asyncio
import inspect
from pathlib import Path

import numpy as np
import pytest

import truebridge as tb
from conftest import kind_of
from truebridge import _core, processes
from truebridge_conformance.others import Other, wait_until

torch = pytest.importorskip("torch")


pytestmark = pytest.mark.usefixtures("ipc_folder")


@pytest.fixture
def _anew() -> None:
    """End what other tests have shared."""
    _core.ipc_close()


def shares() -> int:
    """Return the number of shares. What was opened is returned by a message: wait for it."""
    return processes.held()["shares"]


def test_names_and_versions(tmp_path: Path, other: Other) -> None:
    path = tmp_path / "names"
    with tb.serve(path) as names:
        first = names.put("weights", {"w": torch.zeros(2)})
        other(f"c = tb.connect({str(path)!r})")
        assert other("{n: v for n, (v, _) in c.list().items()}") == repr({"weights": first})
        assert other("c.get('weights', 'numpy')['w'].tolist()") == "[0.0, 0.0]"
        other("old = c.get('weights', 'numpy')['w']")
        second = names.put("weights", {"w": torch.ones(2)})
        assert second > first
        # An older version ends, and stays where it is open.
        assert other("tb.to_torch(old).tolist()") == "[0.0, 0.0]"
        assert other("next(c.watch('weights', after=0))") == repr(second)
        assert other(f"list(c.watch('weights', after={second}, timeout=0.01))") == "[]"
        version, tree = names.get_versioned("weights", "torch")
        assert (version, tree["w"].tolist()) == (second, [1, 1])
        with pytest.raises(ConnectionError):
            names.get("weights", "torch", version=first)
        other("c.put('answers', np.arange(2))")
        assert names.get("answers", "torch").tolist() == [0, 1]
        other("c.close()")
        wait_until(lambda: set(names.list()) == {"weights"})
        names.remove("weights")
        assert names.list() == {}
    with pytest.raises(ConnectionError):
        tb.connect(path)


def test_a_connection_shows_its_path(tmp_path: Path) -> None:
    with tb.serve(tmp_path / "names") as names, tb.connect(tmp_path / "names") as client:
        assert (repr(names), repr(client)) == (f"<Names at {tmp_path}/names>", f"<Client at {tmp_path}/names>")
    assert repr(client) == f"<Client at {tmp_path}/names, closed>"


def test_names_for_asyncio(tmp_path: Path) -> None:
    async def main() -> None:
        with tb.serve(tmp_path / "names") as names:
            versions = names.watch_async("x")
            waiting = asyncio.ensure_future(anext(versions))
            await asyncio.sleep(0)
            version = await names.put_async("x", torch.arange(2))
            assert await waiting == version
            assert (await names.get_async("x", "numpy")).tolist() == [0, 1]
            await versions.aclose()

    asyncio.run(main())


@pytest.mark.usefixtures("_anew")
def test_a_put_that_is_cancelled_follows_no_later_one(tmp_path: Path) -> None:
    async def rounds(names: tb.processes.Names) -> None:
        for number in range(60):
            try:
                await asyncio.wait_for(names.put_async("x", np.full(4, -number)), timeout=number % 3 / 2000)
            except asyncio.TimeoutError:
                pass
            version = await names.put_async("x", np.full(4, number))
            await asyncio.sleep(0.002)
            found, value = await names.get_versioned_async("x", "numpy")
            assert (found, value.tolist()) == (version, [number] * 4)

    with tb.serve(tmp_path / "names") as names:
        asyncio.run(rounds(names))
        old = names.put("x", np.zeros(1))
        names.put("x", np.zeros(1))
        with pytest.raises(tb.BridgeConnectionError, match=f"has no version {old} now"):
            names.get("x", "numpy", version=old)


def test_the_newest_of_many_versions_can_be_opened(tmp_path: Path) -> None:
    """Tasks that put one name at once, and all versions but the newest are dropped."""

    async def rounds(names: tb.processes.Names) -> None:
        for _ in range(100):
            versions = await asyncio.gather(*(names.put_async("x", np.arange(4)) for _ in range(4)))
            assert names.list()["x"][0] == max(versions)
            assert (await names.get_versioned_async("x", "numpy"))[0] == max(versions)
        assert await names.list_async() == names.list()
        await names.remove_async("x")

    with tb.serve(tmp_path / "names") as names:
        asyncio.run(rounds(names))
        wait_until(lambda: shares() == 0)


@pytest.mark.usefixtures("_anew")
def test_what_another_process_displaces_is_dropped(tmp_path: Path, other: Other) -> None:
    path = tmp_path / "names"
    with tb.serve(path) as names, tb.connect(path) as client:
        client.put("weights", torch.zeros(2))
        other(f"c = tb.connect({str(path)!r})")
        other("c.put('weights', np.ones(2))")
        wait_until(lambda: shares() == 0)
        assert names.get("weights", "numpy").tolist() == [1, 1]
        client.put("others", torch.zeros(2))
        other("c.remove('others')")
        wait_until(lambda: shares() == 0)


@pytest.mark.usefixtures("_anew")
def test_nonsense_about_names_is_a_typed_error(tmp_path: Path) -> None:
    with tb.serve(tmp_path / "names") as names, tb.connect(tmp_path / "names") as client:
        names.put("good", torch.arange(2))
        for name in ("", "a\nb", "n" * 129, "\ud800", None, 7):
            for call in (
                lambda name=name: client.put(name, torch.zeros(1)),
                lambda name=name: client.get(name, "torch"),
                lambda name=name: client.remove(name),
                lambda name=name: next(client.watch(name)),
                lambda name=name: asyncio.run(client.put_async(name, torch.zeros(1))),
            ):
                assert kind_of(call) == "argument", name
        zeros = torch.zeros(1)
        for call in (
            lambda: client.put("x", zeros, keep=-1),
            lambda: client.put("x", zeros, keep=0),
            lambda: client.put("x", zeros, keep=1.5),  # type: ignore[arg-type]
            lambda: client.put("x", zeros, keep=1 << 64),
            lambda: client.get("good", "torch", version=-1),
            lambda: client.get("good", "torch", version=1 << 64),
            lambda: next(client.watch("good", after=-1)),
            lambda: next(client.watch("none", timeout=-1.0)),
            lambda: next(client.watch("none", timeout=float("nan"))),
            lambda: next(client.watch("none", timeout="x")),  # type: ignore[arg-type]
            lambda: tb.connect(None),  # type: ignore[arg-type]
            lambda: tb.connect("\ud800"),
            lambda: tb.serve(7),  # type: ignore[arg-type]
            lambda: tb.share(zeros, expires="x"),  # type: ignore[arg-type]
            lambda: processes.configure(users=[-1]),
            lambda: processes.configure(users=7),  # type: ignore[arg-type]
            lambda: processes.configure(connections=-1),
            lambda: processes.configure(folder=7),  # type: ignore[arg-type]
        ):
            assert kind_of(call) == "argument"
        # All that was put is still there, and nothing more is shared.
        assert client.get("good", "numpy").tolist() == [0, 1]
        assert list(client.list()) == ["good"] and shares() == 1
    assert kind_of(lambda: client.put("x", zeros)) == "gone"
    wait_until(lambda: shares() == 0)


def test_every_function_of_names_has_its_double_for_asyncio() -> None:
    plain = {
        name for name, _ in inspect.getmembers(tb.processes.Client, inspect.isfunction) if not name.startswith("_")
    }
    doubles = {name for name in plain if name.endswith("_async")}
    # These ask no other process.
    assert {f"{name}_async" for name in plain - doubles - {"close", "subscribe"}} == doubles
    for double in doubles:
        ours, theirs = getattr(tb.processes.Client, double.removesuffix("_async")), getattr(tb.processes.Client, double)
        assert inspect.signature(ours).parameters == inspect.signature(theirs).parameters, double


def test_a_watch_ends_after_its_time(tmp_path: Path) -> None:
    async def watched(names: tb.processes.Names, after: int, timeout: float) -> list[int]:
        found: list[int] = []
        async for version in names.watch_async("x", after=after, timeout=timeout):
            found.append(version)
            break
        return found

    with tb.serve(tmp_path / "names") as names:
        assert (list(names.watch("x", timeout=0.01)), asyncio.run(watched(names, 0, 0.01))) == ([], [])
        version = names.put("x", torch.zeros(1))
        # A busy machine takes its time to answer, and none to say nothing.
        assert (next(names.watch("x", timeout=60)), asyncio.run(watched(names, 0, 60))) == (version, [version])
        after = (list(names.watch("x", after=version, timeout=0.01)), asyncio.run(watched(names, version, 0.01)))
        assert after == ([], [])
