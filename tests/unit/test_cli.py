"""The command line: dispatch, help without heavy imports, unknown commands, tab completion."""

import os
import subprocess
import sys

import pytest

from lengthwise import cli


def test_help_names_every_command(capsys):
    assert cli.main([]) == 0 == cli.main(["--help"])
    out = capsys.readouterr().out
    assert all(name in out for name in ("run", "train", "figure"))


def test_help_and_refusal_import_nothing_heavy():
    """`lengthwise --help` stays below 0.1 s because it imports neither numpy nor Hydra nor anything above them."""
    code = (
        "import sys; from lengthwise.cli import main; main(['--help']); main(['nope']);"
        "heavy = {'numpy', 'hydra', 'omegaconf', 'pandas', 'torch', 'rich', 'argparse'} & set(sys.modules);"
        "sys.exit(','.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("word", "near"), [("rnu", "'run'"), ("figures", "'figure'"), ("trian", "'train'"), ("zzz", None)])
def test_unknown_command(word, near, capsys):
    assert cli.main([word]) == 2
    err = capsys.readouterr().err
    assert ", ".join(cli.COMMANDS) in err and word in err
    assert (near in err) if near else ("Did you mean" not in err)


@pytest.mark.parametrize(
    ("line", "want"), [("lengthwise ", " ".join(cli.COMMANDS)), ("lengthwise r", "run"), ("lengthwise", " ".join(cli.COMMANDS))]
)
def test_completion_of_commands(line, want, monkeypatch, capsys):
    monkeypatch.setenv("COMP_LINE", line)
    assert cli.main(["-sc", "query=bash"]) == 0
    assert capsys.readouterr().out.split() == want.split()


def test_completion_of_overrides_cuts_the_command_out():
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from lengthwise.cli import main; sys.exit(main())", "-sc", "query=bash"],
        env={**os.environ, "COMP_LINE": "lengthwise run limits=s", "COMP_POINT": "23"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "limits=seqs64" in done.stdout.split()


def test_version(capsys):
    from lengthwise import __version__

    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__
