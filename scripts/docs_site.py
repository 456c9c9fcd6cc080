"""What mkdocs needs to know of this repository: pages that lie outside of `docs/`, and where links between all of them lead."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md",
           "SECURITY.md": "security.md", "benchmarks/README.md": "benchmarks.md", "examples/README.md": "examples.md"}
"""Page outside of `docs/` → its name in the site."""
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s:#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    for source, name in OUTSIDE.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as the site has them. A link to a file that is no page, such as a script or a result file, becomes its path."""
    name = page.file.src_uri
    source = {site: source for source, site in OUTSIDE.items()}.get(name, f"docs/{name}")

    def replaced(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        path = os.path.normpath(PurePosixPath(source).parent / target)
        if path not in OUTSIDE and not path.startswith("docs/"):
            return f"{text} (`{path}`)" if (ROOT / path).exists() and text.strip("`") != path else text
        to = OUTSIDE.get(path) or path.removeprefix("docs/")
        return f"[{text}]({os.path.relpath(to, PurePosixPath(name).parent)}{anchor})"

    return _LINK.sub(replaced, markdown)
