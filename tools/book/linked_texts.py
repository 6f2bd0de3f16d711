"""A preprocessor of mdBook: a page of `docs/design` that only links to a file has the text of that file in the book.

On a code host, the page is a heading and the link, which leads to the file. In the book, the link would lead nowhere.
"""

import json
import posixpath
import re
import sys
from pathlib import Path

PAGE = re.compile(r"# [^\n]*\n+See \[[^\]]*\]\((\.\./[^)]*\.md)\)\.\n*")
# The end of a link or a picture below `docs/`, in a file in the root of the repository.
DOCS = re.compile(r"\]\(docs/")


def with_text(chapter: dict, docs: Path) -> None:
    """Replaces the content of a chapter that is only a heading and a link to a file."""
    link = PAGE.fullmatch(chapter["content"])
    if link is None or chapter["path"] is None:
        return
    file = posixpath.normpath(posixpath.join(docs.name, posixpath.dirname(chapter["path"]), link[1]))
    text = (docs.parent / file).read_text(encoding="utf-8")
    chapter["content"] = f"{DOCS.sub('](../', text)}\n---\n\nThe text of this page is `{file}`.\n"


def visit(node: object, docs: Path) -> None:
    """Visits all chapters below a part of the book."""
    if isinstance(node, list):
        for part in node:
            visit(part, docs)
    elif isinstance(node, dict):
        if "content" in node and "path" in node:
            with_text(node, docs)
        for part in node.values():
            visit(part, docs)


def main() -> None:
    if sys.argv[1:2] == ["supports"]:
        return
    context, book = json.load(sys.stdin)
    visit(book, Path(context["root"]) / context["config"]["book"]["src"])
    json.dump(book, sys.stdout)


main()
