"""The notebook `examples/schedules.ipynb`: its cells run, and its texts and tables are what they return.

With PIPEWRIGHT_WRITE_PAGES=1, the test writes the outputs of the cells into the notebook.
"""

import ast
import json
import os
import pathlib

import pytest

NOTEBOOK = pathlib.Path(__file__).parents[4] / "examples" / "schedules.ipynb"
#: How a notebook asks a value for its forms, and their types.
FORMS = {"_repr_svg_": "image/svg+xml", "_repr_html_": "text/html"}


def outputs_of(source, names):
    """Runs a cell as a notebook does, and returns the forms of its last expression."""
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "<cell>", "exec"), names)
    value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names) if last else None
    if value is None:
        return {}
    forms = {kind: getattr(value, form)() for form, kind in FORMS.items() if hasattr(value, form)}
    return {kind: text for kind, text in forms.items() if text is not None} | {"text/plain": repr(value)}


def joined(text):
    """The text of a notebook's field, which may be a list of lines."""
    return text if isinstance(text, str) else "".join(text)


def test_the_notebook_shows_what_its_cells_return(tmp_path, monkeypatch):
    if not NOTEBOOK.exists():
        pytest.skip("the tests are not in a clone of the repository, so the notebook is not tested")
    notebook = json.loads(NOTEBOOK.read_text())
    monkeypatch.chdir(tmp_path)
    names, shown, count = {}, [], 0
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        count += 1
        found = outputs_of(joined(cell["source"]), names)
        result = {"data": found, "execution_count": count, "metadata": {}, "output_type": "execute_result"}
        expected = {kind: joined(text) for output in cell["outputs"] for kind, text in output["data"].items()}
        shown.append((expected, found))
        cell.update(execution_count=count, outputs=[result] if found else [])
    if os.environ.get("PIPEWRIGHT_WRITE_PAGES"):
        NOTEBOOK.write_text(json.dumps(notebook, indent=1) + "\n")
        return
    assert count > 5
    for expected, found in shown:
        assert found == expected, "write the notebook anew with PIPEWRIGHT_WRITE_PAGES=1"
