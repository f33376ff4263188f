"""`hookcb completion` prints a script that a shell can read."""

import shutil
import subprocess
import sys

import pytest

from hookcb.cli.main import main


def test_bash_completes_commands_and_options(capsys, tmp_path):
    pytest.importorskip("shtab")
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "completion"
    script.write_text(capsys.readouterr().out)
    if (bash := shutil.which("bash")) is None:
        pytest.skip("needs bash")
    ask = f"source {script}; COMP_WORDS=(hookcb dia); COMP_CWORD=1; _shtab_hookcb; echo ${{COMPREPLY[@]}}"
    done = subprocess.run([bash, "-c", ask], capture_output=True, text=True)
    assert done.stdout.split() == ["diagnose"], done.stderr
    assert "--coverage" in script.read_text()


def test_without_shtab_it_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 1
    assert "pip install 'hookcb[completion]'" in capsys.readouterr().err


def test_an_unknown_shell_is_told(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["completion", "fish"])
    assert ended.value.code == 2
    assert "bash" in capsys.readouterr().err
