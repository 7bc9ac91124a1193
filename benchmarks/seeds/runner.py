# SPDX-License-Identifier: Apache-2.0
"""Runs a seed library's own tests and example scripts against jrl, with only the imports changed, and makes a table.

A seed is a clone and a `Seed`: which files, how imports are rewritten, what each script gets on its command line, what
stands in for models and data of the hub. Files are copied to a temporary folder; the clone is not touched. Not part of
the tests of jrl: `benchmarks/seeds/trl.py` and `trlx.py` are the commands.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Change:
    """One change of a source file.

    Attributes:
      words: What a reader of the table is told; "" for a change that every script makes (its imports).
      pattern: Regular expression, in multi-line mode.
      replacement: Of `re.sub`.
    """

    words: str
    pattern: str
    replacement: str

    def __call__(self, text: str) -> str:
        """The text, changed."""
        return re.sub(self.pattern, self.replacement, text, flags=re.MULTILINE)


@dataclass(frozen=True)
class Script:
    """A script and how it is run.

    Attributes:
      path: Relative to the clone.
      args: Its command line, as a shell has it; `{data}`: folder of stand-ins, `{out}`: where it writes.
      changes: Tried one more at a time, in order, if it fails as it is.
      small: Made before anything else: sizes only (fewer steps, smaller batches), so that it ends soon.
      cannot: Why it is not run at all, if it is not.
    """

    path: str
    args: str = ""
    changes: tuple[Change, ...] = ()
    small: tuple[Change, ...] = ()
    cannot: str = ""


@dataclass(frozen=True)
class Seed:
    """A seed library at one version.

    Attributes:
      name: As the table says it.
      imports: Made in every file.
      tests: Globs of test files, relative to the clone.
      scripts: Example scripts.
      copied: Folders of the clone that are copied.
      changes: Glob of test files → changes that they need beside their imports; the table names them.
      inside: Glob of test ids or script paths → why a failure there is of the seed's inside (torch, accelerate) and
        not of its surface. They are counted apart.
      known: Glob of test ids → why they fail, in the table before the message. They count.
      stand_ins: Makes models and data in a folder; returns identifier → folder for what is replaced in sources, and
        variables of the environment.
      not_taken: Glob of test files that test what jrl does not have → why. They are listed, not run.
      more: Further rows of a clone: name → what makes it.
    """

    name: str
    imports: tuple[Change, ...]
    tests: tuple[str, ...]
    scripts: tuple[Script, ...]
    copied: tuple[str, ...] = ("tests", "examples")
    changes: Mapping[str, tuple[Change, ...]] = field(default_factory=dict)
    inside: Mapping[str, str] = field(default_factory=dict)
    known: Mapping[str, str] = field(default_factory=dict)
    stand_ins: Callable[[Path, Path], tuple[dict[str, Path], dict[str, str]]] = lambda clone, folder: ({}, {})
    not_taken: Mapping[str, str] = field(default_factory=dict)
    more: Callable[[Path], Mapping[str, Callable[[], Row]]] = lambda clone: {}


@dataclass
class Row:
    """One line of the table.

    Attributes:
      file: Relative to the clone.
      kind: What is counted together.
      passed: Tests (or runs) that passed.
      failed: (id, last line) of those that failed.
      inside: The same, of the seed's inside.
      skipped: Tests that skip themselves.
      note: Changes that were needed, or why it was not run.
      ran: The tests that ran, where they are some of the file's alone (`-k`).
    """

    file: str
    kind: str = "tests"
    passed: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)
    inside: list[tuple[str, str]] = field(default_factory=list)
    skipped: int = 0
    note: str = ""
    ran: list[str] = field(default_factory=list)

    def over(self, earlier: Row) -> Row:
        """This row; where only some tests ran, with what an earlier one says of the others."""
        if not self.ran:
            return self
        again = {test for test, _ in earlier.failed} & set(self.ran)
        now_failed = dict(self.failed)
        failed = [
            (test, now_failed.get(test, why))
            for test, why in earlier.failed
            if test not in again or test in now_failed
        ]
        return replace(earlier, passed=earlier.passed + len(again - now_failed.keys()), failed=failed)

    @property
    def total(self) -> int:
        """Tests that count: passed or failed, those of the inside apart."""
        return self.passed + len(self.failed)


def main(seeds: Mapping[str, Seed], page: Path, marker: str) -> None:
    """The command line of a seed's script: clones in, table out.

    Args:
      seeds: Name of the flag (`--v0.7.1 FOLDER`) → seed.
      page: Document that has the table.
      marker: The table stands between `<!-- MARKER begin -->` and `<!-- MARKER end -->`.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for flag, seed in seeds.items():
        parser.add_argument(f"--{flag}", type=Path, dest=flag, help=f"clone of {seed.name}")
    parser.add_argument("--only", nargs="*", default=["*"], help="globs of files to run")
    parser.add_argument("--limit", type=int, default=600, help="seconds that one script or file may take")
    parser.add_argument("--test-limit", type=int, default=150, help="seconds that one test may take")
    parser.add_argument(
        "--work", type=Path, help="folder to work in, kept, and read for what does not run this time"
    )
    parser.add_argument("-k", dest="keyword", default="", help="of pytest: tests to run")
    parser.add_argument(
        "--write-docs", action="store_true", help=f"put the table into {page.relative_to(ROOT)}"
    )
    args = parser.parse_args()
    work = args.work or Path(tempfile.mkdtemp(prefix="jrl-seeds-"))
    tables = []
    for flag, seed in seeds.items():
        clone = vars(args)[flag]
        if clone is not None:
            place = work.resolve() / flag
            place.mkdir(parents=True, exist_ok=True)
            rows = with_earlier([], place / "rows.json")
            for row in run_seed(seed, clone.resolve(), place, args):
                _say(row)
                rows = with_earlier([row], place / "rows.json")  # after each, for a run that is ended
            tables.append(table(seed, rows))
            print(tables[-1], flush=True)
    if args.write_docs:
        write_docs(page, marker, "\n\n".join(tables))
    if args.work is None:
        shutil.rmtree(work, ignore_errors=True)


def run_seed(seed: Seed, clone: Path, work: Path, args: argparse.Namespace) -> Iterator[Row]:
    """Copies, rewrites and runs the files of one seed."""
    shutil.rmtree(work / "copy", ignore_errors=True)
    copy = work / "copy"
    for name in seed.copied:
        shutil.copytree(clone / name, copy / name)
    ids, variables = seed.stand_ins(clone, work / "stand_ins")
    for path in [one for ending in ("*.py", "*.yml", "*.yaml") for one in copy.rglob(ending)]:
        path.write_text(rewritten(path.read_text(), seed.imports, ids))
    (copy / "parameterized.py").write_text(_PARAMETERIZED)
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(copy), str(ROOT), str(work / "stand_ins" / "modules")]),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(work / "datasets"),
        "WANDB_MODE": "disabled",
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", str(work / "compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
        "TOKENIZERS_PARALLELISM": "false",
        **variables,
    }
    wanted = lambda path: any(fnmatch.fnmatch(path, glob) for glob in args.only)  # noqa: E731
    files = sorted({one for glob in seed.tests for one in clone.glob(glob)})
    for file in filter(wanted, (str(one.relative_to(clone)) for one in files)):
        note = reason(seed.not_taken, file)
        yield Row(file, note=note) if note else run_tests(seed, file, copy, env, args)
    for script in seed.scripts:
        if wanted(script.path):
            yield run_script(seed, script, copy, work, env, args.limit)
    for name, make in seed.more(clone).items():
        if wanted(name):
            yield make()


def with_earlier(rows: Sequence[Row], kept: Path) -> list[Row]:
    """The rows and, of files that did not run this time, those that a run in the same folder left; all are kept.

    Tests come first, then examples, then the rest, each by name.
    """
    known = {one["file"]: Row(**one) for one in json.loads(kept.read_text())} if kept.is_file() else {}
    known |= {row.file: row.over(known[row.file]) if row.file in known else row for row in rows}
    kept.write_text(json.dumps([asdict(row) for row in known.values()]))
    kinds = ["tests", "examples"]
    place = lambda row: (kinds.index(row.kind) if row.kind in kinds else len(kinds), row.file)  # noqa: E731
    return sorted(known.values(), key=place)


def rewritten(text: str, imports: Sequence[Change], ids: Mapping[str, Path]) -> str:
    """A source with its imports changed and its hub's data replaced by stand-ins."""
    for change in imports:
        text = change(text)
    for name, folder in ids.items():
        text = re.sub(
            rf"""(["']){re.escape(name)}\1""", lambda quote, to=folder: f"{quote[1]}{to}{quote[1]}", text
        )
    return text


def run_tests(seed: Seed, file: str, copy: Path, env: Mapping[str, str], args: argparse.Namespace) -> Row:
    """One test file, under pytest, in a process of its own."""
    changes = [one for glob, found in seed.changes.items() if fnmatch.fnmatch(file, glob) for one in found]
    text, made = (copy / file).read_text(), []
    for change in changes:
        if (changed := change(text)) != text:
            text, made = changed, [*made, change.words]
    (copy / file).write_text(text)
    report = copy / "report.jsonl"
    report.write_text("")
    command = [sys.executable, "-m", "pytest", "-qq", "-p", "no:cacheprovider"]
    command += [
        "-p",
        "benchmarks.seeds.plugin",
        "--tb=line",
        file,
        *(["-k", args.keyword] if args.keyword else []),
    ]
    limits = {"SEED_REPORT": str(report), "SEED_TEST_LIMIT": str(args.test_limit)}
    output, code = _run(command, copy, {**env, **limits}, args.limit)
    (copy / f"{Path(file).stem}.log").write_text(output)
    seen: dict[str, tuple[str, str]] = {}
    for line in report.read_text().splitlines():
        one = json.loads(line)
        if one["outcome"] == "collected":
            seen.setdefault(one["test"], ("failed", f"not reached: the process ended with {code}"))
        else:
            seen[one["test"]] = (one["outcome"], one["message"])
    row = Row(file, note="; ".join(filter(None, made)), ran=list(seen) if args.keyword else [])
    if not seen:
        row.failed.append((file, _last(output)))
    for test, (outcome, message) in seen.items():
        if "::" not in test:  # the file itself could not be read
            row.failed += [(test, message)] * (copy / file).read_text().count("def test_")
            continue
        why = reason(seed.inside, test)
        if outcome == "passed":
            row.passed += 1
        elif outcome == "skipped":
            row.skipped += 1
        elif why is not None:
            row.inside.append((test, why))
        else:
            row.failed.append((test, ": ".join(filter(None, (reason(seed.known, test), message)))))
    return row


def reason(reasons: Mapping[str, str], name: str) -> str | None:
    """That of the first glob that the name matches."""
    return next((why for glob, why in reasons.items() if fnmatch.fnmatch(name, glob)), None)


def run_script(seed: Seed, script: Script, copy: Path, work: Path, env: Mapping[str, str], limit: int) -> Row:
    """One script: as it is, then with its changes, one more at a time."""
    row = Row(script.path, kind="examples")
    if script.cannot:
        row.note = script.cannot
        return row
    text = (copy / script.path).read_text()
    for change in script.small:
        text = change(text)
    for count in range(len(script.changes) + 1):
        if count:
            text = script.changes[count - 1](text)
        out = work / "out" / script.path.replace("/", "_")
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        place = copy / script.path
        place.write_text(text)
        args = shlex.split(script.args.format(data=work / "stand_ins" / "data", out=out))
        output, code = _run([sys.executable, str(place), *args], out, env, limit)
        (copy / f"{place.stem}.log").write_text(output)
        if code == 0:
            row.passed = 1
            row.note = "; ".join(change.words for change in script.changes[:count])
            return row
        last = _last(output)
    why = reason(seed.inside, script.path)
    (row.failed if why is None else row.inside).append((script.path, why or last))
    return row


def table(seed: Seed, rows: Sequence[Row]) -> str:
    """Markdown: one line a file, and N of M."""
    lines = [f"**{seed.name}**: {counts(rows)}", "", "| file | passed | what is left |", "|---|---|---|"]
    for row in rows:
        passed = f"{row.passed} of {row.total}" if row.total else "-"
        lines.append(f"| `{row.file}` | {passed} | {_words(row)} |")
    return "\n".join(lines)


def counts(rows: Sequence[Row]) -> str:
    """The sentence with the sums."""
    found = []
    for kind in dict.fromkeys(row.kind for row in rows):
        ran = [row for row in rows if row.kind == kind]
        passed, total = sum(row.passed for row in ran), sum(row.total for row in ran)
        found.append(f"{passed} of {total} {kind} pass")
    inside, skipped = sum(len(row.inside) for row in rows), sum(row.skipped for row in rows)
    return (
        f"{', '.join(found)}; {inside} more tests are of the inside of torch or of the seed, {skipped} skip "
        "themselves."
    )


def _words(row: Row) -> str:
    """The last cell of a line: changes or reasons, what fails, what is of the inside."""
    parts = [row.note] if row.note else []
    parts += [f"{number}: {why}" for why, number in Counter(why for _, why in row.inside).items()]
    by_message = Counter(_short(message) for _, message in row.failed)
    parts += [f"{number} fail: {message}" for message, number in by_message.most_common()]
    if row.skipped:
        parts.append(f"{row.skipped} skip themselves")
    return "; ".join(parts) or "as is"


def _short(message: str) -> str:
    """A message in a table: one line, no machine's paths, no cells' borders."""
    text = re.sub(r"/\S*/", "", " ".join(message.split())).replace("|", "\\|").replace("`", "'")
    text = re.sub(r"<", "&lt;", text)
    return text if len(text) <= 160 else text[:157] + "..."


def write_docs(page: Path, marker: str, text: str) -> None:
    """Puts the text between the marker's two lines of a page."""
    begin, end = f"<!-- {marker} begin -->", f"<!-- {marker} end -->"
    before, _, rest = page.read_text().partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{page} must have the lines {begin} and {end}.")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def _run(command: Sequence[str], cwd: Path, env: Mapping[str, str], limit: int) -> tuple[str, int]:
    """(output, status) of a command; all that it started is ended with it."""
    start = time.monotonic()
    process = subprocess.Popen(
        command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return f"{output}\ntook longer than {limit} s", 124
    return f"{output}\n[{time.monotonic() - start:.0f} s]", process.returncode


def _last(output: str) -> str:
    """The line that names the error."""
    lines = [
        line.strip() for line in output.splitlines() if line.strip() and not re.match(r"\[\d+ s\]", line)
    ]
    errors = [line for line in lines if re.match(r"^[\w.]*(Error|Exception|Interrupt|Exit)\b", line)]
    return (errors or lines or [""])[-1]


def _say(row: Row) -> None:
    """Progress, and every failure in full."""
    print(f"{row.file}: {row.passed} of {row.total} (+{len(row.inside)} inside) {row.note}", file=sys.stderr)
    for test, message in row.failed:
        print(f"    {test}: {message[:400]}", file=sys.stderr, flush=True)


_PARAMETERIZED = '''
"""The one decorator of the package of this name that the tests use."""
import sys


class parameterized:
    @staticmethod
    def expand(cases):
        def decorate(function):
            names = sys._getframe(1).f_locals
            for number, case in enumerate(cases):
                case = case if isinstance(case, (tuple, list)) else (case,)
                def one(self, case=case):
                    return function(self, *case)
                names[f"{function.__name__}_{number}"] = one
        return decorate
'''
