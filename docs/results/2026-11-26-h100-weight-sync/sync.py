"""Run examples/weight_sync/run.py several times within a time, and look at its processes from outside meanwhile."""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
#: More options of run.py.
EXTRA = os.environ.get("EXTRA", "").split()
try:
    import pynvml

    pynvml.nvmlInit()
    GPU = pynvml.nvmlDeviceGetHandleByIndex(0)
except Exception:
    GPU = None


def gpu_used() -> int:
    return pynvml.nvmlDeviceGetMemoryInfo(GPU).used >> 20 if GPU else 0


def children(pid: int) -> dict[str, int]:
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]) != pid:
                continue
            words = (entry / "cmdline").read_bytes().decode().split("\0")
        except (OSError, IndexError):
            continue
        for role in ("engine", "trainer"):
            if any(word.endswith(f"{role}.py") for word in words):
                found[role] = int(entry.name)
    return found


def look(pid: int) -> tuple[int, float, int]:
    """Descriptors, resident MiB and threads of a process."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        resident = int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024
        return len(os.listdir(f"/proc/{pid}/fd")), resident, int(re.search(r"Threads:\s+(\d+)", status)[1])
    except (OSError, TypeError):
        return 0, 0.0, 0


class Run:
    """One run of run.py."""

    def __init__(self, out: Path, name: str, trainer: str, updates: int, kills: int, seed: int, until: float) -> None:
        self.name, self.kills_at, self.lines, self.samples = name, [], [], []
        command = [sys.executable, "-u", str(HERE / os.environ.get("EXAMPLE", "weight_sync") / "run.py"), "--trainer", trainer]
        command += ["--updates", str(updates), "--kills", str(kills), "--seed", str(seed), *EXTRA]
        print(name, *command[2:], flush=True)
        self.start = time.monotonic()
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        reader = threading.Thread(target=self._read, args=[process])
        reader.start()
        while process.poll() is None:
            if time.monotonic() > until:
                os.killpg(process.pid, signal.SIGKILL)
                self.lines.append("cut off: out of time")
                break
            self._sample(process.pid)
            time.sleep(0.25)
        reader.join(20)
        self.took, self.rc = time.monotonic() - self.start, process.wait()
        (out / f"{name}.log").write_text("\n".join(self.lines) + "\n")
        with (out / f"{name}.csv").open("w") as file:
            csv.writer(file).writerows([COLUMNS, *self.samples])
        self.summary = self._summary(updates, kills, seed, trainer)
        print("\n".join(self.lines[-6:]), flush=True)

    def _read(self, process: subprocess.Popen[str]) -> None:
        for line in process.stdout:
            now = time.monotonic() - self.start
            if line.startswith("kill "):
                self.kills_at.append(now)
            self.lines.append(f"{now:8.2f} {line.rstrip()}")

    def _sample(self, pid: int) -> None:
        known = children(pid)
        row = [round(time.monotonic() - self.start, 2), len(self.kills_at), *look(pid)]
        for role in ("engine", "trainer"):
            row += [known.get(role, 0), *(look(known[role]) if role in known else (0, 0.0, 0))]
        self.samples.append([*row, gpu_used()])

    def _summary(self, updates: int, kills: int, seed: int, trainer: str) -> dict[str, object]:
        text = "\n".join(self.lines)

        def found(pattern: str) -> list[int] | None:
            hit = re.search(pattern, text)
            return [int(group) for group in hit.groups()] if hit else None

        done = found(r"(\d+) updates by")
        steady = self._steady()
        return {
            "name": self.name, "trainer": trainer, "asked": {"updates": updates, "kills": kills, "seed": seed},
            "exit_code": self.rc, "seconds": round(self.took, 1), "updates": done and done[0],
            "kills": len(self.kills_at), "versions_served_torn": found(r"versions served: (\d+), torn: (\d+)"),
            "engine_descriptors_first_last": found(r"descriptors of the engine: (\d+) at the first version, (\d+)"),
            "gpu_free_mib_first_last": found(r"MiB free on the GPU: (\d+) at the first version, (\d+)"),
            "seconds_between_kills_median": self.between(), **steady,
        }

    def between(self) -> float | None:
        gaps = [b - a for a, b in zip(self.kills_at, self.kills_at[1:])]
        return round(statistics.median(gaps), 2) if gaps else None

    def _steady(self) -> dict[str, object]:
        """What was seen from outside while both programs were up: the most frequent values of the first and last fifth."""
        up = [s for s in self.samples if s[5] and s[9]]
        if len(up) < 10:
            return {}
        fifth = max(len(up) // 5, 2)
        result = {}
        for column, what in ((2, "server_descriptors"), (6, "engine_descriptors"), (10, "trainer_descriptors"),
                             (4, "server_threads"), (13, "gpu_used_mib")):
            ends = [Counter(s[column] for s in part).most_common(1)[0][0] for part in (up[:fifth], up[-fifth:])]
            result[f"seen_{what}"] = {"first": ends[0], "last": ends[1], "most": max(s[column] for s in up)}
        for column, what in ((3, "server_mib"), (7, "engine_mib"), (11, "trainer_mib")):
            ends = [round(max(s[column] for s in part)) for part in (up[:fifth], up[-fifth:])]
            result[f"seen_{what}"] = {"first": ends[0], "last": ends[1]}
        return result


COLUMNS = ["s", "kills", "server_fds", "server_mib", "server_threads", "engine", "engine_fds", "engine_mib",
           "engine_threads", "trainer", "trainer_fds", "trainer_mib", "trainer_threads", "gpu_used_mib"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trainer", default="torch")
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--fixed", type=int, nargs=2, metavar=("UPDATES", "KILLS"))
    parser.add_argument("--steady", type=int, default=10000, help="updates of a run without kills")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.seconds
    before = gpu_used()
    summaries = []

    def run(name: str, updates: int, kills: int, seed: int) -> Run:
        made = Run(options.out, name, options.trainer, updates, kills, seed, end)
        made.summary["gpu_used_mib_before_and_after"] = [before, (time.sleep(1), gpu_used())[1]]
        summaries.append(made.summary)
        (options.out / "summary.json").write_text(json.dumps(summaries, indent=1) + "\n")
        return made

    if options.fixed:
        run("fixed", *options.fixed, 0)
    else:
        first = run("calibrate", 500, 4, 1)
        each = statistics.mean([b - a for a, b in zip(first.kills_at, first.kills_at[1:])] or [10.0])
        print(f"{each:.2f} s a kill", flush=True)
        reserve = 75
        while (kills := int((end - time.monotonic() - reserve - 20) * 0.88 / each)) >= 3:
            big = run(f"kills{len(summaries)}", max(10000, kills * 120), kills, len(summaries))
            if big.rc:
                break
            each = big.between() or each
        if end - time.monotonic() > 30 and options.steady:
            run("steady", options.steady, 0, 0)
    for s in summaries:
        print({k: s.get(k) for k in ("name", "exit_code", "seconds", "updates", "kills", "versions_served_torn",
              "engine_descriptors_first_last", "gpu_free_mib_first_last")}, flush=True)
        print("   ", {k[5:]: list(v.values()) for k, v in s.items() if k.startswith("seen_")}, flush=True)


if __name__ == "__main__":
    main()
