"""What the documentation shows is true."""

import doctest
import importlib
import inspect
import pkgutil
import re
import shlex
import tomllib
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest
from controls import CONTROLS
from faults import FAULTS as CASES
from faults_language import LANGUAGE_FAULTS
from more_controls import MORE_CONTROLS
from programs import PROGRAMS
from torch.distributed.run import get_args_parser

import hookcb
from docs.blocks import PAGES, SCRIPT, blocks, is_alike, printed
from docs.gallery import train
from docs.notebooks import digest
from docs.picture import PAGE, PICTURE, caption, texts
from hookcb.cli.config import Config, find_config
from hookcb.cli.parser import make_parser
from hookcb.core.clock import _told_of_garbage, leave_garbage
from hookcb.diagnosis.fault import FAULTS
from hookcb.report.collect import collect
from tests.ranks.support import end, environment, free_port
from tests.support import in_turn, start

ROOT = Path(__file__).parent.parent
NOT_HERE = ("hookcb.__main__", "hookcb.adapters.lightning", "hookcb.adapters.transformers")  # need packages
MODULES = [m.name for m in pkgutil.walk_packages(hookcb.__path__, "hookcb.") if m.name not in NOT_HERE]
WITH_EXAMPLES = [name for name in MODULES if ">>>" in inspect.getsource(importlib.import_module(name))]


@pytest.fixture(autouse=True)
def loops_end():
    """The loops of examples, which may stay open, no longer listen to the garbage collector."""
    yield
    for tell in _told_of_garbage[:]:
        leave_garbage(tell)


@pytest.mark.parametrize("room", dict.fromkeys(".".join(name.split(".")[:2]) for name in WITH_EXAMPLES))
def test_the_examples_in_docstrings_run(room):
    of_room = [name for name in WITH_EXAMPLES if f"{name}.".startswith(f"{room}.")]
    assert [name for name in of_room if doctest.testmod(importlib.import_module(name)).failed] == []


def test_every_public_class_has_an_example():
    plain = (hookcb.Event, hookcb.Loop)  # an enumeration, and a base that does nothing by itself
    for name in hookcb.__all__:
        thing = getattr(hookcb, name)
        if (
            isinstance(thing, type) and not issubclass(thing, (BaseException, *plain))
        ) or thing is hookcb.Learner:
            assert ">>>" in thing.__doc__, f"{name} has no example"


def with_language(language):
    return [page for page in PAGES if any(block.language == language for block in blocks(page))]


def marked(page):
    """A page as a parameter; those that show output train for longer, README does not."""
    is_long = page != "README.md" and page in with_language("text")
    return pytest.param(page, marks=pytest.mark.slow if is_long else [])


def test_each_block_is_of_a_kind_that_is_tested():
    kinds = {block.language: page for page in PAGES for block in blocks(page)}
    assert kinds.keys() <= {"python", "console", "text", "toml"}, kinds
    assert [page for page, text in PAGES.items() if text.count("```") != 2 * len(blocks(page))] == []


def test_the_toml_of_a_page_is_read(tmp_path):
    texts = [block.text for page in PAGES for block in blocks(page) if block.language == "toml"]
    assert texts
    for text in texts:
        (tmp_path / "pyproject.toml").write_text(text, "utf-8")
        assert find_config(tmp_path) != Config()


@pytest.mark.parametrize("page", [marked(page) for page in with_language("python")])
def test_the_python_of_a_page_runs_and_prints_what_the_page_shows(page):
    for shown, said in printed(page):
        assert is_alike(shown, said), f"run python docs/blocks.py {page}, which prints:\n{said}"


SCRIPTS = [block.text for page in PAGES for block in blocks(page) if block.text.startswith(SCRIPT)]


@pytest.mark.slow
@pytest.mark.parametrize("text", SCRIPTS)
def test_a_script_for_several_processes_runs(text, tmp_path):
    (tmp_path / "train.py").write_text(text, "utf-8")
    command = get_args_parser().parse_args(text.splitlines()[0].removeprefix(SCRIPT).split())
    assert command.training_script == "train.py"
    world, port, processes = int(command.nproc_per_node), free_port(), []
    for rank in range(world):
        settings = environment(rank, world, port)
        code = f"import os, runpy; os.chdir({str(tmp_path)!r}); os.environ.update({settings}); "
        code += "runpy.run_path('train.py', run_name='__main__')"
        processes.append(start("-c", code, log=tmp_path / f"{rank}.log"))
    assert [rank["log"] for rank in end(processes, tmp_path) if rank["exit"] != 0] == []


def commands(page):
    """Words of the commands in blocks, and of those within sentences that are whole."""
    inline = map(shlex.split, re.findall(r"`((?:hookcb|make) [^`]+)`", PAGES[page]))
    in_blocks = [words for block in blocks(page) for words in block.commands()]
    return in_blocks + [words for words in inline if words[0] == "make" or len(words) > 2]


def test_the_commands_of_a_page_can_be_typed():
    for page in PAGES:
        for words in commands(page) if page != "CHANGELOG.md" else ():
            if "COMMAND" not in words:
                check_command(*words)


def check_command(program, *args):
    """Check that a command has our subcommands, options, targets, extras and files."""
    name = Path(program).name
    if name == "hookcb":
        make_parser().parse_args(args)
    elif name == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M)
        assert [arg for arg in args if "=" not in arg and arg not in targets] == []
    elif name == "torchrun":
        command = get_args_parser().parse_args(args)
        if command.module:
            check_command(command.training_script, *command.training_script_args)
    else:
        assert name.startswith("python"), program
        assert args[0] == "-m", args
        assert find_spec(args[1]), args[1]
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert set(re.findall(r"\.\[(\w+)\]", " ".join(args))) <= extras.keys()
        assert [arg for arg in args if arg.endswith(".txt") and not (ROOT / arg).exists()] == []
        pinned = (ROOT / "constraints.txt").read_text().split()
        assert [arg for arg in args if arg.startswith("torch==") and arg not in pinned] == []


def test_the_picture_of_a_page_is_of_this_version():
    assert texts(PICTURE).get("Software") == f"hookcb {hookcb.__version__}", "make docs takes it anew"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ERROR:UserWarning")
def test_the_picture_of_a_page_shows_the_verdict_of_today():
    said = caption(collect(train(PAGE.stem)))
    assert is_alike(texts(PICTURE)["Description"], said), f"make docs takes it anew; now it says:\n{said}"


@in_turn(
    ("shown", "said", "expected"),
    [
        ("│ 83% │ in 74.1 ms", "│ 9% │\nin  1.2 s ", True),
        ("83% of the time", "83% of the times", False),
        ("right", "right: 67%", False),
        ("epoch …\nSICK", "epoch 0.1 0.2\n\nSICK", True),
        ("… SICK", "SICK HEALTHY", False),
    ],
)
def test_a_text_is_compared_but_for_numbers_borders_and_what_is_left_out(shown, said, expected):
    assert is_alike(shown, said) == expected


FOLDER = re.compile(r"""Checkpoint\(["']([^"']+)["']""")


def test_notebooks_have_the_outputs_of_their_code():
    paths = sorted((ROOT / "nbs").glob("*.ipynb"))
    for path in paths:
        notebook = nbformat.read(path, as_version=4)
        again = f"{path.name}: run make outputs"
        assert notebook.metadata.get("hookcb") == {"digest": digest(notebook)}, again
        outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
        assert outputs, again
        assert all(output.output_type != "error" for output in outputs), again
        assert path.stat().st_size < 500_000
    assert sum(path.stat().st_size for path in paths) < 3_000_000


def test_no_two_pages_write_checkpoints_to_the_same_folder():
    """Else one page resumes what a reader has trained with another."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    of_pages = {page.name: set(FOLDER.findall(page.read_text("utf-8"))) for page in pages}
    del of_pages["index.md"]  # of porting, which shows the message of an error
    folders = [folder for found in of_pages.values() for folder in found]
    assert len(folders) > 2
    assert sorted(folders) == sorted(set(folders))


def test_the_site_leaves_out_python_and_its_cache():
    excluded = re.search(r"^exclude_docs: \|\n((?:  .+\n)+)", (ROOT / "mkdocs.yml").read_text("utf-8"), re.M)
    assert {"*.py", "__pycache__/"} <= set(excluded[1].split())


def test_the_version_is_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert ROOT / project["tool"]["hatch"]["version"]["path"] == Path(hookcb.__file__)
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)[1]
    assert newest in (hookcb.__version__, "Unreleased")
    assert f"\nversion: {hookcb.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def numbers_told(page, sentence):
    """The numbers in a sentence of a page, which has `#` in their places; lines may break anywhere in it."""
    pattern = r"\s+".join(map(re.escape, sentence.split())).replace(r"\#", r"([\d.]+)")
    return re.search(pattern, (ROOT / page).read_text("utf-8")).groups()


def test_pages_tell_how_many_checks_planted_faults_and_programs_there_are():
    guide = "docs/guide/diagnosis.md"
    planted = "# planted faults, # of them in small language models, and # kinds of healthy training"
    assert numbers_told("README.md", "all # of them: formula") == (str(len(FAULTS)),)
    n_healthy = len(CONTROLS) + len(MORE_CONTROLS)
    assert numbers_told(guide, planted) == (str(len(CASES)), str(len(LANGUAGE_FAULTS)), str(n_healthy))
    assert numbers_told(guide, "`make real` trains # programs") == (str(len(PROGRAMS)),)


def test_pages_tell_what_an_installation_needs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = dict(re.match(r"(\w+)>=([\d.]+)", need).groups() for need in project["dependencies"])
    assert list(needs) == ["torch", "fastcore", "rich"]
    assert numbers_told("README.md", "adds only fastcore and rich") == ()
    python = project["requires-python"].removeprefix(">=")
    assert numbers_told("README.md", "with Python # or newer") == (python,)
    assert numbers_told("docs/platforms.md", "`Python >= #` and `torch >= #`") == (python, needs["torch"])
    assert numbers_told("docs/policy.md", "from #. torch: from #;") == (python, needs["torch"])


def test_the_page_of_commands_names_each():
    (commands,) = (action for action in make_parser()._actions if action.dest == "command")
    page = (ROOT / "docs" / "guide" / "commands.md").read_text("utf-8")
    assert [name for name in commands.choices if f"`hookcb {name}" not in page] == []
