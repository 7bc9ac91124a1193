# SPDX-License-Identifier: Apache-2.0
"""Dataclasses from a YAML file and the command line: precedence, `env`, what belongs to nobody, and mistakes."""

import argparse
import os
from dataclasses import dataclass, field
from typing import Literal

import pytest

from jrl.trl.parser import TrlParser


@dataclass
class First:
    rate: float = 0.1
    steps: int = 10
    name: str = "none"
    verbose: bool = True
    quiet: bool = False
    kind: Literal["a", "b"] = "a"
    parts: list[str] | None = None


@dataclass
class Second:
    needed: int
    other_field: float = 1.0
    extras: dict[str, int] = field(default_factory=dict)


@pytest.fixture
def parse(tmp_path):
    """Parses flags with a file of the given text."""

    def run(text, *words, types=(First,), **options):
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return TrlParser(types).parse_args_and_config(["--config", str(path), *words], **options)

    return run


def test_the_command_line_beats_the_file_and_the_file_the_default(parse):
    (found,) = parse("rate: 0.5\nsteps: 20\n", "--rate", "0.7")
    assert (found.rate, found.steps, found.name) == (0.7, 20, "none")
    (repeats,) = parse("rate: 0.5\n", "--rate", "0.1")  # the flag says what the dataclass says
    assert repeats.rate == 0.1


def test_without_a_file_it_is_an_argument_parser():
    first, second = TrlParser((First, Second)).parse_args_and_config(["--needed", "3", "--other-field", "2"])
    assert isinstance(first, First) and (second.needed, second.other_field) == (3, 2.0)
    assert TrlParser(First).parse_args_and_config([])[0] == First()  # one class alone


@pytest.mark.parametrize("words", [["--config", "{path}"], ["--config={path}"]])
def test_both_spellings_of_config(tmp_path, words):
    path = tmp_path / "c.yaml"
    path.write_text("steps: 3\n")
    found = TrlParser(First).parse_args_and_config(["--rate", "2", *(w.format(path=path) for w in words)])
    assert found == (First(steps=3, rate=2.0),)


def test_a_required_field_may_stand_in_the_file(parse):
    assert parse("needed: 4\n", types=(Second,))[0].needed == 4
    with pytest.raises(SystemExit) as error:
        parse("other_field: 4\n", types=(Second,))
    assert error.value.code == 2


def test_values_have_the_types_of_their_fields(parse):
    text = 'rate: 1e-4\nsteps: 2e1\nverbose: false\nparts: [x, y]\nname: "3"\nneeded: 1\nextras: {a: 1}\nother_field: 2'
    first, second = parse(text, types=(First, Second))
    assert (first.rate, first.steps, first.verbose, first.parts, first.name) == (
        1e-4,
        20,
        False,
        ["x", "y"],
        "3",
    )
    assert second.extras == {"a": 1} and type(second.other_field) is float and type(first.steps) is int
    assert parse('rate: "1e-3"\nquiet: "true"\n')[0] == First(rate=1e-3, quiet=True)


def test_booleans_on_the_command_line(parse):
    (found,) = parse("verbose: true\nquiet: true\n", "--no_verbose", "--quiet", "false")
    assert (found.verbose, found.quiet) == (False, False)


def test_env_is_written_before_and_over_what_is_there(parse, monkeypatch):
    monkeypatch.setenv("COLUMNS", "old")
    monkeypatch.setenv("NO_COLOR", "kept")
    parse("env: {COLUMNS: 1, NO_COLOR: yes}\nsteps: 1\n")
    assert (os.environ["COLUMNS"], os.environ["NO_COLOR"]) == ("1", "True")
    with pytest.raises(ValueError, match="`env` must be a mapping of variables, got list"):
        parse("env: [a]\n")


class TestWhatBelongsToNobody:
    def test_a_key_of_the_file(self, parse):
        with pytest.raises(
            ValueError, match=r"config.yaml: there is no field `stepz`\. Did you mean `steps`\?"
        ):
            parse("stepz: 1\n")
        assert parse("stepz: 1\n", fail_with_unknown_args=False) == (First(),)

    def test_a_flag_always_fails(self, parse):
        for options in ({}, {"fail_with_unknown_args": False}):
            with pytest.raises(
                ValueError, match=r"no field for '--other-fild=1'\. Did you mean `--other_field`\?"
            ):
                parse("needed: 1\n", "--other-fild=1", types=(Second,), **options)

    def test_returned_the_files_first(self, parse):
        found = parse("a: 1\nb: [2]\nsteps: 2\n", "--c", "3", return_remaining_strings=True)
        assert found == (First(steps=2), ["--a", "1", "--b", "[2]", "--c", "3"])

    def test_returned_apart(self, parse):
        found = parse("a: 1\n", "--c", "3", separate_remaining_strings=True)
        assert found == (First(), ["--a", "1"], ["--c", "3"])

    def test_nothing_is_an_empty_list(self, parse):
        assert parse("", return_remaining_strings=True) == (First(), [])


class TestSubParsers:
    @pytest.fixture
    def parser(self):
        top = TrlParser()
        commands = top.add_subparsers(dest="command")
        for name, types in {"one": First, "two": (First, Second)}.items():
            commands.add_parser(name, dataclass_types=types)
        return top

    def test_the_file_reaches_all_of_them(self, parser, tmp_path):
        path = tmp_path / "c.yaml"
        path.write_text("steps: 7\nneeded: 2\n")
        (found,) = parser.parse_args_and_config(["two", "--rate", "3", "--config", str(path)])
        assert (found.command, found.steps, found.needed, found.rate) == ("two", 7, 2, 3.0)

    def test_a_key_is_unknown_only_where_nobody_has_it(self, parser):
        assert parser.set_defaults_with_config(needed=1, stray="x") == ["--stray", "x"]

    def test_a_required_command_may_stand_in_the_file(self):
        top = TrlParser()
        commands = top.add_subparsers(dest="command", required=True)
        commands.add_parser("one", dataclass_types=First)
        assert top.set_defaults_with_config(command="one") == []
        assert top.parse_args([]) == argparse.Namespace(command="one")


class TestMistakes:
    @pytest.mark.parametrize(
        ("text", "error", "message"),
        [
            ("steps: 1\nrate: 2\nsteps: 3\n", ValueError, "`steps` stands in line 1 and again in line 3"),
            ("extras: {a: 1, a: 2}\n", ValueError, "`a` stands in line 1 and again in line 1"),
            ("steps: [1]\n", TypeError, "`steps` must be int"),
            ("rate: many\n", TypeError, "`rate`: invalid float value: 'many'"),
            ("kind: c\n", ValueError, r"`kind` must be one of \['a', 'b'\], got 'c'"),
            ("name: no\n", TypeError, "`name` must be str, got False.*reads a bare yes, no, on or off"),
            ("- steps\n", ValueError, "must hold a mapping of fields, got list"),
            ("steps: [\n", ValueError, "config.yaml: not YAML"),
        ],
    )
    def test_in_the_file(self, parse, text, error, message):
        with pytest.raises(error, match=message) as found:
            parse(text, types=(First, Second))
        assert "\n" not in str(found.value)

    @pytest.mark.parametrize(
        ("words", "error", "message"),
        [
            (["--config"], ValueError, "--config needs the path"),
            (["--config", "--rate", "1"], ValueError, "--config needs the path"),
            (["--config="], ValueError, "--config needs the path"),
            (["--config", "nowhere.yaml"], FileNotFoundError, "there is no file nowhere.yaml"),
            (["--config", "a.yaml", "--config=b.yaml"], ValueError, "must be given once"),
        ],
    )
    def test_of_config(self, words, error, message):
        with pytest.raises(error, match=message):
            TrlParser(First).parse_args_and_config(words)

    def test_a_flag_of_the_wrong_type_is_one_line(self, capsys):
        with pytest.raises(SystemExit) as error:
            TrlParser(First, prog="train").parse_args_and_config(["--rate", "many"])
        assert error.value.code == 2
        assert capsys.readouterr().err == "train: argument --rate: invalid float value: 'many'\n"

    def test_a_field_called_config(self):
        @dataclass
        class Bad:
            config: str = ""

        with pytest.raises(ValueError, match="Bad has a field named 'config'"):
            TrlParser((First, Bad))


def test_no_file_beside_the_script_is_read(tmp_path, monkeypatch):
    (tmp_path / "train.args").write_text("--steps 5")
    monkeypatch.setattr("sys.argv", [str(tmp_path / "train.py"), "--rate", "2"])
    assert TrlParser(First).parse_args_and_config() == (First(rate=2.0),)


def test_a_field_that_two_share_is_one_option():
    @dataclass
    class Other:
        steps: int = 10
        more: int = 1

    first, other = TrlParser((First, Other)).parse_args_and_config(["--steps", "3"])
    assert (first.steps, other.steps) == (3, 3)

    @dataclass
    class Contradicting:
        steps: int = 11

    with pytest.raises(argparse.ArgumentError, match="conflicting option string"):
        TrlParser((First, Contradicting))


def test_a_default_that_looks_like_a_boolean_stays_the_text_it_is():
    @dataclass
    class Choice:
        counted: str | bool = "no"

    assert TrlParser(Choice).parse_args_and_config([])[0].counted == "no"
    assert TrlParser(Choice).parse_args_and_config(["--counted"])[0].counted is True
