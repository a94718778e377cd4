"""Make site pages out of the repository: the pages of docs/, files outside docs/, the reference.

The pages of docs/ are read on a code host as well, where they link to files next to docs/. Each such file becomes a
page of the site, so that every link stays inside it.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import TYPE_CHECKING

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
#: Files of the site that lie next to this one.
ASSETS = [Path(__file__).with_name(name) for name in ("site.css", "iframe-worker.js")]
#: What a page loads: scripts, styles and pictures. Links that a reader may follow are none.
LOADED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=[\"']?(https?:[^\s\"'>]+)")

#: Links of a page, and images: the place, then the anchor.
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
#: What a code host shows as the link next to it, and the site as code: a file, by its path from the page.
SHOWN = re.compile(r"<!-- code: ([\w./]+) -->")
#: Code, in which nothing is a link.
CODE = re.compile(r"(^(?:```|~~~~).*?^(?:```|~~~~)$|`[^`\n]+`)", re.M | re.S)

#: The pages of the reference: a title, and what each shows. A name that ends in ``_`` stands for those that begin so.
REFERENCE = {
    "conversions": (
        "Conversions",
        "to_torch to_numpy to_cupy to_jax to_tensorflow convert plan Plan copy copier Copier record_stream "
        "lend Loan call to_onnxruntime reshard profile stats Target",
    ),
    "pairs": ("Pairs", "convert_"),
    "files": ("Files", "save load"),
    "processes": (
        "Other processes",
        "share open revoke Ticket processes.configure processes.held processes.transport serve connect "
        "processes.Names processes.Client processes.Publication processes.Subscription ray",
    ),
    "tensorflow": ("TensorFlow", "tensorflow tensorflow.v1"),
    "jax": ("JAX", "jax"),
    "autograd": ("Gradients", "autograd"),
    "doctor": (
        "Doctor",
        "doctor diagnostics.report.Report diagnostics.report.Finding diagnostics.report.Matrix diagnostics.report.Pair "
        "diagnostics.report.Framework diagnostics.report.Gpu bench diagnostics.bench.Bench diagnostics.bench.Handoff "
        "diagnostics.bench.Copies diagnostics.report.Written",
    ),
    "debugging": (
        "Debugging",
        "debug diagnostics.debug.Debug diagnostics.debug.Finding diagnostics.debug.BridgeDebugWarning",
    ),
    "tracing": ("Tracing", "trace diagnostics.trace.Trace diagnostics.trace.Event diagnostics.trace.Row"),
    "errors": ("Errors", "errors"),
}
#: Words that readers search for and a page says in others. The search finds the page by them.
KEYWORDS = {
    "howto/cupy-to-pytorch.md": "cupy to torch",
    "howto/cupy-to-tensorflow.md": "cupy to tf",
    "howto/jax-to-pytorch.md": "jax to torch",
    "howto/pytorch-gpu-to-tensorflow.md": "torch to tf",
    "howto/tensorflow-to-pytorch.md": "tf to torch",
    "howto/store.md": "store",
    "howto/weights.md": "weight sync",
    "doctor.md": "benchmark bench",
    "files.md": "safetensors tensorflow",
    "install.md": "pip install windows macos amd rocm licence license",
    "python.md": "jupyter notebook plan",
    "tensorflow.md": "tensorflow 1.15",
    "troubleshooting.md": "error exception OOM",
    "conversions.md": "dtype int8 int16 int32 int64 uint8 float16 float32 float64",
}
#: The page with verdicts. By sign: the verdict, and what stands in its cell.
SCOREBOARD = "scoreboard.md"
VERDICTS = {
    "✓": ("right", "✓"),
    "◷": ("waits", "◷ waits"),
    "r": ("refused", "refused"),
    "<strong>✗</strong>": ("wrong", "✗ wrong"),
    "–": ("not-offered", "–"),
    "?": ("unknown", "?"),
}
#: The most letters of a description of a page.
DESCRIPTION = 160
#: The page of the names that no other page shows.
REST = "more"
#: Folders that are linked to and have no page.
FOLDERS = {"docs/design": "design/core.md"}
PACKAGE = ROOT / "crates/bridge-python/python/truebridge/__init__.py"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Name the version, and add pages that the navigation does not name to the guide and to the reference."""
    manifest = (ROOT / "Cargo.toml").read_text()
    version, licence = (re.search(rf'^{key} = "(.*)"$', manifest, re.M)[1] for key in ("version", "license"))
    config.copyright = f"truebridge {version}, {licence.replace(' OR ', ' or ')}"
    named = set(re.findall(r"[\w/-]+\.md", str(config.nav)))
    (guide,) = (section["Guide"] for section in config.nav if "Guide" in section)
    guide.extend(sorted(page.name for page in DOCS.glob("*.md") if page.name not in named))
    if rest():
        (pages,) = (section["Reference"] for section in config.nav if "Reference" in section)
        pages.append(f"reference/{REST}.md")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not files of docs/."""
    for path, text in (*outside(files, config), *reference()):
        files.append(File.generated(config, path, content=text))
    for file in ASSETS:
        files.append(File.generated(config, file.name, abs_src_path=str(file)))
    return files


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Refuse a page that loads anything from the network, or that shows a table as its source."""
    if loaded := LOADED.search(output):
        raise PluginError(f"{page.file.src_uri} loads {loaded[1]}")
    if "<p>|" in output:
        raise PluginError(f"{page.file.src_uri} has a table that Markdown does not read as one: compare its columns")
    return output


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in files, and turn links to the repository into links to pages of the site."""
    path = page.file.src_uri
    page.meta.setdefault("description", described(markdown))
    if path in KEYWORDS:
        page.meta["tags"] = KEYWORDS[path].split()
    # Sources of programs, reports and lists of names would come before the pages that explain them.
    if "." in PurePosixPath(path).stem or path.startswith(("results/20", "reference/index", "questions")):
        page.meta["search"] = {"exclude": True}
    markdown = SHOWN.sub(lambda mark: fenced(ROOT / source(path, mark[1])), markdown)
    # Code hosts read Markdown in this element, and the site only with this attribute.
    markdown = markdown.replace("<details>", "<details markdown>")
    here = str(PurePosixPath(path).parent)
    parts = CODE.split(markdown)
    parts[::2] = (
        LINK.sub(lambda link: link[1] + relpath(uri(source(path, link[2])), here) + link[3], part)
        for part in parts[::2]
    )
    return "".join(parts)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Give the verdicts of the scoreboard their words and colours."""
    if page.file.src_uri != SCOREBOARD:
        return html
    return re.sub(r"<td>([^<>]|<strong>.</strong>)</td>", lambda cell: judged(cell[0], cell[1]), html)


def judged(cell: str, sign: str) -> str:
    """Return a cell of the scoreboard with the word for its sign."""
    if sign not in VERDICTS:
        return cell
    kind, shown = VERDICTS[sign]
    return f'<td class="verdict {kind}" title="{kind}">{shown}</td>'


def described(markdown: str) -> str:
    """Return the first sentences of a page as one line, for search engines and previews."""
    paragraphs = (part for part in re.split(r"\n\s*\n", markdown) if re.match(r"[\w*`]", part) and part[:3] != "```")
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(next(paragraphs, "").split()))
    text = re.sub(r"[`*]", "", text).replace('"', "'")
    if len(text) <= DESCRIPTION:
        return text
    whole, _, _ = text[:DESCRIPTION].rpartition(". ")
    return f"{whole}." if whole else text[:DESCRIPTION].rpartition(" ")[0] + " …"


def source(page: str, link: str) -> str:
    """Return what a link means, from the top of the repository."""
    inside = page if not (DOCS / page).exists() else f"docs/{page}"
    return normpath(str(PurePosixPath(inside).parent / link))


def uri(path: str) -> str:
    """Return where the site has a file of the repository."""
    if path in FOLDERS:
        return FOLDERS[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        path = f"{path}/README.md"
    return path if path.endswith(".md") else f"{path}.md"


def outside(files: Files, config: MkDocsConfig) -> Iterator[tuple[str, str]]:
    """Yield the files outside docs/ that the navigation or pages link to, and those that these link to."""
    pending = [(file.src_uri, (DOCS / file.src_uri).read_text()) for file in files.documentation_pages()]
    named = re.findall(r"[\w/-]+\.md", str(config.nav))
    pending.append(("navigation", "".join(f"[]({path})" for path in named if (ROOT / path).exists())))
    seen = set()
    while pending:
        page, text = pending.pop()
        for link in LINK.finditer(CODE.sub("", text)):
            path = source(page, link[2])
            if path.startswith("docs/") or uri(path) in seen:
                continue
            file = ROOT / path
            file = file / "README.md" if file.is_dir() else file
            if not file.is_file():
                raise PluginError(f"{page} links to {link[2]}, which is not there")
            seen.add(uri(path))
            body = file.read_text()
            if file.suffix == ".md":
                pending.append((uri(path), body))
            else:
                body = f"# {file.name}\n\n`{path}`\n\n{fenced(file)}\n"
            yield uri(path), body


def fenced(file: Path) -> str:
    """Return the text of a file as a block of code."""
    return f"~~~~{file.suffix[1:]}\n{file.read_text()}\n~~~~"


def reference() -> Iterator[tuple[str, str]]:
    """Yield the pages of the reference, and one that lists them."""
    lines = ["# API reference", "The functions of `truebridge`, in the order in which programs use them."]
    for path, (title, listed) in REFERENCE.items():
        names = [name for part in listed.split() for name in meant(part)]
        shown = ", ".join(f"[`{name.split('.')[-1]}`][truebridge.{name}]" for name in names)
        lines.append(f"- **[{title}]({path}.md)**: {shown}")
    yield "reference/index.md", "\n\n".join(lines[:2]) + "\n\n" + "\n".join(lines[2:]) + "\n"
    for path, (title, listed) in {**REFERENCE, REST: ("More", " ".join(rest()))}.items():
        blocks = [f"# {title}"]
        blocks.extend(f"::: truebridge.{name}" for part in listed.split() for name in meant(part))
        if len(blocks) > 1:
            yield f"reference/{path}.md", "\n\n".join(blocks) + "\n"


def meant(part: str) -> list[str]:
    """Return the names that a part of a page stands for."""
    return [name for name in public() if name.startswith(part)] if part.endswith("_") else [part]


def rest() -> list[str]:
    """Return the public names that REFERENCE has no place for. Those of errors are on the page of their module."""
    parts = [part for _, listed in REFERENCE.values() for part in listed.split()]
    shown = {name.partition(".")[0] for part in parts for name in meant(part)} | {*REFERENCE}
    errors = {name for name in public() if name.startswith("Bridge") or name.endswith("Warning")}
    return [name for name in public() if name not in shown | errors and not name.startswith("__")]


def public() -> list[str]:
    """Return the public names, the functions of pairs and the modules of the package: it is read, not imported."""
    tree = ast.parse(PACKAGE.read_text())
    (names,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    (pairs,) = (
        node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "_frameworks.pairs"
    )
    names += [alias.name for alias in pairs.names]
    modules = [file.stem for file in PACKAGE.parent.glob("[a-z]*.py")]
    modules += [file.parent.name for file in PACKAGE.parent.glob("[a-z]*/__init__.py")]
    return [*names, *sorted({*modules} - {*names})]
