# SPDX-License-Identifier: Apache-2.0
"""What no line of the package does, read off its source: unpickle, run texts, load unsafe YAML, trust foreign code."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest
import yaml

import jrl
from jrl.trainers.config import coercion

PACKAGE = Path(jrl.__file__).resolve().parent
# Their formats are programs: whoever reads them runs what they say.
PICKLES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle"}
RUNS = {"eval", "exec", "compile", "__import__", "execfile"}
# Each takes a name that the command line, or jrl itself, gives; tests of the folder hold that.
IMPORTERS = {
    "__init__.py",  # its own modules
    "cli/run.py",  # commands, from a fixed table; --import
    "trainers/config/layouts.py",  # its own modules, from a fixed table
    "trainers/config/method.py",  # the same
    "trainers/config/registry.py",  # the same
    "trl/__init__.py",  # its own modules
    "trl/module_paths.py",  # its own modules, from a fixed table
    "trlx/__init__.py",  # names of a fixed module
    "isolation_worker.py",  # a function that the run gave as an object, by the module that it is of
    "named_functions.py",  # --reward, --metric
    "sweep/trial.py",  # the script of `jrl sweep`
    "trainers/loggers/trackers.py",  # a tracker's package, from a fixed table
}
WORKERS = "data/sources/mapping.py"  # sends a function to processes that it spawned, through their own pipe


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Every file of the package, parsed when the first test asks: collection alone does not pay for it."""
    files = sorted(PACKAGE.rglob("*.py"))
    return {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in files
    }


@functools.cache
def nodes() -> list[tuple[str, ast.AST]]:
    return [(file, node) for file, tree in trees().items() for node in ast.walk(tree)]


def dotted(node: ast.AST) -> str:
    """A name as it is written; "?" for what is none."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


@functools.cache
def calls() -> list[tuple[str, str, ast.Call]]:
    """(file, name as it is written, call)."""
    return [(file, dotted(node.func), node) for file, node in nodes() if isinstance(node, ast.Call)]


def keyword(call: ast.Call, name: str) -> str | None:
    return next((ast.unparse(found.value) for found in call.keywords if found.arg == name), None)


def test_the_walk_sees_the_package():
    assert len(calls()) > 5000
    assert ("trainers/config/coercion.py", "yaml.load") in {(file, name) for file, name, _ in calls()}


def test_nothing_is_unpickled():
    imported = {
        (file, name.split(".")[0])
        for file, node in nodes()
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        )
    }
    assert {(file, name) for file, name in imported if name in PICKLES} == {(WORKERS, "pickle")}
    of_workers = [name for file, name, _ in calls() if file == WORKERS and name.startswith("pickle.")]
    assert sorted(of_workers) == ["pickle.dumps", "pickle.loads"]
    assert not [file for file, name, _ in calls() if name in ("torch.load", "read_pickle", "pd.read_pickle")]


def test_what_workers_unpickle_was_sent_by_the_process_that_spawned_them():
    """The one `pickle.loads` stands in the initializer of the pool, whose argument is the `pickle.dumps` beside it."""
    functions = {
        node.name: ast.unparse(node)
        for node in ast.walk(trees()[WORKERS])
        if isinstance(node, ast.FunctionDef)
    }
    readers = [name for name, text in functions.items() if "pickle.loads" in text]
    assert readers == ["_begin_worker"]
    assert "initializer=_begin_worker, initargs=(payload,)" in functions["_started"]
    assert "payload = pickle.dumps(call)" in functions["_started"]


def test_numpy_is_told_not_to_unpickle():
    found = [
        (file, keyword(call, "allow_pickle")) for file, name, call in calls() if name.endswith("np.load")
    ]
    assert found and all(allowed == "False" for _, allowed in found), found
    assert not [
        file for file, name, _ in calls() if name.endswith(("np.fromregex", "numpy.load", "jnp.load"))
    ]


def test_no_text_is_run():
    assert not [(file, name) for file, name, _ in calls() if name in RUNS]
    shells = ("os.system", "os.popen", "os.exec", "os.spawn", "subprocess.", "pty.spawn")
    started = {(file, ast.unparse(call)) for file, name, call in calls() if name.startswith(shells)}
    # This Python, on a program of jrl's own, and the driver's list of GPUs: no shell, no text from elsewhere.
    assert all("shell" not in call for _, call in started)
    (doctor, driver), (file, call) = sorted(started)
    assert doctor == "cli/environment.py" and "[program, '-L']" in driver
    assert file == "isolation.py" and "[sys.executable, '-P', str(_PROGRAM)]" in call
    texts = {
        ast.unparse(node) for file, node in nodes() if file == "isolation.py" and isinstance(node, ast.Assign)
    }
    assert "_PROGRAM = Path(__file__).with_name('isolation_worker.py')" in texts


def test_yaml_is_loaded_by_a_safe_loader():
    loaded = {
        (file, ast.unparse(call))
        for file, name, call in calls()
        if name.startswith("yaml.") and "load" in name
    }
    unsafe = {(file, text) for file, text in loaded if not text.startswith("yaml.safe_load(")}
    assert unsafe == {("trainers/config/coercion.py", "yaml.load(text, _Loader)")}
    assert issubclass(coercion._Loader, yaml.SafeLoader)
    names = set(coercion._Loader.yaml_constructors) | set(coercion._Loader.yaml_multi_constructors)
    assert not [name for name in names if name and "python" in name]


@pytest.mark.parametrize("loader", ["AutoTokenizer.from_pretrained", "AutoConfig.from_pretrained"])
def test_transformers_is_told_not_to_trust(loader):
    found = [(file, keyword(call, "trust_remote_code")) for file, name, call in calls() if name == loader]
    assert found and all(trusted == "False" for _, trusted in found), found


def test_no_other_loader_of_transformers_or_datasets_is_used():
    # A class named in the source reads its own files; only the Auto classes may be led to another one.
    classes = ("AutoTokenizer", "AutoConfig", "CLIPTokenizer", "T5Tokenizer")
    known = {f"{name}.from_pretrained" for name in classes}
    own = ("AutoModelForCausalLM", "kind", "self.model_class", "load")
    found = {
        name
        for _, name, _ in calls()
        if name.endswith((".from_pretrained", "load_dataset", "load_from_disk"))
    }
    assert {name for name in found - known if not name.startswith(own)} == set()
    partials = [ast.unparse(call) for _, name, call in calls() if name == "functools.partial"]
    assert "functools.partial(load_dataset, trust_remote_code=False)" in partials


def test_only_these_files_import_by_name():
    found = {file for file, name, _ in calls() if name.endswith(("import_module", "spec_from_file_location"))}
    assert found == IMPORTERS


def test_archives_are_not_unpacked():
    assert not [
        (file, name)
        for file, name, _ in calls()
        if name.endswith((".extractall", ".extract", "unpack_archive", "ZipFile", "tarfile.open"))
    ]
