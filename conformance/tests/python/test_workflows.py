"""The workflows and the action for CI: they parse, name what exists, and the action's steps run here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import truebridge_conformance

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

ROOT = Path(__file__).parents[3]
BUNDLE = Path(truebridge_conformance.__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
ACTION = ROOT / "conformance/action.yml"

#: Programs that every runner of GitHub has, and that this machine need not have.
ON_RUNNERS = {"rustup", "cargo", "python"}

#: Commands that are too long for a test: each runs in `.ci/run` or a separate test.
XTASK = re.compile(r"^    ([A-Z]\w+)(?: \{|\(|,)", re.MULTILINE)


def read(path: Path) -> dict[str, Any]:
    """Parses a file. YAML 1.1 reads the key ``on`` as true."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {("on" if key is True else key): value for key, value in content.items()}


def steps(path: Path) -> list[dict[str, Any]]:
    content = read(path)
    if path == ACTION:
        return content["runs"]["steps"]
    return [step for job in content["jobs"].values() for step in job.get("steps", [])]


def tasks() -> set[str]:
    """The names of the commands of ``cargo xtask``."""
    text = (ROOT / "xtask/src/main.rs").read_text(encoding="utf-8")
    names = XTASK.findall(text.split("enum Task {")[1].split("\n}\n")[0])
    return {re.sub(r"(?<!^)([A-Z])", r"-\1", name).lower() for name in names}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_says_what_it_may_and_for_how_long(path: Path) -> None:
    content = read(path)
    assert content["name"] == path.stem and content["permissions"] == {"contents": "read"}
    for name, job in content["jobs"].items():
        if "uses" in job:
            called = read(ROOT / job["uses"])["on"]["workflow_call"]["inputs"]
            assert set(job["with"]) <= set(called), name
        else:
            assert job["runs-on"] and job["timeout-minutes"] <= 120, name


@pytest.mark.parametrize("path", [*WORKFLOWS, ACTION], ids=lambda path: path.name)
def test_steps_name_what_exists(path: Path) -> None:
    for step in steps(path):
        uses, run = step.get("uses", ""), step.get("run", "")
        assert bool(uses) != bool(run), step
        if uses.startswith("./"):
            folder = ROOT / uses.replace("./.truebridge/", "./")
            given = set(step.get("with", {}))
            assert given <= set(read(folder / "action.yml")["inputs"]), step
        elif uses:
            assert re.fullmatch(r"actions/[\w-]+@v\d+", uses), uses
        for line in run.splitlines():
            program, *words = line.split()
            if program == "cargo" and words[0] == "xtask":
                assert words[1] in tasks(), line
            known = program in ON_RUNNERS or shutil.which(program) or os.access(ROOT / program, os.X_OK)
            assert known, line
        # An expression in a command would be read as a command.
        assert "${{" not in run, run
        subprocess.run(["bash", "-n", "-c", run], check=True)
    text = path.read_text(encoding="utf-8")
    content = read(path)
    inputs = content.get("inputs") or (content.get("on") or {}).get("workflow_call", {}).get("inputs", {})
    assert set(re.findall(r"inputs\.([\w-]+)", text)) == set(inputs)


def test_hooks_name_what_exists() -> None:
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert [repository["repo"] for repository in repositories] == ["local"]
    for hook in repositories[0]["hooks"]:
        program, *words = hook["entry"].split()
        assert program == "cargo" or program.startswith("target/venv/bin/"), hook
        assert words[0] != "xtask" or words[1] in tasks(), hook
        assert all((ROOT / word).exists() for word in words if "/" in word), hook


def test_packages_of_cargo_exist() -> None:
    known = {re.search('^name = "(.*)"', path.read_text(encoding="utf-8"), re.MULTILINE)[1] for path in manifests()}  # type: ignore[index]
    named = [word for path in WORKFLOWS for word in re.findall(r"-p ([\w-]+)", path.read_text(encoding="utf-8"))]
    assert named and set(named) <= known


def manifests() -> list[Path]:
    return [*ROOT.glob("crates/*/Cargo.toml"), ROOT / "conformance/Cargo.toml"]


def run_action(tmp_path: Path, **inputs: str) -> subprocess.CompletedProcess[str]:
    """Runs the action's steps as GitHub does, but for the upload and, as a bundle is named, the build."""
    declared = {name: str(about.get("default", "")) for name, about in read(ACTION)["inputs"].items()}
    assert set(inputs) <= set(declared)
    values = declared | inputs | {"bundle": str(BUNDLE), "python": sys.executable}
    [step] = [step for step in steps(ACTION) if "run" in step and "if" not in step]

    def value(text: str) -> str:
        return re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda found: values[found[1]], text)

    runner = {
        "GITHUB_ACTIONS": "true",
        "GITHUB_ACTION_PATH": str(ACTION.parent),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
        "RUNNER_TEMP": str(tmp_path),
    }
    environment = {**os.environ, **runner, **{name: value(text) for name, text in step["env"].items()}}
    return subprocess.run(
        [step["shell"], "-c", step["run"]],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_action_is_green_where_all_is_well(tmp_path: Path) -> None:
    run = run_action(tmp_path, pairs="numpy:numpy", device="cpu", cases="20", seed="1")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "::error" not in run.stdout
    assert {"report.html", "report.json", "junit.xml"} <= set(os.listdir(tmp_path / "conformance-report"))
    assert "0 failed" in (tmp_path / "summary.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ({"adapters": "numpy,cupy", "device": "cpu"}, "cupy is named and cannot run: no CUDA device"),
        ({"baseline": "none.json", "device": "cpu"}, "none.json"),
    ],
)
def test_a_run_that_cannot_begin_says_so_where_people_look(tmp_path: Path, inputs: dict[str, str], reason: str) -> None:
    run = run_action(tmp_path, **inputs)
    assert run.returncode == 2
    assert re.search(f"^::error title=conformance::the suite ended with 2: .*{reason}", run.stdout, re.MULTILINE)
    assert reason in (tmp_path / "summary.md").read_text(encoding="utf-8")


def test_the_action_takes_an_input_as_a_word(tmp_path: Path) -> None:
    run = run_action(tmp_path, adapters="numpy; touch harm", device="cpu")
    assert run.returncode == 2 and "there is no adapter" in run.stderr
    assert not (tmp_path / "harm").exists()


def test_the_action_builds_a_bundle_where_none_is_named(tmp_path: Path) -> None:
    [step] = [step for step in steps(ACTION) if step.get("if") == "inputs.bundle == ''"]
    # A stand-in for cargo: the build itself takes minutes, and every test runs from its result.
    cargo = tmp_path / "cargo"
    cargo.write_text('#!/bin/sh\necho "$PWD: $*"\n', encoding="utf-8")
    cargo.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RUNNER_TEMP": "/somewhere"}
    environment["GITHUB_ACTION_PATH"] = str(ACTION.parent)
    run = subprocess.run(["bash", "-c", step["run"]], env=environment, capture_output=True, text=True, timeout=60)
    assert run.stdout == f"{ROOT}: xtask bundle /somewhere/truebridge\n", run.stderr


def test_the_container_file_copies_what_exists() -> None:
    text = (ROOT / "Containerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    known = {"FROM", "WORKDIR", "COPY", "RUN", "ENV", "VOLUME", "ENTRYPOINT"}
    assert {name for name, _ in lines} <= known
    for name, rest in lines:
        if name == "RUN":
            subprocess.run(["bash", "-n", "-c", rest], check=True)
        if name == "COPY" and not rest.startswith("--from"):
            assert all((ROOT / source).exists() for source in rest.split()[:-1]), rest
    # The frameworks that the image installs are those of the lists.
    [command] = [rest for name, rest in lines if name == "RUN" and "grep" in rest]
    pattern = re.search(r"'(.*?)'", command)[1].removeprefix("^")  # type: ignore[index]
    files = [ROOT / "xtask/requirements.txt", ROOT / "crates/bridge-jax/requirements.txt"]
    found = {match[0] for path in files for match in re.findall(f"^({pattern})", path.read_text("utf-8"), re.MULTILINE)}
    assert len(found) == 5, found
