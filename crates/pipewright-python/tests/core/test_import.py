"""The package imports fast, and nothing in the repository means the other package that is called `pipewright` on PyPI."""

import importlib
import json
import pathlib
import re
import subprocess
import sys
from importlib.metadata import metadata

import pipewright_pp as pw
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[4]

#: The longest time of an import of the package, in seconds.
LONGEST_S = 0.1

TIMED = """
import json, sys, time
begin = time.perf_counter()
import pipewright_pp
seconds = time.perf_counter() - begin
print(json.dumps([seconds, sorted(sys.modules)]))
"""


def test_an_import_is_fast_and_loads_no_other_package(tmp_path):
    def load():
        ran = subprocess.run([sys.executable, "-c", TIMED], cwd=tmp_path, capture_output=True, text=True, check=True)
        return json.loads(ran.stdout)

    # The first one reads files that are not in memory.
    runs = [load() for _ in range(4)]
    assert min(seconds for seconds, _ in runs) < LONGEST_S
    loaded = {name.partition(".")[0] for name in runs[0][1]}
    assert "pipewright_pp" in loaded and not loaded & {"torch", "numpy", "pandas", "pipewright"}


@pytest.mark.parametrize("name", ["pipewright_pp", "pipewright_pp.cluster", "pipewright_pp.errors", "pipewright_pp.torch"])
def test_all_public_names_exist_and_are_documented(name):
    module = importlib.import_module(name)
    assert module.__doc__ and len(module.__all__) == len(set(module.__all__)) > 2
    for public in module.__all__:
        value = getattr(module, public)
        if not callable(value):
            continue
        assert value.__module__.partition(".")[0] == "pipewright_pp", f"{public} says that it is of {value.__module__}"
        assert value.__doc__, f"{public} has no docstring"
        assert not getattr(value, "__name__", public).startswith("_"), public


def test_the_package_has_all_of_its_errors():
    errors = importlib.import_module("pipewright_pp.errors")
    assert set(errors.__all__) <= set(pw.__all__)
    kinds = {kind.__name__ for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert kinds <= set(errors.__all__)


def test_the_version_is_the_distributions():
    assert pw.__version__ == metadata("pipewright-pp")["Version"]


OTHER = re.compile(
    r"""^[\s"'`]*(?:>>> |///? *)*(?:import\s+(?:[\w.]+,\s*)*|from\s+)pipewright(?![\w-])|pip install (?:\S+ )*pipewright(?![\w-])""",
    re.MULTILINE,
)


@pytest.mark.parametrize("text", ["import pipewright as pw", "from pipewright.torch import x", "    >>> import pipewright", '"import os, pipewright', "pip install -U pipewright"])
def test_the_other_package_is_recognised(text):
    assert OTHER.search(text)
    assert not OTHER.search(text.replace("pipewright", "pipewright_pp"))


def test_nothing_imports_the_other_package():
    if not (ROOT / "docs" / "python.md").exists():
        pytest.skip("the tests are not in a clone of the repository")
    folders = [ROOT / name for name in ("docs", "bench", "examples", "tools", "crates/pipewright-python")]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in {".md", ".py", ".pyi", ".rs", ".ipynb"}]
    files = [path for path in files if not {".venv", "target"} & set(path.parts) and path != pathlib.Path(__file__).resolve()]
    wrong = [str(path) for path in [*files, ROOT / "README.md", ROOT / "CHANGELOG.md"] if OTHER.search(path.read_text(errors="replace"))]
    assert wrong == [] and len(files) > 100
