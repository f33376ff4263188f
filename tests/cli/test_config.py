"""`[tool.hookcb]` of a pyproject.toml says what `hookcb diagnose` ignores and why, and how strict it is."""

import json

from hookcb.cli.config import Config, find_config
from hookcb.cli.main import main
from hookcb.cli.model_tracker import ModelTracker
from hookcb.cli.parser import make_parser
from hookcb.cli.script import ScriptRun
from tests.cli.test_limits import DROPOUT, end_after, ended  # noqa: F401  # two fixtures
from tests.cli.test_script import BEGIN, HEALTHY, run, wide  # noqa: F401  # two fixtures
from tests.support import in_turn


def write(folder, table):
    """Writes a pyproject.toml with the lines of a table."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(f'[project]\nname = "x"\n{table}')


# ---- reading


def test_the_nearest_file_with_a_table_counts_and_that_of_the_script_goes_first(tmp_path):
    script, current = tmp_path / "a" / "b" / "c", tmp_path / "current"
    write(tmp_path / "a", '[tool.hookcb]\nbudget = 1\nignore = ["loss.spike"]')
    write(tmp_path / "a" / "b", "[tool.other]\nstrict = 1")  # of another tool
    write(current, "[tool.hookcb]\nstrict = true")
    script.mkdir()
    assert find_config(script, current) == Config(budget=1, ignore={"loss.spike": ""})
    assert find_config(tmp_path / "elsewhere", current) == Config(strict=True)
    assert find_config() == Config()


@in_turn(
    ("table", "told"),
    [
        (
            "[tool.hookcb]\nbudgte = 0.1",
            "tool.hookcb has the unknown key 'budgte'; did you mean budget? possible",
        ),
        ("[tool.hookcb]\nfoo = 0.1", "ignore: codes with reasons, "),
        ("[tool]\nhookcb = true", "tool.hookcb must be a table, got True; possible keys are budget: "),
        (
            "[tool.hookcb]\nbudget = 2",
            "tool.hookcb.budget must be a number from 0 to 1, the share of batches",
        ),
        ("[tool.hookcb]\nbudget = true", "tool.hookcb.budget must be a number from 0 to 1"),
        ("[tool.hookcb]\nstrict = 1", "tool.hookcb.strict must be true or false, got 1"),
        ('[tool.hookcb]\nignore = "time.*"', "tool.hookcb.ignore must be codes with reasons"),
        ("[tool.hookcb]\nignore = [1]", "got 1 in the list"),
        ('[tool.hookcb]\nignore = ["time.data"]', "there is no check 'time.data'; similar: time.data_bound"),
        ('[tool.hookcb.ignore]\n"nope.*" = "x"', "ignore: there is no check 'nope.*'; available: "),
        ('[tool.hookcb.ignore]\ntime.data_bound = "x"', "the reason for time must be text"),
        ("[tool.hookcb\n", "is not valid TOML: "),
    ],
)
def test_what_is_wrong_is_told_with_file_and_key_before_the_script_runs(table, told, tmp_path, capsys):
    write(tmp_path, table)
    (tmp_path / "script.py").write_text("print('it runs')")
    assert main(["diagnose", str(tmp_path / "script.py")]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    text = " ".join(shown.err.split())
    assert text.startswith("hookcb diagnose: ")
    assert f"{tmp_path / 'pyproject.toml'}" in text
    assert told in text


# ---- what it does


def test_what_was_left_out_is_told_with_its_reason_and_what_was_not_is_not(tmp_path, ended):  # noqa: F811
    write(tmp_path, '[tool.hookcb.ignore]\n"dropout.*" = "on purpose"\n"time.straggler" = "shared"')
    code, out, _ = ended("", DROPOUT)
    assert code == 0
    assert "checks ran; ignored: dropout.*" in out
    assert "hookcb diagnose: ignored by pyproject.toml: dropout.* (on purpose)" in out
    assert "time.straggler" not in out
    code, out, _ = ended("--json --ignore dropout.extreme", DROPOUT)
    state = json.loads(out)
    assert state["ignored"] == ["dropout.extreme", "dropout.*", "time.straggler"]
    assert state["models"][0]["verdict"]["status"] == "healthy"
    assert not any("pyproject" in note for note in state["notes"])  # the option has left it out
    _, out, _ = ended("", HEALTHY)
    assert "ignored" not in out


def test_an_error_that_is_ignored_is_not_told_live_either(tmp_path, ended):  # noqa: F811
    write(tmp_path, '[tool.hookcb]\nignore = ["*"]')
    code, out, err = ended("--steps 20", "train(*make(lr=10.0), 30)")
    assert "update.too_large" not in err
    assert "hookcb diagnose: ignored by pyproject.toml: *" in out
    assert code == 0


@in_turn(
    ("is_strict", "options", "strict"),
    [(True, [], True), (True, ["--no-strict"], False), (False, ["--strict"], True), (False, [], False)],
)
def test_the_option_strict_goes_first(is_strict, options, strict):
    args = make_parser().parse_args(["diagnose", *options, "script.py"])
    assert ScriptRun("script.py", [], args, Config(strict=is_strict))._is_strict is strict


def test_the_budget_is_that_of_the_diagnosis():
    budgets = [ModelTracker(config=config)._observer().budget for config in (None, Config(budget=0.5))]
    assert budgets == [0.02, 0.5]
