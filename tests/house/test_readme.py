"""Every Python block of the READMEs and of docs/ runs, in order, as a reader would run it.

Each README has an interpreter of its own: some of what they show changes the whole process
(`torchax.enable_globally()`), and no reader has run the other READMEs before. No block is hidden in an
HTML comment: a first block that is pasted must run alone, and go on when it is run again.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.children import compiling_once, environment
from tests.support.paths import INTEGRATIONS, ROOT

FIRST_PAGE = ROOT / "docs" / "index.md"  # of tabs, which test_first_page.py runs
PAGES = [
    page
    for page in sorted((ROOT / "docs").rglob("*.md"))
    if "```python" in page.read_text() and page != FIRST_PAGE
]
READMES = [ROOT / "README.md", *PAGES, *sorted(INTEGRATIONS.glob("*/README.md"))]
SHORTER = ("total_steps = 10_000", "total_steps = 301")
"""The README's training goes on until somebody stops it; here it makes four saves."""
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)

RUN = """
import json, sys, warnings
warnings.simplefilter("error")

class Killed(Exception):
    pass

def killed_at_the_third(save):
    def save_or_die(*arguments, **named):
        saves.append(1)
        if len(saves) == 3:
            raise Killed
        return save(*arguments, **named)
    return save_or_die

which = sys.argv[2]
if which == "killed":
    import ckpt_core
    ckpt_core.Checkpointer.save = killed_at_the_third(ckpt_core.Checkpointer.save)
namespace = {"__name__": "readme"}
killed = False
for code in json.load(sys.stdin):
    saves = []
    try:
        exec(compile(code, sys.argv[1], "exec"), namespace)
    except Killed:
        killed = True
    except Exception as error:
        # what comes after a training that was killed may lack its steps; a second run finds what the
        # first one wrote, but what can be resumed must run
        exists = isinstance(error, FileExistsError)
        if not killed and not (which == "again" and exists and "restore_latest" not in code):
            raise
"""


def blocks_of(text: str) -> list[tuple[int, str]]:
    """(line of the fence, code) of each Python block."""
    return [
        (text.count("\n", 0, found.start()) + 1, found[1].replace(*SHORTER))
        for found in BLOCK.finditer(text)
    ]


def run_blocks(
    readme: Path, directory: Path, which: str = "first"
) -> subprocess.CompletedProcess[str]:
    """The README's blocks, one after the other in one namespace of a fresh interpreter.

    What is compiled is kept beside `directory`, for the next interpreter.
    """
    blocks = blocks_of(readme.read_text())
    assert blocks, "no Python block: has the fence changed?"
    # Empty lines in front make line numbers of tracebacks those of the README.
    return run_codes(["\n" * line + code for line, code in blocks], readme, directory, which)


def run_codes(
    codes: list[str], source: Path, directory: Path, which: str = "first"
) -> subprocess.CompletedProcess[str]:
    """Pieces of code in one namespace of a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", RUN, str(source), which],
        input=json.dumps(codes),
        cwd=directory,
        env=environment(**compiling_once(directory.parent / "jax-cache")),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize(
    "notebook", sorted((ROOT / "docs").rglob("*.ipynb")), ids=lambda path: path.name
)
def test_notebooks_run(notebook: Path, tmp_path: Path):
    """The cells, in order; what a cell shows at its end is shown as a notebook would."""
    cells = json.loads(notebook.read_text())["cells"]
    codes = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    last = [ast.parse(code).body[-1] for code in codes]
    shown = [ast.unparse(one) for one in last if isinstance(one, ast.Expr)]
    codes += [
        f"getattr({name}, '_repr_html_', lambda: '')()" for name in shown if name.isidentifier()
    ]
    done = run_codes(codes, notebook, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_blocks_run(readme: Path, tmp_path: Path):
    done = run_blocks(readme, tmp_path)
    assert done.returncode == 0, done.stderr


RESUMING = [
    pytest.param(
        path,
        id=str(path.relative_to(ROOT)),
        marks=[] if path.parent == ROOT else pytest.mark.slow,
    )
    for path in READMES
    if "restore_latest(" in path.read_text() and path.name != "troubleshooting.md"  # runs of errors
]


@pytest.mark.parametrize("readme", RESUMING)
def test_what_resumes_is_killed_and_runs_again(readme: Path, tmp_path: Path):
    """Each training is killed at its third save; the second run of the same text goes on from there."""
    done = run_blocks(readme, tmp_path, "killed")
    assert done.returncode == 0, done.stderr
    done = run_blocks(readme, tmp_path, "again")
    assert done.returncode == 0, done.stderr


# A first block that was run to its end goes on there; `directory` of Keras' is a new one each time.
FIRST = [
    pytest.param(path, id=path.parent.name, marks=[] if path.parent == ROOT else pytest.mark.slow)
    for path in READMES
    if path.name == "README.md"
]


@pytest.mark.parametrize("readme", FIRST)
def test_the_first_block_runs_as_pasted_and_then_resumes(readme: Path, tmp_path: Path):
    """Alone, in an empty directory, by two interpreters: the second one restores what the first saved."""
    code = blocks_of(readme.read_text())[0][1]
    for resumed in (False, True):
        codes = [code]
        if "restored = " in code:
            codes.append(f"assert bool(restored) is {resumed}, restored")
        done = run_codes(codes, readme, tmp_path)
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "readme", [one for one in READMES if one.name == "README.md"], ids=lambda path: path.parent.name
)
def test_a_whole_page_that_is_pasted_runs_again(readme: Path, tmp_path: Path):
    """Saved to a file and started twice in one directory."""
    for _ in range(2):
        done = run_blocks(readme, tmp_path)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_code_is_hidden_from_the_reader(readme: Path):
    for comment in re.findall(r"<!--.*?-->", readme.read_text(), re.DOTALL):
        assert "```" not in comment


def test_the_first_screen():
    """What it is, the picture, how to install it, the script, and the table of speed come in this order."""
    text = (ROOT / "README.md").read_text()
    order = (
        "# ckpt",
        "images/resumed.svg",
        "make demo",
        "pip install",
        "restore_latest(",
        "## Speed",
    )
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    assert len(text.split()) < 900


def test_the_script_says_what_it_restored_and_when_it_saved(tmp_path: Path):
    """Started again after an interrupt: the second run names the step that it goes on from."""
    code = blocks_of((ROOT / "README.md").read_text())[0][1]
    interrupted = code.replace(
        '            print(f"saving',
        '            if step == 200: raise KeyboardInterrupt\n            print(f"saving',
    )
    assert interrupted != code
    done = run_codes([interrupted], ROOT / "README.md", tmp_path)
    assert "KeyboardInterrupt" in done.stderr
    assert done.stdout.splitlines()[0] == "no step there: starting at step 0"
    assert [line.partition(",")[0] for line in done.stdout.splitlines()[1:]] == [
        "saving step 0",
        "saving step 100",
    ]
    done = run_codes([code], ROOT / "README.md", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "restored step 200"
    assert done.stdout.splitlines()[1].startswith("saving step 300, loss ")


def test_blocks_are_found():
    text = "a\n```python\nx = 1\n```\n<!--\n```python\ny = 2\n```\n-->\n```\nmake\n```\n"
    assert blocks_of(text) == [(2, "x = 1\n"), (6, "y = 2\n")]


def test_a_failing_block_names_its_line(tmp_path: Path):
    readme = tmp_path / "README.md"
    readme.write_text("text\n\n```python\nx = 1\n```\nmore\n```python\ny = x\ny / 0\n```\n")
    done = run_blocks(readme, tmp_path)
    assert done.returncode == 1
    assert f'{readme}", line 9' in done.stderr
    assert "y / 0" in done.stderr
    assert "ZeroDivisionError" in done.stderr


def test_warnings_fail_a_block(tmp_path: Path):
    readme = tmp_path / "README.md"
    readme.write_text("```python\nimport warnings\nwarnings.warn('old')\n```\n")
    assert run_blocks(readme, tmp_path).returncode == 1
