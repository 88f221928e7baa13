"""Every Python block of the READMEs and of docs/ runs, in order, as a reader would run it.

Each README has a process of its own: some of what they show changes the whole process
(`torchax.enable_globally()`), and no reader has run the other READMEs before. It is a fork of an interpreter that
has imported the frameworks, and nothing more. No block is hidden in an HTML comment: a first block that is pasted
must run alone, in a new interpreter, and go on when it is run again.
"""

import ast
import importlib.util
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import forked
from tests.support.children import compiling_once, environment
from tests.support.paths import INTEGRATIONS, ROOT

PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if "```python" in page.read_text()]
READMES = [ROOT / "README.md", *PAGES, *sorted(INTEGRATIONS.glob("*/README.md"))]
SHORTER, SOONER = ("total_steps = 10_001", "total_steps = 301"), ("secs=600)  #", "secs=0.1)  #")
"""The README's training goes on until somebody stops it; here it makes four saves. The evaluator waits for no more."""
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
with open(sys.argv[3]) as file:
    codes = json.load(file)
for code in codes:
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
        (text.count("\n", 0, found.start()) + 1, found[1].replace(*SHORTER).replace(*SOONER))
        for found in BLOCK.finditer(text)
    ]


def run_blocks(
    readme: Path, directory: Path, which: str = "first", *, then: tuple[str, ...] = ()
) -> forked.Done:
    """The README's blocks, one after the other in one namespace, and what is asserted `then`."""
    blocks = blocks_of(readme.read_text())
    assert blocks, "no Python block: has the fence changed?"
    # Empty lines in front make line numbers of tracebacks those of the README.
    codes = ["\n" * line + code for line, code in blocks]
    return run_codes([*codes, *then], readme, directory, which)


IMPORTED = tuple(
    name
    for name in ("flax.nnx", "optax", "grain", "equinox")
    if importlib.util.find_spec(name.partition(".")[0]) is not None
)
"""What a process finds imported, besides jax. Not Keras: the pages must name its backend before they import it."""


def run_codes(
    codes: list[str], source: Path, directory: Path, which: str = "first", *, new: bool = False
) -> forked.Done:
    """Pieces of code in one namespace of a process of their own, or of a new interpreter; compiled code is kept beside `directory`."""
    file = directory.parent / f"{directory.name}.codes"
    file.write_text(json.dumps(codes))
    backendless = environment(**compiling_once(directory.parent / "jax-cache"))
    backendless.pop("KERAS_BACKEND", None)  # the tests' own: a page chooses it
    arguments = (str(source), which, str(file))
    if new:
        done = subprocess.run(
            [sys.executable, "-c", RUN, *arguments],
            cwd=directory,
            env=backendless,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return forked.Done(done.returncode, done.stdout, done.stderr)
    torch = any(re.search(r"^import .*\btorch\b", code, re.MULTILINE) for code in codes)
    imported = (*IMPORTED, *["torch"] * torch)
    return forked.run(
        RUN, *arguments, environment=backendless, directory=directory, imported=imported
    )


@pytest.mark.parametrize(
    "notebook", sorted((ROOT / "docs").rglob("*.ipynb")), ids=lambda path: path.name
)
def test_notebooks_run(notebook, tmp_path):
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


@pytest.mark.parametrize(
    "readme",
    [pytest.param(READMES[0], marks=pytest.mark.always), *READMES[1:]],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_blocks_run(readme, tmp_path):
    root = readme == ROOT / "README.md"
    then = ("assert bool(restored) is False, restored",) if root else ()
    done = run_blocks(readme, tmp_path, then=then)
    assert done.returncode == 0, done.stderr
    if root:
        says(done, "no step there: starting at step 0", (0, 100, 200, 300))


def says(done: forked.Done, first: str, saved: tuple[int, ...]) -> None:
    """What the script of the root README prints: where it begins, and each step that it saves."""
    lines = done.stdout.splitlines()
    assert lines[0] == first
    words = [line.partition(", loss ") for line in lines[1:]]
    assert [word[0] for word in words] == [f"saving step {step}" for step in saved]
    assert all(math.isfinite(float(word[2])) for word in words)


RESUMING = [
    pytest.param(path, id=str(path.relative_to(ROOT)))
    for path in READMES
    if "restore_latest(" in path.read_text() and path.name != "troubleshooting.md"  # runs of errors
]


@pytest.mark.parametrize("readme", RESUMING)
def test_what_resumes_is_killed_and_runs_again(readme, tmp_path):
    """Each training is killed at its third save; the second run of the same text goes on from there."""
    root = readme == ROOT / "README.md"
    killed = run_blocks(readme, tmp_path, "killed")
    assert killed.returncode == 0, killed.stderr
    then = ("assert bool(restored) is True, restored",) if root else ()
    again = run_blocks(readme, tmp_path, "again", then=then)
    assert again.returncode == 0, again.stderr
    if root:
        says(killed, "no step there: starting at step 0", (0,))
        says(again, "restored step 0", (100, 200, 300))


# A first block that was run to its end goes on there; `directory` of Keras' is a new one each time.
@pytest.mark.parametrize(
    "readme",
    [one for one in READMES if one.name == "README.md"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_the_first_block_runs_as_pasted_and_then_resumes(readme, tmp_path):
    """Alone, in an empty directory, by two interpreters: the second one restores what the first saved."""
    code = blocks_of(readme.read_text())[0][1]
    for resumed in (False, True):
        codes = [code]
        if "restored = " in code:
            codes.append(f"assert bool(restored) is {resumed}, restored")
        done = run_codes(codes, readme, tmp_path, new=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_code_is_hidden_from_the_reader(readme):
    for comment in re.findall(r"<!--.*?-->", readme.read_text(), re.DOTALL):
        assert "```" not in comment


def test_the_first_screen():
    """The lines of a loop, how to install it, how fast, the picture and the script come in this order."""
    text = (ROOT / "README.md").read_text()
    order = (
        "restore_latest(",
        "pip install",
        "(docs/performance.md)",
        "images/resumed.svg",
        "```python",
        'ckpt.load("runs/tree"',
        "## Your framework",
        "make demo",
    )
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    assert len(text.split()) <= 700


def test_warnings_fail_a_block(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("```python\nimport warnings\nwarnings.warn('old')\n```\n")
    assert run_blocks(readme, tmp_path).returncode == 1
